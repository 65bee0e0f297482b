"""The C libraries of the standard library's modules (of sqlite3, bz2, lzma …), where they are the system's own.

They are found by loading the modules in a copy of this process and looking at what that mapped: what one interpreter
links another has built in, and no list of paths is right for two distributions.
"""

from __future__ import annotations

import contextlib
import os

MODULES = ("_sqlite3", "_bz2", "_lzma", "_uuid", "_ctypes", "_hashlib", "zlib", "_curses")


def libraries(below: list[str]) -> list[str]:
    """Paths under which the loader will look for them, apart from those below the folders `below`."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            before = _mapped()
            for name in MODULES:
                with contextlib.suppress(ImportError):  # not built, or its library is missing
                    __import__(name)
            os.write(writer, "\n".join(_mapped() - before).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        found = [path for path in pipe.read().split("\n") if path]
    os.waitpid(pid, 0)
    outside = [path for path in found if not any(path.startswith(folder + "/") for folder in below)]
    return [spelling for path in outside for spelling in _spellings(path)]


def _mapped() -> set[str]:
    with open("/proc/self/maps") as maps:
        return {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if ".so" in line and "/" in line}


def _spellings(path: str) -> list[str]:
    """It and the links beside it that lead to it: programs ask for `libz.so.1`, the file is `libz.so.1.2.13`."""
    folder, name = os.path.split(path)
    stem = name.partition(".so")[0] + ".so"
    beside = (os.path.join(folder, other) for other in sorted(os.listdir(folder)) if other.startswith(stem))
    return [other for other in beside if os.path.realpath(other) == os.path.realpath(path)]
