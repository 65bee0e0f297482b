"""The fork-server of one slot: a warm interpreter that turns copies of itself into programs and never sees one.

Requests arrive over SEQPACKET, one datagram each: limits, and the descriptors a child gets. The code itself travels
on the child's own channel, so this process's memory, which every child inherits, holds nothing of earlier ones.
"""

from __future__ import annotations

import _socket
import builtins
import contextlib
import gc
import os
import random
import signal
import struct
import sys

from .. import protocol
from ..confine import kernel
from ..confine.layers import Confinement, perform
from ..judge import values
from ..protocol import BOTH, ENDED, JUDGE, LAUNCH, PROGRAM, REAP, STARTED, Kind
from . import child

_COMMON = """
__future__ _bisect _collections_abc _datetime _decimal _heapq _json _random _struct abc array bisect builtins
collections collections.abc contextlib copy dataclasses datetime decimal enum fractions functools gc heapq io itertools
json math numbers operator os os.path random re reprlib string struct sys time types typing warnings weakref
"""
COMMON = _COMMON.split()
"""What solutions use often, or this package does: each costs every fork a little, and a C library of its own much."""
_RARE = """
_blake2 _bz2 _csv _ctypes _hashlib _lzma _md5 _opcode _pickle _posixsubprocess _queue _sha1 _sha256 _sha512 _sqlite3
_statistics _strptime _uuid _zoneinfo argparse ast asyncio atexit base64 binascii bz2 calendar cmath cmd code codecs
codeop concurrent.futures concurrent.futures.thread configparser contextvars copyreg csv ctypes difflib dis doctest
email encodings.idna encodings.latin_1 errno fileinput fnmatch getopt getpass gettext glob graphlib gzip hashlib hmac
html html.parser imaplib importlib importlib.util inspect ipaddress keyword linecache locale logging lzma marshal
mimetypes opcode optparse pathlib pickle pickletools platform plistlib posixpath pprint profile pstats queue sched
secrets select selectors shelve shlex shutil signal socket sqlite3 stat statistics stringprep subprocess symtable
sysconfig tarfile tempfile textwrap threading timeit token tokenize tomllib trace traceback unicodedata unittest
unittest.mock urllib.parse urllib.request uuid wave xml.dom.minidom xml.etree.ElementTree zipfile zlib zoneinfo
"""
RARE = _RARE.split()
"""What else they import where nothing can be opened any more: in layer C, and below a root's private folders."""

REQUESTS = 5
"""The descriptor that requests arrive on. Those below are free: a child's stdin, stdout, stderr, channel and link
arrive there, where it is to have them."""
JUDGES = {PROGRAM: (False,), JUDGE: (True,), BOTH: (True, False)}
"""Which of the children judge."""
RIGHTS = struct.Struct("=10i")
SPACE = _socket.CMSG_SPACE(RIGHTS.size)


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


def serve(requests: _socket.socket, confinement: Confinement, baseline: int) -> None:
    """Until the supervisor is gone. A LAUNCH is answered with a pidfd and a pid for each child, a REAP with how a child
    ended. requests: its descriptor is REQUESTS.

    baseline: bytes of address space every child is born with.

    What happens between two forks is little and flat, for each page that is written to then is copied.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL))
    me, apart, unsafe = os.getpid(), confinement.layer == "A", confinement.layer == "unsafe"
    _, unshare, to_new = kernel.act("unshare", kernel.CLONE_NEWPID)
    _, setns, to_own = kernel.act("setns", os.pidfd_open(me), kernel.CLONE_NEWPID)
    if unsafe:  # what a program leaves behind becomes ours, and ends with it
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 - each child's own
    sys.__stdin__ = sys.stdin  # type: ignore[misc]
    confinement.settle(baseline)
    child.rehearse()
    random.seed(0)  # the same program does the same thing every time
    gc.collect()
    gc.freeze()  # collections in the children do not touch, and so do not copy, our pages
    requests.send(Kind.READY.byte)
    os.closerange(0, REQUESTS)  # what a child is given arrives there
    receive, send, fork, close, open_handle = requests.recvmsg, requests.sendmsg, os.fork, os.close, os.pidfd_open
    reap_byte, started_byte, pack_started = REAP.byte, STARTED.byte, STARTED.form.pack
    last, acts_of_each = b"", list[list[kernel.Act]]()
    while True:
        data, rights, _, _ = receive(64, SPACE)
        if not data:
            os._exit(0)
        if data[:1] == reap_byte:
            requests.send(reap(confinement, *REAP.unpack(data)))
            continue
        if data != last or not confinement.own_user:
            last, limits = data, LAUNCH.unpack(data)
            acts_of_each = [confinement.acts(limits, me, judges) for judges in JUDGES[limits[0]]]
        if limits[0] != JUDGE:  # which shares the folder of the program that is there
            confinement.clear_scratch(limits[2])
        for second, acts in enumerate(acts_of_each):
            if apart and unshare(*to_new):
                raise OSError("unshare was refused")
            pid = fork()
            if pid == 0:
                become(second, rights, acts)
            if apart and setns(*to_own):  # the next child gets a pid namespace of its own again
                raise OSError("setns was refused")
            handle = open_handle(pid)
            pidfd = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, protocol.DESCRIPTOR.pack(handle))
            send((pack_started(started_byte, pid),), (pidfd,))
            close(handle)
        os.closerange(0, REQUESTS)
        if len(acts_of_each) == 2:
            for fd in RIGHTS.unpack(rights[0][2])[REQUESTS:]:
                close(fd)


def become(second: int, rights: list, acts: list[kernel.Act]) -> None:
    """In the child: what it is to be, and then what it is told. Never returns."""
    try:
        if second:
            for target, fd in enumerate(RIGHTS.unpack(rights[0][2])[REQUESTS:]):
                os.dup2(fd, target)
        perform(acts)
    except BaseException as error:  # whatever it is, the program was not run
        message = f"{type(error).__name__}: {error}".encode("ascii", "backslashreplace")[:1000]
        protocol.send(child.CONTROL, Kind.NOT_CONFINED, message)
        os._exit(1)
    child.run()


def reap(confinement: Confinement, pid: int, last: bool) -> bytes:
    """How a child ended. pid: 0 for none. last: nothing of the execution is to go on."""
    if confinement.layer != "unsafe":
        return ENDED.pack(*kernel.wait(pid))
    if pid:
        end_group(pid)
    ended = ENDED.pack(*(kernel.wait(pid) if pid else (0, 0.0, 0)))
    if last:
        end_orphans()
        confinement.clear_work()
    return ended


def end_group(pid: int) -> None:
    """Kill what a program without isolation has forked: it would keep the link to the judge open. The number is still
    its own, for it has not been waited for."""
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
