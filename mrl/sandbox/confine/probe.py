"""Forbidden acts, as a program: run inside a layer to find out whether they are forbidden there.

Read as text and run like any other untrusted code. `probe` returns the names of the acts that went through; `works`
what must go through all the same.
"""

import ctypes
import functools
import os
import platform
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() in ("x86_64", "AMD64")
NUMBERS = {  # x86_64, aarch64
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "memfd_create": (319, 279),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "pidfd_open": (434, 434),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "clone3": (435, 435),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "add_key": (248, 217),
    "personality": (135, 92),
}


def act(function: Callable[..., Any], *args: Any) -> bool:
    """Whether it went through: neither an exception nor a negative result.

    Raises what says that the act is written wrongly: it was not tried then, and must not pass for prevented.
    """
    try:
        result = function(*args)
    except (NameError, TypeError, KeyError):
        raise
    except Exception:
        return False
    return not (isinstance(result, int) and result < 0)


def syscall(name: str, *args: int) -> int:
    number = NUMBERS[name][0 if X86 else 1]
    return LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_long, args))


def read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def write(path: str) -> None:
    with open(path, "w") as file:
        file.write("x")


def connect(family: int, address: Any, kind: int = socket.SOCK_STREAM) -> None:
    with socket.socket(family, kind) as sock:
        sock.settimeout(2)
        sock.connect(address)
        sock.send(b"x")


def listen() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()


def abstract_datagram(name: str) -> None:
    with socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0] as sock:
        sock.sendto(b"x", name)


def fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def raise_limits() -> None:
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CPU):
        _, hard = resource.getrlimit(kind)
        if hard == resource.RLIM_INFINITY:
            return
        try:
            resource.setrlimit(kind, (hard + 1, hard + 1))
            return
        except (ValueError, OSError):
            continue
    raise OSError


def too_many_threads(count: int) -> None:
    release = threading.Event()
    threads = [threading.Thread(target=release.wait, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
    finally:
        release.set()


def signal_owner(pid: int) -> None:
    import fcntl

    reader, _ = os.pipe()
    if fcntl.fcntl(reader, fcntl.F_SETOWN, pid):
        raise OSError


def probe(facts: dict[str, Any]) -> list[str]:
    pid, folder = facts["pid"], facts["folder"]
    acts: dict[str, Callable[[], Any]] = {
        "read a file": lambda: read(facts["file"]),
        "read /etc/passwd": lambda: read("/etc/passwd"),
        "read /proc/self/environ": lambda: read("/proc/self/environ"),
        "read /proc of another process": lambda: read(f"/proc/{pid}/status"),
        "read /proc/self/mem": lambda: read("/proc/self/mem"),
        "list the root's /home": lambda: os.listdir("/home"),
        "list a folder": lambda: os.listdir(folder),
        "write a file": lambda: write(os.path.join(folder, "written")),
        "write to /dev/shm": lambda: write("/dev/shm/mrl-sandbox-probe"),
        "write to the library": lambda: write(os.path.join(os.path.dirname(os.__file__), "mrl-sandbox-probe")),
        "make a folder": lambda: os.mkdir(os.path.join(folder, "made")),
        "remove a file": lambda: os.unlink(facts["file"]),
        "change a file's mode": lambda: os.chmod(facts["file"], 0o777),
        "truncate a file": lambda: os.truncate(facts["file"], 0),
        "rename a file": lambda: os.rename(facts["file"], facts["file"] + "2"),
        "link to a file": lambda: os.link(facts["file"], os.path.join(folder, "linked")),
        "connect to loopback": lambda: connect(socket.AF_INET, ("127.0.0.1", facts["port"])),
        "connect over IPv6": lambda: connect(socket.AF_INET6, ("::1", facts["port"])),
        "send a UDP packet": lambda: connect(socket.AF_INET, ("127.0.0.1", facts["port"]), socket.SOCK_DGRAM),
        "connect to a unix socket": lambda: connect(socket.AF_UNIX, facts["path"]),
        "connect to an abstract socket": lambda: connect(socket.AF_UNIX, "\0" + facts["abstract"]),
        "send to an abstract socket": lambda: abstract_datagram("\0" + facts["abstract"] + "-datagram"),
        "open a vsock": lambda: socket.socket(40, socket.SOCK_STREAM),
        "open a netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
        "open a packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
        "listen": listen,
        "fork": fork,
        "start a program": lambda: subprocess.run(["/bin/true"], check=True),
        "replace the process": lambda: os.execv("/bin/false", ["false"]),
        "signal another process": lambda: os.kill(pid, 0),
        "signal every process": lambda: os.kill(-1, 0),
        "signal through a descriptor's owner": lambda: signal_owner(pid),
        "limits of another process": lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE),
        "raise a limit": raise_limits,
        "threads without end": lambda: too_many_threads(facts["threads"]),
        "memory without end": lambda: bytearray(facts["memory"]),
        "descriptors without end": lambda: [os.dup(0) for _ in range(facts["descriptors"])],
        "become root": lambda: os.setuid(0),
        "change the root": lambda: os.chroot("."),
        "mount": lambda: LIBC.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None),
        "a user namespace": lambda: LIBC.unshare(0x10000000),
        "outlive the parent": lambda: LIBC.prctl(1, 0, 0, 0, 0),
        "lower its priority for ever": lambda: os.setpriority(os.PRIO_PROCESS, 0, -5),
        **{name: functools.partial(syscall, name, 0, 0, 0, 0) for name in NUMBERS},
    }
    acts["ptrace"] = lambda: syscall("ptrace", 16, pid)  # PTRACE_ATTACH
    acts["personality"] = lambda: syscall("personality", 0xFFFFFFFF)
    acts["memfd_create"] = lambda: os.memfd_create("probe")
    acts["pidfd_open"] = lambda: os.pidfd_open(pid)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return [name for name, function in acts.items() if name not in facts.get("skip", ()) and act(function)]


def works() -> str:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    import fractions
    import json

    return json.dumps([str(fractions.Fraction(1, 3)), len(os.urandom(8)), sum(range(10))])
