"""One slot: a process that is not the trainer's, with a fork-server under it.

Loaded by `client` into a bare interpreter. It gives up root's rights, warms the modules up, splits the server off, and
then runs one execution after another: it alone talks with the client and with the program, holds the deadlines and
counts the output. When the client closes its end, or the server fails, it ends, and everything below ends with it.
"""

from __future__ import annotations

import _socket
import os
import select
import signal
import sys
from typing import Any

from .. import protocol
from ..confine import kernel, layers, libraries, namespaces, scratch
from ..confine.names import SETTINGS_ENV
from ..protocol import Kind
from . import judging, server


def main() -> None:
    """Settings are the JSON in SETTINGS_ENV; fd 0 is the client. Says `ready`, or `failed` and why."""
    control = os.dup(0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    settings = protocol.parse(os.environ[SETTINGS_ENV].encode())
    os.umask(0o077)
    try:
        work(control, settings)
    finally:
        scratch.remove(settings["folder"])  # the client may be gone


def work(control: int, settings: dict[str, Any]) -> None:
    """One execution after another, until it is time to end."""
    try:
        requests, ahead = start(settings)
    except (OSError, ImportError, LookupError, RuntimeError) as error:
        protocol.send(control, Kind.NOT_READY, f"{type(error).__name__}: {error}".encode())
        return
    protocol.send(control, Kind.READY)
    parent, kept = os.getppid(), judging.Kept()
    while True:
        message = wait_for_request(control, requests, parent)
        if message is None:
            return
        observation = judging.run(message, requests, control, settings["layer"] == "unsafe", kept)
        if observation is None:
            return
        protocol.send(control, Kind.OBSERVATION, protocol.dump(observation))
        if observation["status"] == "sandbox_error":
            return  # a new supervisor is cheaper than knowing what this one is still good for
        if ahead:
            judging.prepare(message, requests, control, kept)


def wait_for_request(control: int, requests: _socket.socket, parent: int) -> dict[str, Any] | None:
    """None when it is time to end: the client or the server is gone."""
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(requests, select.POLLIN)
    while True:
        for fd, _ in poller.poll(2000):
            if fd != control:  # the server speaks only when spoken to
                return None
            try:
                request: dict[str, Any] = protocol.parse(protocol.receive(control)[1])
                return request
            except (protocol.Closed, OSError):
                return None
        if os.getppid() != parent:  # the parent is gone, though somebody still holds its end of the socket
            return None


def start(settings: dict[str, Any]) -> tuple[_socket.socket, bool]:
    """The socket to a server that is ready, and whether a process may wait there for the next program: not without
    isolation, and not where the limit of its threads counts those that others have at the time. Raises OSError,
    ImportError, RuntimeError."""
    layer = settings["layer"]
    sys.path[:] = [path for path in sys.path if path and os.path.isdir(path)] + settings["paths"]
    hidden = os.geteuid() == 0 and layer != "A" and not all(map(layers.is_public, sys.path))
    server.preload(layer == "C" or hidden, settings["modules"])
    os.environ.clear()  # not before: libraries look there when they are loaded
    for path in sys.path:
        sys.path_importer_cache.pop(path, None)
    readable = [path for path in sys.path if not any(path.startswith(other + "/") for other in sys.path)]
    extra = [] if layer == "C" or hidden else libraries.libraries(readable)
    installed = layers.installed_packages(readable, settings["paths"])
    uid, where = layers.become_nobody(readable, layer)
    where |= {path: path for path in extra}
    kernel.prctl(kernel.PR_SET_PDEATHSIG, 0)
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    own_ids = os.getuid(), os.getgid()
    pid = kernel.fork_into(namespaces.SERVER_NAMESPACES) if layer == "A" else os.fork()
    if pid == 0:
        run_server(theirs, layer, where, readable + extra, installed, uid, settings["folder"], own_ids)
    theirs.close()
    ours.settimeout(20)
    answer = ours.recv(65536)
    if answer != Kind.READY.byte:
        raise RuntimeError(answer[1:].decode(errors="replace") or "the server ended at its start")
    ours.settimeout(judging.REAP_SECONDS)
    return ours, layer == "A" or (layer != "unsafe" and uid is not None)


def run_server(
    requests: _socket.socket,
    layer: str,
    where: dict[str, str],
    readable: list[str],
    installed: list[str],
    uid: int | None,
    folder: str,
    own_ids: tuple[int, int],
) -> None:
    """In the server. Never returns."""
    try:
        if layer == "A":
            namespaces.map_ids(*own_ids)
        with open("/proc/self/oom_score_adj", "w") as file:  # the kernel takes the program before the trainer
            file.write("1000")
        with open("/proc/self/statm") as file:
            baseline = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        os.dup2(requests.detach(), server.REQUESTS, inheritable=False)
        os.closerange(server.REQUESTS + 1, 4096)
        requests = _socket.socket(fileno=server.REQUESTS)
        for spare in range(3, server.REQUESTS):  # what is opened from here on lies above
            os.dup2(0, spare)
        if layer == "A":
            namespaces.enter_new_root(where, installed)
        confinement = layers.Confinement(layer, readable, uid, installed, folder)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        server.serve(requests, confinement, baseline)
    except BaseException as error:
        try:
            requests.send(Kind.LOST.byte + f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)
