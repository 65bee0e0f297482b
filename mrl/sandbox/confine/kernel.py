"""System calls that Python 3.11 has no name for. Each raises OSError."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from typing import Any

from .names import MACHINE

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SECCOMP_MODE_FILTER = 2

_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155},
    "aarch64": {"clone": 220, "pivot_root": 41},
}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same everywhere

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
LIBC.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
LIBC.syscall.restype = ctypes.c_long

Act = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""A name for it, a function that returns nothing or 0, its arguments. Everything is made before it is needed: what a
child makes, looks up or converts is written to pages that it then copies."""
_BARE = ctypes.PyDLL(None)  # keeps the interpreter's lock, and leaves errno alone
_STATUS, _USAGE = (ctypes.c_int * 1)(), (ctypes.c_long * 18)()
_TIMES = struct.Struct("@5l")


def act(function: str, *arguments: Any, name: str = "") -> Act:
    """A call of the C library. arguments: ints, or objects of ctypes, which it keeps. name: if not the function's."""
    made = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return name or function, _BARE[function], tuple(made)


DROP_CAPABILITIES = act("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
"""Every capability of this process. Nothing gives them back: it must also be unable to execute a file."""


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    _checked(LIBC.unshare(ctypes.c_int(flags)), f"unshare {flags:#x}")


def setns(fd: int, kind: int) -> None:
    _checked(LIBC.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    def text(value: str | None) -> bytes | None:
        return None if value is None else os.fsencode(value)

    _checked(LIBC.mount(text(source), os.fsencode(target), text(kind), flags, text(data)), f"mount {kind} on {target}")


def pivot_root(new: str, old: str) -> None:
    number = _NUMBERS[MACHINE]["pivot_root"]
    _checked(LIBC.syscall(ctypes.c_long(number), os.fsencode(new), os.fsencode(old)), "pivot_root")


def unmount_detached(path: str) -> None:
    _checked(LIBC.umount2(os.fsencode(path), ctypes.c_int(MNT_DETACH)), f"umount {path}")


def prctl(option: int, value: int, pointer: Any = None) -> None:
    _checked(LIBC.prctl(option, value, pointer, 0, 0), f"prctl {option}")


def wait(pid: int) -> tuple[int, float, int]:
    """Until a child has ended: its wait status, seconds of processor time, peak of resident kilobytes. (`os.wait4`
    looks for a module first, and makes an object of sixteen numbers.)"""
    if _BARE.wait4(pid, _STATUS, 0, _USAGE) != pid:
        raise ChildProcessError(f"no child {pid}")
    status, (user, user_micro, system, system_micro, peak) = _STATUS[0], _TIMES.unpack_from(_USAGE)
    _STATUS[0] = 0
    ctypes.memset(_USAGE, 0, ctypes.sizeof(_USAGE))  # the next child is a copy of this process
    return status, user + system + (user_micro + system_micro) / 1e6, peak


def set_hostname(name: str) -> None:
    data = name.encode()
    _checked(LIBC.sethostname(data, ctypes.c_size_t(len(data))), "sethostname")


def fork_into(namespaces: int) -> int:
    """`os.fork` whose child is the first process of new namespaces. Single-threaded callers only."""
    api = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock, as os.fork does
    api.syscall.restype = ctypes.c_long
    none = ctypes.c_long(0)
    number, flags = ctypes.c_long(_NUMBERS[MACHINE]["clone"]), ctypes.c_long(namespaces | 17)  # 17: SIGCHLD
    api.PyOS_BeforeFork()
    pid = api.syscall(number, flags, none, none, none, none)
    if pid == 0:
        api.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, f"clone {namespaces:#x}: {os.strerror(error)}")
    return pid


def landlock_abi() -> int:
    """Version of Landlock this kernel offers; 0 for none."""
    number = ctypes.c_long(_LANDLOCK_CREATE)
    return max(0, LIBC.syscall(number, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def landlock_create(attributes: Any) -> int:
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    number = ctypes.c_long(_LANDLOCK_CREATE)
    return _checked(LIBC.syscall(number, ctypes.byref(attributes), size, ctypes.c_uint32(0)), "landlock_create_ruleset")


def landlock_allow_path(ruleset: int, attributes: Any) -> None:
    number, ruleset_fd, path_beneath = ctypes.c_long(_LANDLOCK_ADD), ctypes.c_int(ruleset), ctypes.c_int(1)
    result = LIBC.syscall(number, ruleset_fd, path_beneath, ctypes.byref(attributes), ctypes.c_uint32(0))
    _checked(result, "landlock_add_rule")


def landlock_restrict(ruleset: int) -> Act:
    return act("syscall", _LANDLOCK_RESTRICT, ruleset, 0, name="landlock_restrict_self")
