"""What ranks wrote where rank 0 does not look."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.actor.parallel import files
from mrl.actor.parallel.world import join
from mrl.errors import CheckpointError
from tests.actor.parallel.ranks import processes

pytestmark = pytest.mark.slow


def gather(folders: list[str | None], targets: list[str]) -> list[str | None]:
    """What is said on this rank for each of the targets."""
    files.CHUNK = 1000
    world = join("cpu", 60)
    said: list[str | None] = []
    own = folders[world.rank]
    for target in targets:
        try:
            files.gather_files(world, Path(target), None if own is None else Path(own))
            said.append(None)
        except CheckpointError as error:
            said.append(str(error))
    world.close()
    return said


def test_what_ranks_wrote_for_themselves_comes_to_rank_0(tmp_path: Path) -> None:
    """Nothing, little, and more than is sent at once; and what cannot be written is said on every rank."""
    wanted = {"a": b"", "b": b"1", "c": bytes(range(256)) * 20, "d": b"x" * 1000}
    (tmp_path / "own").mkdir()
    for name, content in wanted.items():
        (tmp_path / "own" / name).write_bytes(content)
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.mkdir()
    with processes(3) as group:
        said = group.run(gather, [None, None, str(tmp_path / "own")], [str(missing), str(there)])
    assert {path.name: path.read_bytes() for path in there.iterdir()} == wanted
    for refused, done in said:
        assert refused.startswith(f"{missing}: ")
        assert "cannot be written (No such file or directory); free space there" in refused
        assert done is None
