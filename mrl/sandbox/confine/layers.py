"""The layers of isolation, and how a server and its children enter them.

| layer | server | each child |
|---|---|---|
| A | user, pid, mount, ipc, net, uts namespaces; a root without /proc; a tmpfs each time | pid namespace, seccomp |
| B | — | Landlock (reads the standard library, writes nothing), seccomp |
| C | — | seccomp that opens no file |
| unsafe | — | limits only; a folder of its own |

Every child of every layer gets rlimits, loses its capabilities and gains no_new_privs. Root becomes another user
before any of it; without isolation, in each child, a program another than its judge: it reaches no process then.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
from collections.abc import Sequence
from typing import Any

from . import kernel, landlock, namespaces, scratch
from .kernel import Act
from .names import LAYERS
from .seccomp import Filter

FIRST_FOREIGN = 5
"""The first descriptor that a child does not have."""
RLIMIT_SIGPENDING = 11  # Python has no name for it: a timer counts as a signal, and takes the kernel's memory
FIXED = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_STACK: 64 << 20,
    RLIMIT_SIGPENDING: 64,
}
LIMITED = [getattr(resource, f"RLIMIT_{name}") for name in ("CPU", "FSIZE", "NOFILE", "AS", "NPROC")]
"""By the execution's limits."""
CEILINGS = {kind: resource.getrlimit(kind)[1] for kind in (*FIXED, *LIMITED)}
NOTES_MB, JUDGE_FILES = 64, 16
"""What a judge may write down (where it may write files otherwise, there is less room), and open, at least."""
FIRST_UID, UIDS = 61184, 2168  # systemd's range for users made up on the spot: half for programs, half for judges


def become_nobody(paths: list[str], layer: str) -> tuple[int | None, dict[str, str]]:
    """As root: give up every right, for good. Returns the new user id (None: same as before) and where `paths` are."""
    where = {path: path for path in paths}
    if os.geteuid() != 0:
        return None, where
    uid = FIRST_UID + os.getpid() % UIDS
    if layer == "unsafe":
        return (uid if _may_become(uid) else None), where
    if layer == "A":
        with contextlib.suppress(PermissionError):  # root that may not mount (containers): the paths must be public
            where = namespaces.stage(paths)
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:  # root of a user namespace without other users: the capabilities go all the same, in each child
        return None, where
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root and no ids can be mapped
    return uid, where


def _may_become(uid: int) -> bool:
    """As root."""
    try:
        os.seteuid(uid)
        os.seteuid(0)
    except OSError:  # root of a user namespace without other users
        return False
    return True


def is_public(path: str) -> bool:
    """Whether every user may enter all folders down to `path`."""
    while os.stat(path).st_mode & 1:
        if path == "/":
            return True
        path = os.path.dirname(path)
    return False


def installed_packages(library: list[str], wanted: list[str]) -> list[str]:
    """The folders below `library` where packages are installed that no program asked for: what lies in them (a data set
    with its solutions, this package's own tests) is not the standard library's."""
    inner = (os.path.join(path, name) for path in library for name in ("site-packages", "dist-packages"))
    return [folder for folder in inner if os.path.isdir(folder) and folder not in wanted]


def may_read(path: str) -> bool:
    return os.access(path, os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK)


