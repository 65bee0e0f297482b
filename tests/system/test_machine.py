"""Which machine this is: the kernel's answer, not a name's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mrl.system import machine
from mrl.system.machine import machine_id

SAY = f"{sys.executable} -c 'from mrl.system.machine import machine_id; print(machine_id())'"


def said_within(*namespaces: str, first: str = "true") -> str:
    """What a process in new namespaces of these kinds says, after the command `first`."""
    command = ["unshare", "--map-root-user", *namespaces, "sh", "-c", f"{first} && {SAY}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path.cwd())
    if done.returncode:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")
    return done.stdout.strip()


def test_processes_that_share_memory_are_on_one_machine_whatever_it_is_called() -> None:
    done = subprocess.run(["sh", "-c", SAY], capture_output=True, text=True, check=True, timeout=60, cwd=Path.cwd())
    assert done.stdout.strip() == machine_id()
    assert said_within("--uts", first="hostname another") == machine_id()


def test_containers_with_shared_memory_of_their_own_are_not() -> None:
    own = said_within("--mount", first="mount -t tmpfs none /dev/shm")
    assert own != machine_id()
    assert own.partition("/")[0] == machine_id().partition("/")[0], "it is the same kernel"


def test_where_the_kernel_has_no_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "absent")
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "absent")
    found = machine_id.__wrapped__()
    assert found == machine_id.__wrapped__()
    assert found.endswith("/none")
    assert len(found) > len("/none")
