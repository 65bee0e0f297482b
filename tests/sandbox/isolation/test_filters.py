"""The shipped filters, read as the kernel reads them, for both architectures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from mrl.sandbox.confine.filters import FILTERS

GENERATOR = Path(__file__).parents[3] / "scripts" / "build_seccomp.py"
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
PID = 4242


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_seccomp", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not all(any(Path(path).exists() for path in paths) for paths in module.HEADERS.values()):
        pytest.skip("needs the kernel's headers (linux-libc-dev)")
    return module


def decide(machine: str, layer: str, audit: int, number: int, args: tuple[int, ...] = ()) -> int:
    """Classic BPF, the five instructions that are used."""
    text = FILTERS[machine, layer].replace("7f0e1d2c", f"{PID:08x}")
    code = [(int(p[:4], 16), int(p[4:6], 16), int(p[6:8], 16), int(p[8:], 16))
            for p in (text[i : i + 16] for i in range(0, len(text), 16))]  # fmt: skip
    memory = {0: number, 4: audit} | {16 + 8 * i: arg & 0xFFFFFFFF for i, arg in enumerate(args)}
    register = at = 0
    while True:
        operation, if_true, if_false, constant = code[at]
        at += 1
        if operation == 0x20:
            register = memory.get(constant, 0)
        elif operation == 0x54:
            register &= constant
        elif operation in (0x15, 0x35):
            holds = register == constant if operation == 0x15 else register >= constant
            at += if_true if holds else if_false
        else:
            assert operation == 0x06
            return constant


def test_shipped_is_what_the_generator_makes(generator: ModuleType) -> None:
    assert generator.TARGET.read_text() == generator.render()


def test_decisions(generator: ModuleType) -> None:
    thread, process = 0x3D0F00, 17
    everywhere = [
        ("read", (), ALLOW), ("futex", (), ALLOW), ("execve", (), EPERM), ("execveat", (), EPERM),
        ("clone", (thread,), ALLOW), ("clone", (process,), EPERM), ("clone", (thread | 0x10000000,), EPERM),
        ("clone3", (), ENOSYS), ("socket", (1, 1), EPERM), ("socketpair", (1, 1), ALLOW),
        ("socketpair", (1, 0x80001), ALLOW), ("socketpair", (1, 2), EPERM), ("socketpair", (2, 1), EPERM),
        ("connect", (), EPERM), ("kill", (PID,), ALLOW), ("kill", (1,), EPERM), ("kill", (-1,), EPERM),
        ("tgkill", (PID, 5, 9), ALLOW), ("tkill", (PID,), EPERM), ("prlimit64", (0,), ALLOW),
        ("prlimit64", (1,), EPERM), ("prctl", (15,), ALLOW), ("prctl", (1,), EPERM), ("prctl", (22,), EPERM),
        ("fcntl", (0, 3), ALLOW), ("fcntl", (0, 8), EPERM), ("fcntl", (0, 10), EPERM), ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, 0x5412), EPERM), ("ptrace", (), EPERM), ("process_vm_readv", (), EPERM), ("bpf", (), EPERM),
        ("io_uring_setup", (), EPERM), ("memfd_create", (), EPERM), ("userfaultfd", (), EPERM), ("mount", (), EPERM),
        ("unshare", (), EPERM), ("setns", (), EPERM), ("chroot", (), EPERM), ("pidfd_open", (), EPERM),
        ("pidfd_send_signal", (), EPERM), ("perf_event_open", (), EPERM), ("setuid", (), EPERM),
        ("landlock_create_ruleset", (), EPERM), ("shmget", (), EPERM), ("mq_open", (), EPERM), ("swapon", (), EPERM),
    ]  # fmt: skip
    per_layer = {
        "A": [("openat", (), ALLOW), ("unlinkat", (), ALLOW), ("newfstatat", (), ALLOW)],
        "B": [("openat", (), ALLOW), ("unlinkat", (), EPERM), ("truncate", (), EPERM), ("fchmodat", (), EPERM)],
        "C": [("openat", (), EPERM), ("newfstatat", (0, 0, 0, 0), EPERM), ("newfstatat", (0, 0, 0, 0x1000), ALLOW)],
    }
    for machine in generator.HEADERS:
        numbers = generator.syscall_numbers(machine)
        numbers.setdefault("clone3", 435)
        for layer, more in per_layer.items():
            for name, args, expected in everywhere + more:
                got = decide(machine, layer, generator.AUDIT[machine], numbers[name], args)
                assert got == expected, (machine, layer, name, args)


def test_other_architectures_and_tables_are_killed(generator: ModuleType) -> None:
    for machine, layer in FILTERS:
        assert decide(machine, layer, 0x40000003, 3) == KILL  # i386's numbers through int 0x80
        assert decide(machine, layer, generator.AUDIT[machine], 0x40000000 | 1) == KILL
