"""A root of its own: the interpreter's library read-only, /dev/null, and nothing else of the host."""

from __future__ import annotations

import contextlib
import os
import stat

from . import kernel

INNER_ID = 1000
SCRATCH = "/tmp"
"""Inside: a fresh tmpfs per execution. `enter_new_root` takes another where the interpreter lies below this one."""
OTHER_SCRATCH = "/var/tmp"
SERVER_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWUTS
)
DEVICES = ("/dev/null", "/dev/urandom")


def stage(paths: list[str]) -> dict[str, str]:
    """As root, before the rights go: make `paths` reachable for an ordinary user although folders above them are not.

    Returns where each is now. In a mount namespace of this process alone. Raises OSError.
    """
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths}
    base = _mount_point()
    kernel.mount("tmpfs", base, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=64k")
    staged = {}
    for number, (path, fd) in enumerate(sources.items()):
        staged[path] = os.path.join(base, str(number))
        os.mkdir(staged[path], 0o755)
        kernel.mount(f"/proc/self/fd/{fd}", staged[path], None, kernel.MS_BIND)
        os.close(fd)
    return staged


def map_ids(uid: int, gid: int) -> None:
    """First thing in a new user namespace: outside `uid` is inside INNER_ID, and there is nobody else."""
    for name, text in (("setgroups", "deny"), ("gid_map", f"{INNER_ID} {gid} 1"), ("uid_map", f"{INNER_ID} {uid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter_new_root(binds: dict[str, str], emptied: list[str]) -> None:
    """binds: path inside -> path now. emptied: folders below that are to be empty. The old root is gone afterwards.
    Raises OSError."""
    global SCRATCH
    if any(path.startswith(SCRATCH + "/") for path in binds):
        SCRATCH = OTHER_SCRATCH
    kernel.set_hostname("sandbox")
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    sources = {path: os.open(source, os.O_PATH | os.O_CLOEXEC) for path, source in binds.items()}
    sources |= {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in DEVICES if os.path.exists(path)}
    base = _mount_point()
    kernel.mount("tmpfs", base, "tmpfs", kernel.MS_NOSUID, "mode=755,size=64k")
    for path, fd in sources.items():
        target = base + path
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.makedirs(target, 0o755, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(f"/proc/self/fd/{fd}", target, None, kernel.MS_BIND)
        if path not in DEVICES:
            _make_read_only(target)
        os.close(fd)
    for path in emptied:
        kernel.mount("tmpfs", base + path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=4k")
        _make_read_only(base + path)
    os.makedirs(base + SCRATCH, 0o755, exist_ok=True)
    os.chdir(base)
    kernel.pivot_root(".", ".")
    kernel.unmount_detached(".")
    os.chdir("/")
    _make_read_only("/")


def fresh_scratch(megabytes: int) -> None:
    """An empty SCRATCH in the place of the last one. Raises OSError."""
    if os.path.ismount(SCRATCH):
        kernel.unmount_detached(SCRATCH)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("tmpfs", SCRATCH, "tmpfs", flags, f"mode=700,size={megabytes}m,nr_inodes={64 * megabytes + 64}")
    os.chdir(SCRATCH)


def _make_read_only(path: str) -> None:
    """Keeps the flags that are there: an inherited one may not be taken away."""
    there = os.statvfs(path).f_flag
    flags = there & (2 | 4 | 8 | 1024 | 2048)  # nosuid, nodev, noexec, noatime, nodiratime: the same numbers
    if there & 4096:
        flags |= kernel.MS_RELATIME
    flags |= kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount(None, path, None, flags)


def _mount_point() -> str:
    """Any folder there is: what it held stays reachable through descriptors opened before."""
    for path in ("/tmp", "/var/tmp", "/mnt", "/var"):
        with contextlib.suppress(OSError):
            if os.path.isdir(path) and not os.path.islink(path):
                return path
    raise OSError("no folder to mount a new root on")
