"""Which layer holds on this machine: found by performing the forbidden acts inside it, and looking from outside too.

Settings of the kernel are not asked: on some hosts a user namespace can be made and then gives no rights.
"""

from __future__ import annotations

import ast
import functools
import os
import platform
import secrets
import shutil
import socket
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mrl.errors import SandboxError
from mrl.sandbox.base import Limits
from mrl.sandbox.confine.filters import FILTERS
from mrl.sandbox.confine.names import LAYERS, MACHINE
from mrl.sandbox.engine.slot import Slot
from mrl.sandbox.engine.wire import decode_observation, encode_request
from mrl.sandbox.execution import Execution

PROBE = Path(__file__).with_name("probe.py")
LIMITS = Limits(wall_seconds=20, cpu_seconds=10, memory_mb=256, processes=16, open_files=40)
WORKS = '["1/3", 8, 45]'
REMOTE = "use a remote sandbox (for example Modal's), or a Linux machine, container or virtual machine"


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What the self-test of one layer found."""

    layer: str
    holds: bool
    reason: str
    """Why not; empty when it holds."""
    through: tuple[str, ...] = ()
    """Forbidden acts that succeeded."""


def choose(layer: str, unsafe: bool, python: str = sys.executable) -> str:
    """The layer to use. Raises SandboxError, saying what is missing."""
    if layer not in ("auto", "unsafe", *LAYERS):
        raise SandboxError(f"sandbox: layer {layer!r} is unknown; use auto, {', '.join(LAYERS)}")
    if layer == "unsafe" and not unsafe:
        raise SandboxError("sandbox: layer 'unsafe' needs unsafe=True as well")
    problem = unsupported()
    if layer == "unsafe" and sys.platform == "linux":
        return layer
    if problem:
        raise SandboxError(problem)
    results = []
    for candidate in LAYERS if layer == "auto" else (layer,):
        result = test_layer(candidate, python)
        if result.holds:
            return candidate
        results.append(f"layer {candidate}: {result.reason}")
    if unsafe:
        return "unsafe"
    raise SandboxError(
        f"sandbox: this machine cannot isolate programs. {'; '.join(results)}. Allow user namespaces or Landlock or"
        f" seccomp here, {REMOTE}; unsafe=True runs programs with limits only"
    )


def unsupported() -> str:
    """Why no layer can work here, whatever is configured; empty when one may."""
    if not sys.platform.startswith("linux"):
        return f"sandbox: programs can be isolated on Linux only, this is {platform.system()}; {REMOTE}"
    if (MACHINE, "A") not in FILTERS:
        return f"sandbox: no system-call filters for {MACHINE}; there are x86_64 and aarch64. Or {REMOTE}"
    return ""


def test_layer(layer: str, python: str = sys.executable) -> LayerResult:  # noqa: PT028 - not a test
    """Cached: about a third of a second the first time."""
    return _test_layer(layer, python, os.geteuid())


@functools.cache
def _test_layer(layer: str, python: str, _: int) -> LayerResult:
    try:
        slot = Slot(layer, (), python)
    except SandboxError as error:
        return LayerResult(layer, False, str(error))
    try:
        return _probe(layer, slot)
    except SandboxError as error:
        return LayerResult(layer, False, str(error))
    finally:
        slot.stop()


def _probe(layer: str, slot: Slot) -> LayerResult:
    """Raises SandboxError when the probe could not be run."""
    with ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="mrl-sandbox-test-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        os.chmod(folder, 0o777)  # so that only the layer is in the way
        canary = Path(folder, "canary")
        canary.write_text("canary")
        canary.chmod(0o666)
        token = secrets.token_hex(8)
        listeners = _listen(stack, folder, token)
        facts = {
            "pid": os.getpid(),
            "folder": folder,
            "file": str(canary),
            "port": listeners[0].getsockname()[1],
            "path": os.path.join(folder, "socket"),
            "abstract": token,
            "threads": 4 * LIMITS.processes if os.geteuid() == 0 or layer == "A" else 100_000,
            "memory": (LIMITS.memory_mb + 64) << 20,
            "descriptors": LIMITS.open_files + 8,
        }
        acts = f"said = works()\nthrough = probe({facts!r})"
        execution = Execution(PROBE.read_text(), (acts,), LIMITS, report=("said", "through"))
        answer = slot.run(encode_request(execution), LIMITS.wall_seconds)
        if answer["status"] == "sandbox_error":
            raise SandboxError(answer["detail"])
        seen = decode_observation(execution, answer)
        if seen.verdict.status != "passed" or None in seen.report:
            return LayerResult(layer, False, f"the test program {seen.verdict.status}: {seen.verdict.detail}")
        said, found = (ast.literal_eval(text or "") for text in seen.report)
        if said != WORKS:
            return LayerResult(layer, False, f"an ordinary program goes wrong: {said!r}")
        through = [*map(str, found), *_noticed(listeners, folder)]
        return LayerResult(
            layer, not through, f"not prevented: {', '.join(through)}" if through else "", tuple(through)
        )


def _listen(stack: ExitStack, folder: str, token: str) -> list[socket.socket]:
    """Who should hear nothing: TCP on loopback, unix sockets by path and by abstract name."""
    tcp = stack.enter_context(socket.socket())
    tcp.bind(("127.0.0.1", 0))
    path = stack.enter_context(socket.socket(socket.AF_UNIX))
    path.bind(os.path.join(folder, "socket"))
    os.chmod(os.path.join(folder, "socket"), 0o777)
    abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
    abstract.bind("\0" + token)
    datagram = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    datagram.bind("\0" + token + "-datagram")
    for sock in (tcp, path, abstract):
        sock.listen()
    for sock in (tcp, path, abstract, datagram):
        sock.setblocking(False)
    return [tcp, path, abstract, datagram]


def _noticed(listeners: list[socket.socket], folder: str) -> list[str]:
    """Seen from outside, whatever the program says of itself."""
    found = []
    for name, sock in zip(("TCP", "unix", "abstract", "datagram"), listeners, strict=True):
        try:
            (sock.recv(1) if name == "datagram" else sock.accept()[0].close())
        except BlockingIOError:
            continue
        found.append(f"a {name} connection arrived")
    if sorted(os.listdir(folder)) != ["canary", "socket"] or Path(folder, "canary").read_text() != "canary":
        found.append("files outside were changed")
    return found
