"""Files and network through Landlock: everything refused but reading below a few folders."""

from __future__ import annotations

import contextlib
import ctypes
import os

from . import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All file rights that each version of Landlock knows; what a ruleset handles and no rule allows is refused."""


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def restrict(read: list[str]) -> None:
    """This process and its children may only read below `read` (and use /dev/null). Needs no_new_privs. OSError."""
    version = kernel.landlock_abi()
    if version == 0:
        raise OSError("this kernel has no Landlock")
    rights = FS_RIGHTS[min(version, 5)]
    wanted = _Ruleset(rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    ruleset = kernel.landlock_create(wanted)
    try:
        for path in read:
            _allow(ruleset, path, READ_FILE | READ_DIR)
        _allow(ruleset, os.devnull, READ_FILE | WRITE_FILE)
        _allow(ruleset, "/dev/urandom", READ_FILE)
        kernel.landlock_restrict(ruleset)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # nothing there to allow
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not os.path.isdir(path):
                rights &= ~READ_DIR
            kernel.landlock_allow_path(ruleset, _PathBeneath(rights, fd))
        finally:
            os.close(fd)
