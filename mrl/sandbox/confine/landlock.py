"""Files and network through Landlock: everything refused but reading below a few folders."""

from __future__ import annotations

import contextlib
import ctypes
import os

from . import kernel

WRITE_FILE, READ_FILE, READ_DIR = 2, 4, 8
FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All file rights that each version of Landlock knows; what a ruleset handles and no rule allows is refused."""

TRUNCATE_VERSION = 3
"""Linux 6.2. Before, `open(path, O_RDONLY | O_TRUNC)` needs only the right to read; the owner has the other."""


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def make_ruleset(read: list[str], withheld: list[str]) -> int:
    """A descriptor of rules: only read below `read`, but nothing in `withheld`, folders directly in some of those
    (names in them can be listed); and use /dev/null. Raises OSError."""
    version = kernel.landlock_abi()
    if version == 0:
        raise OSError("this kernel has no Landlock")
    if version < TRUNCATE_VERSION and any(os.stat(path).st_uid == os.getuid() for path in read):
        raise OSError(
            "this kernel's Landlock lets a file that may be read be emptied, and the library is this user's own"
        )
    rights = FS_RIGHTS[min(version, 5)]
    wanted = _Ruleset(rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    ruleset = kernel.landlock_create(wanted)
    try:
        for path in read:
            if any(os.path.dirname(other) == path for other in withheld):
                _allow(ruleset, path, READ_DIR)
                entries = {os.path.join(path, name) for name in os.listdir(path)}
            else:
                entries = {path}
            for entry in entries.difference(withheld):
                _allow(ruleset, entry, READ_FILE | READ_DIR)
        _allow(ruleset, os.devnull, READ_FILE | WRITE_FILE)
        _allow(ruleset, "/dev/urandom", READ_FILE)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def _allow(ruleset: int, path: str, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # nothing there to allow
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not os.path.isdir(path):
                rights &= ~READ_DIR
            kernel.landlock_allow_path(ruleset, _PathBeneath(rights, fd))
        finally:
            os.close(fd)
