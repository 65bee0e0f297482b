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

from . import frames, kernel
from .child import run_calls, run_script
from .layers import Confinement
from .objects import run_objects
from .tester import run_tests

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
    from _sitebuiltins import Quitter

    for name in ("exit", "quit"):  # the interpreter runs without `site`, which would make them
        setattr(builtins, name, Quitter(name, "Ctrl-D (i.e. EOF)"))
    "".encode("unicode_escape")


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
        for first, end in pairwise((3, confinement.ruleset or 3, 4096)):
            os.closerange(first + 1, end)
        os.setsid()
        confinement.enter(limits, parent, baseline)
        gc.enable()
        random.seed(0)  # the same program does the same thing every time
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.__stdin__ = sys.stdin  # type: ignore[misc]
    except BaseException as error:  # whatever it is, the program was not run
        message = f"{type(error).__name__}: {error}".encode("ascii", "backslashreplace")[:1000]
        os.write(3, frames.pack(b"S", message))
        os._exit(0)
    os.write(3, frames.pack(b"C"))  # from here on the program may speak; what it says of us is not believed
    run_program(3)


def run_program(channel: int) -> None:
    """Never returns. The first message is the program: `s` a script, `c` to be called, `o` to be used
    through proxies, `t` trusted tests that use those."""
    leave = os._exit
    try:
        kind, body = frames.read(channel)
        code = body.decode("utf-8", "surrogatepass")
        if kind == b"s":
            run_script(code, channel)
        elif kind == b"c":
            run_calls(code, channel)
        elif kind == b"o":
            run_objects(code, channel)
        elif kind == b"t":
            run_tests(json.loads(body), channel)
    finally:  # whatever the program broke: nothing of it goes further
        leave(1)


def reap(pid: int) -> dict[str, Any]:
    _, status, usage = os.wait4(pid, 0)
    return {"status": status, "cpu": usage.ru_utime + usage.ru_stime, "peak_kb": usage.ru_maxrss}
