"""The fork-server of one slot: a warm interpreter that turns copies of itself into programs and never sees one.

Requests arrive over SEQPACKET, one datagram each: limits, and the descriptors the child gets. The code itself travels
on the child's own channel, so this process's memory, which every child inherits, holds nothing of earlier ones.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import json
import os
import random
import signal
import socket
import sys
from itertools import pairwise
from typing import Any

from .. import protocol
from ..confine import kernel
from ..confine.layers import Confinement
from ..judge import values
from ..protocol import Kind
from . import child

_COMMON = """
__future__ _bisect _strptime _collections_abc _datetime _decimal _heapq _json _random _struct abc array ast base64
binascii bisect builtins calendar cmath collections collections.abc contextlib copy copyreg csv dataclasses datetime
decimal enum errno fractions functools gc hashlib heapq inspect io itertools json keyword linecache math numbers
operator os os.path queue random re reprlib secrets select selectors shutil signal socket stat statistics string
struct sys tempfile textwrap threading time traceback types typing unicodedata warnings weakref zlib
"""
COMMON = _COMMON.split()
"""What solutions use: each costs every fork a little."""
_RARE = """
_blake2 _bz2 _csv _ctypes _hashlib _lzma _md5 _opcode _pickle _posixsubprocess _queue _sha1 _sha256 _sha512
_sqlite3 _statistics _uuid _zoneinfo argparse asyncio atexit bz2 cmd code codecs codeop concurrent.futures
concurrent.futures.thread configparser contextvars ctypes difflib dis doctest email encodings.idna encodings.latin_1
fileinput fnmatch getopt getpass gettext glob graphlib gzip hmac html html.parser imaplib importlib importlib.util
ipaddress locale logging lzma marshal mimetypes opcode optparse pathlib pickle pickletools platform plistlib posixpath
pprint profile pstats sched shelve shlex sqlite3 stringprep subprocess symtable sysconfig tarfile timeit token
tokenize tomllib trace unittest unittest.mock urllib.parse urllib.request uuid wave xml.dom.minidom
xml.etree.ElementTree zipfile zoneinfo
"""
RARE = _RARE.split()
"""What else they import where nothing can be opened any more: in layer C, and below a root's private folders."""


def preload(rare: bool, extra: list[str]) -> None:
    """The modules that programs use, imported once. rare: nothing can be imported later.

    Raises ImportError for one of `extra`.
    """
    for name in COMMON + (RARE if rare else []):
        with contextlib.suppress(ImportError):  # not built in this interpreter
            __import__(name)
    for name in extra:
        __import__(name)
    if "pyarrow" in sys.modules:  # pandas' text: it looks only now which memory it is to take
        sys.modules["pyarrow"].default_memory_pool()
    values.add_numpy()
    from _sitebuiltins import Quitter

    for name in ("exit", "quit"):  # the interpreter runs without `site`, which would make them
        setattr(builtins, name, Quitter(name, "Ctrl-D (i.e. EOF)"))
    "".encode("unicode_escape")


def serve(requests: socket.socket, confinement: Confinement, baseline: int) -> None:
    """Until the supervisor is gone. `fork` is answered with pidfds and pids, `reap` with how those children ended.

    baseline: bytes of address space every child is born with.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
    own_pid_namespace = os.pidfd_open(os.getpid()) if confinement.layer == "A" else None
    me = os.getpid()
    if confinement.layer == "unsafe":  # what a program leaves behind becomes ours, and ends with it
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 - each child's own
    sys.__stdin__ = sys.stdin  # type: ignore[misc]
    child.rehearse()
    for _ in range(child.REHEARSALS):
        confinement.rehearse()
    gc.collect()
    gc.freeze()  # collections in the children do not touch, and so do not copy, our pages
    requests.send(b"ready")
    while True:
        data, fds, _, _ = socket.recv_fds(requests, 65536, 16)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if "reap" in request:
            if confinement.layer == "unsafe":
                end_groups(request["reap"])
            ends = [reap(pid) for pid in request["reap"]]
            if confinement.layer == "unsafe" and request["last"]:
                end_orphans()
                confinement.clear_work()
            requests.send(json.dumps(ends).encode())
            continue
        confinement.clear_scratch(request["limits"]["file_mb"])
        pids = [
            fork(
                [fds[number] for number in numbers],
                request["limits"],
                confinement,
                own_pid_namespace,
                me,
                baseline,
                request["judges"] and at == 0,
            )
            for at, numbers in enumerate(request["children"])
        ]
        handles = [os.pidfd_open(pid) for pid in pids]
        for fd in fds:
            os.close(fd)
        socket.send_fds(requests, [json.dumps(pids).encode()], handles)
        for fd in handles:
            os.close(fd)


def fork(
    fds: list[int], limits: dict, confinement: Confinement, home: int | None, me: int, baseline: int, judges: bool
) -> int:
    """fds: the child's stdin, stdout, stderr, channel and link."""
    if home is not None:
        kernel.unshare(kernel.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        become(fds, limits, confinement, me, baseline, judges)
        os._exit(1)
    if home is not None:
        kernel.setns(home, kernel.CLONE_NEWPID)  # the next child gets a namespace of its own again
    return pid


def become(fds: list[int], limits: dict, confinement: Confinement, parent: int, baseline: int, judges: bool) -> None:
    """In the child: what it is to be, and then what it is told."""
    try:
        for target, fd in enumerate(fds):  # received descriptors are numbered above these
            os.dup2(fd, target, inheritable=False)
        for first, end in pairwise((4, confinement.ruleset or 4, 4096)):
            os.closerange(first + 1, end)
        os.setsid()
        confinement.enter(limits, parent, baseline, judges)
        gc.enable()
        random.seed(0)  # the same program does the same thing every time
    except BaseException as error:  # whatever it is, the program was not run
        message = f"{type(error).__name__}: {error}".encode("ascii", "backslashreplace")[:1000]
        protocol.send(child.CONTROL, Kind.NOT_CONFINED, message)
        os._exit(0)
    protocol.send(child.CONTROL, Kind.CONFINED)  # from here on a program may speak; what it says of us is not believed
    child.run()


def reap(pid: int) -> dict[str, Any]:
    _, status, usage = os.wait4(pid, 0)
    return {"status": status, "cpu": usage.ru_utime + usage.ru_stime, "peak_kb": usage.ru_maxrss}


def end_groups(pids: list[int]) -> None:
    """Kill what programs without isolation have forked: it would keep the link to the judge open. The numbers are
    still theirs, for they have not been waited for."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def end_orphans() -> None:
    """Kill what a program without isolation started and left behind, however often it forks meanwhile."""
    path = f"/proc/self/task/{os.getpid()}/children"
    while True:
        with open(path) as file:
            pids = [int(pid) for pid in file.read().split()]
        if not pids:
            return
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
