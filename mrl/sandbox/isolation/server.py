"""The fork-server of one slot: a warm interpreter that turns copies of itself into programs and never sees one.

Requests arrive over SEQPACKET, one datagram each: limits, and the descriptors the child gets. The code itself travels
on the child's own channel, so this process's memory, which every child inherits, holds nothing of earlier ones.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import sys
from typing import Any

from . import child, kernel, objects, tester
from .layers import Confinement

COMMON = """
__future__ _bisect _blake2 _bz2 _collections_abc _csv _ctypes _datetime _decimal _hashlib _heapq _json _lzma _md5
_opcode _pickle _posixsubprocess _queue _random _sha1 _sha256 _sha512 _statistics _struct _uuid _zoneinfo abc argparse
array ast asyncio atexit base64 binascii bisect builtins bz2 calendar cmath codecs collections collections.abc
concurrent.futures contextlib contextvars copy copyreg csv ctypes dataclasses datetime decimal difflib dis email enum
errno fractions fnmatch functools gc getpass glob graphlib gzip hashlib heapq hmac html html.parser inspect io ipaddress
itertools json keyword linecache locale logging lzma math numbers opcode operator os os.path pathlib pickle pickletools
pprint queue random re reprlib sched secrets select selectors shutil signal socket stat statistics string stringprep
struct subprocess sys tempfile textwrap threading time timeit token tokenize traceback types typing unicodedata unittest
unittest.mock urllib.parse uuid warnings weakref xml.etree.ElementTree zipfile zlib zoneinfo
""".split()


def preload(extra: list[str]) -> None:
    """The modules that programs use, imported once. Raises ImportError for one of `extra`."""
    for name in COMMON:
        try:
            __import__(name)
        except ImportError:  # not built in this interpreter
            pass
    for name in extra:
        __import__(name)
    "".encode("unicode_escape")
    "".encode("idna")


def serve(requests: socket.socket, confinement: Confinement, baseline: int) -> None:
    """Until the supervisor is gone. Answers each request with pidfds, then with how the children ended.

    baseline: bytes of address space every child is born with.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
    own_pid_namespace = os.pidfd_open(os.getpid()) if confinement.layer == "A" else None
    me = os.getpid()
    gc.collect()
    gc.freeze()  # collections in the children do not touch, and so do not copy, our pages
    requests.send(b"ready")
    while True:
        data, fds, _, _ = socket.recv_fds(requests, 65536, 8)
        if not data:
            os._exit(0)
        request = json.loads(data)
        pids = [
            fork(part["fds"], fds, request["limits"], confinement, own_pid_namespace, me, baseline)
            for part in request["children"]
        ]
        handles = [os.pidfd_open(pid) for pid in pids]
        for fd in fds:
            os.close(fd)
        socket.send_fds(requests, [b"started"], handles)
        for fd in handles:
            os.close(fd)
        requests.send(json.dumps([reap(pid) for pid in pids]).encode())


def fork(
    numbers: list[int], fds: list[int], limits: dict, confinement: Confinement, home: int | None, me: int, baseline: int
) -> int:
    """numbers: which of `fds` are the child's stdin, stdout, stderr and channel."""
    if home is not None:
        kernel.unshare(kernel.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        become_program([fds[number] for number in numbers], limits, confinement, me, baseline)
        os._exit(1)
    if home is not None:
        kernel.setns(home, kernel.CLONE_NEWPID)  # the next child gets a namespace of its own again
    return pid


def become_program(fds: list[int], limits: dict, confinement: Confinement, parent: int, baseline: int) -> None:
    try:
        for target, fd in enumerate(fds):  # received descriptors are numbered above these
            os.dup2(fd, target, inheritable=False)
        os.closerange(4, 4096)
        os.setsid()
        confinement.enter(limits, parent, baseline)
        gc.enable()
        random.seed(0)  # the same program does the same thing every time
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.__stdin__ = sys.stdin  # type: ignore[misc]
    except BaseException as error:  # whatever it is, the program was not run
        message = f"{type(error).__name__}: {error}".encode("ascii", "backslashreplace")[:1000]
        os.write(3, child.frames.pack(b"S", message))
        os._exit(0)
    child.serve(3)


PROXIES = (objects, tester)  # imported before the fork


def reap(pid: int) -> dict[str, Any]:
    _, status, usage = os.wait4(pid, 0)
    return {"status": status, "cpu": usage.ru_utime + usage.ru_stime, "peak_kb": usage.ru_maxrss}