class Confinement:
    """What the children of one server enter. Built before the first fork."""

    def __init__(self, layer: str, readable: list[str], uid: int | None, withheld: list[str], scratch: str) -> None:
        """withheld: folders directly below some of `readable`, which layer B does not let read. scratch: see `scratch`,
        without isolation."""
        self.layer, self.uid, self.scratch = layer, uid, scratch
        self.work = ""
        """Where a child without isolation is."""
        self.readable = [path for path in readable if may_read(path)]  # else: only preloaded ones
        self.own_user = uid is not None or layer == "A"  # then the kernel counts its threads and nobody else's
        self.filter = Filter(layer) if layer in LAYERS else None
        self.ruleset = landlock.make_ruleset(self.readable, withheld) if layer == "B" else None
        self.baseline = 0

    def settle(self, baseline: int) -> None:
        """In the server, for good: what its children are to have, and it can do without too. baseline: bytes of address
        space a child is born with."""
        self.baseline = baseline
        os.umask(0o077)
        perform([limit(kind, value) for kind, value in FIXED.items()])
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if self.filter is not None:
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # a crash starts no core dump handler, which would run outside

    def clear_scratch(self, megabytes: int) -> None:
        """In the server, before it forks what runs a program and its tests: where they may write. Raises OSError."""
        if self.layer == "A":
            namespaces.fresh_scratch(megabytes)
        elif self.layer == "unsafe":
            self.clear_work()
            self.work = scratch.make_inner(self.scratch, self.uid)
            os.chdir(self.work)

    def clear_work(self) -> None:
        """In the server, when nothing of an execution without isolation runs any more."""
        os.chdir("/")
        scratch.remove(self.work)

    def acts(self, limits: Sequence[Any], parent: int, judges: bool) -> list[Act]:
        """What a child does to enter the layer. Made in the server: what a child makes is pages that it copies.

        limits: see `protocol.LAUNCH`. judges: it will not run a program."""
        _, cpu_seconds, file_mb, memory_mb, open_files, threads = limits
        acts: list[Act] = [
            limit(resource.RLIMIT_CPU, max(1, math.ceil(cpu_seconds))),
            limit(resource.RLIMIT_FSIZE, (max(file_mb, NOTES_MB) if judges else file_mb) << 20),
            limit(resource.RLIMIT_NOFILE, max(open_files, JUDGE_FILES) if judges else open_files),
            limit(resource.RLIMIT_AS, self.baseline + (memory_mb << 20)),
            limit(resource.RLIMIT_NPROC, thread_limit(threads, self.own_user)),
        ]
        if self.layer == "unsafe":
            acts.append(("setsid", os.setsid, ()))  # what it forks is killed as a group
        if self.layer == "unsafe" and self.uid is not None:
            uid = self.uid + UIDS if judges else self.uid
            acts += [
                ("umask", set_umask, (0o007,)),  # they share files through their group
                ("setgroups", os.setgroups, ([],)),
                ("setresgid", os.setresgid, (self.uid, self.uid, self.uid)),
                ("setresuid", os.setresuid, (uid, uid, uid)),
            ]
        acts.append(kernel.DROP_CAPABILITIES)
        if self.layer != "A":  # there the kernel ends what is left in the server's pid namespace
            acts.append(kernel.act("prctl", kernel.PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0))
            acts.append(("look for the server", end_without, (parent,)))
        if self.ruleset is not None:
            acts.append(kernel.landlock_restrict(self.ruleset))
        acts.append(("close", os.closerange, (FIRST_FOREIGN, 4096)))
        if self.filter is not None:
            acts += self.filter.acts(own_pid=1 if self.layer == "A" else None)
        return acts


def perform(acts: Sequence[Act]) -> None:
    """In the child. Raises OSError."""
    for name, act, args in acts:
        if act(*args):
            raise OSError(f"{name} was refused")


def end_without(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)


def set_umask(mask: int) -> None:
    os.umask(mask)


def limit(kind: int, wanted: int) -> Act:
    """Soft equal to hard, so that nothing can be raised. In a pid namespace's first process the kernel drops SIGXCPU:
    a hard limit's SIGKILL is what ends it."""
    ceiling = CEILINGS[kind]
    value = wanted if ceiling == resource.RLIM_INFINITY or wanted < ceiling else ceiling
    return f"limit {kind}", resource.setrlimit, (kind, (value, value))


def thread_limit(wanted: int, own_user: bool) -> int:
    """RLIMIT_NPROC counts the threads of a user: the server's and supervisor's, and those of a second child, are among
    them. Without a user of our own everybody's are counted: then it only stops a flood."""
    if own_user:
        return wanted + 3
    try:
        with open("/proc/loadavg") as file:
            return wanted + 64 + int(file.read().split()[3].partition("/")[2])
    except OSError:
        return wanted + 4096
