"""Temporary folders end with their process, even when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mrl.system import scratch

KEEPER = (
    "import sys, time\nfrom pathlib import Path\nfrom mrl.system import scratch\n"
    "made = scratch.make('test', Path(sys.argv[1]))\n(made / 'file').write_text('x')\n"
    "print(made, flush=True)\ntime.sleep(600)\n"
)


def test_the_next_one_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / "mrl-notes").mkdir()
    (tmp_path / "mrl-notes" / "mine").write_text("not claimed by anybody")
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as keeper:
        assert keeper.stdout is not None
        theirs = Path(keeper.stdout.readline().strip())
        own = scratch.make("test", tmp_path)
        assert theirs.is_dir(), "its owner lives"
        keeper.kill()
    assert (theirs / "file").exists()
    third = scratch.make("other", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([own, third, tmp_path / "mrl-notes"])
    scratch.sweep(tmp_path)
    assert own.is_dir()
    scratch.remove(own)
    scratch.remove(own)
    assert not own.exists()
    scratch.remove(third)


def test_a_folder_can_be_claimed_again_after_its_owner_is_gone(tmp_path: Path) -> None:
    """As a resumed run does with the weights folder of the one that was killed."""
    folder = tmp_path / "run" / "weights"
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom mrl.system import scratch\nscratch.claim(Path(sys.argv[1]))\n"
    )
    subprocess.run([sys.executable, "-c", program + "os._exit(9)", str(folder)], check=False, cwd=Path.cwd())
    scratch.claim(folder)
    scratch.claim(folder)
    scratch.remove_abandoned(folder)
    assert folder.is_dir()
    assert [path.name for path in folder.iterdir()] == [scratch.LOCK]
    before = len(os.listdir("/proc/self/fd"))
    scratch.remove(folder)
    assert len(os.listdir("/proc/self/fd")) == before - 1
