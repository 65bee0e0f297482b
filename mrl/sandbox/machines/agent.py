"""On a machine apart: executions in on stdin, observations out on stdout, each as soon as it is there.

Where a layer of isolation holds on that machine, programs run in it, one after another. Where none does, the machine
itself is the isolation: the other side then uses it for one program and gives it back.

Messages: `h` hello (JSON: layer, python, why no layer holds), `f` it could not be started, `x` execution (8 bytes of
number, then the request), `o` observation (the same number, then JSON).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from concurrent.futures import Future
from typing import Any

from mrl.errors import SandboxError
from mrl.sandbox.isolation import frames, selftest
from mrl.sandbox.isolation.client import IsolatedExecutor
from mrl.sandbox.isolation.names import LAYERS

MACHINE = "machine"


def main(settings: bytes) -> None:
    """settings: JSON, see `bundle.greeting`. Returns when stdin ends. Programs never see stdin and stdout as they are
    here: both are duplicated away from 0 and 1 first."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    lock = threading.Lock()

    def send(kind: bytes, body: bytes) -> None:
        with lock:
            frames.write(answers, frames.pack(kind, body))

    def reply(number: bytes, future: Future[dict[str, Any]]) -> None:
        send(b"o", number + json.dumps(future.result()).encode())

    try:
        executor = make_executor(**json.loads(settings))
    except SandboxError as error:
        send(b"f", str(error).encode())
        return
    layer = MACHINE if executor.layer == "unsafe" else executor.layer
    asked_for = json.loads(settings)["layer"] == MACHINE
    reasons = {} if asked_for or layer != MACHINE else {name: selftest.test_layer(name).reason for name in LAYERS}
    hello = {"layer": layer, "python": sys.version.split()[0], "reasons": reasons}
    send(b"h", json.dumps(hello).encode())
    try:
        while True:
            kind, body = frames.read(requests)
            if kind == b"x":
                number, request = body[:8], body[8:]
                seconds = json.loads(request)["limits"]["wall_seconds"]
                future = executor.submit_request(request, seconds)
                future.add_done_callback(lambda done, number=number: reply(number, done))  # type: ignore[misc]
    except (frames.Closed, OSError):
        executor.shutdown()


def make_executor(slots: int, layer: str, modules: list[str]) -> IsolatedExecutor:
    """layer: `auto`, or `machine` to rely on none. Raises SandboxError."""
    return IsolatedExecutor(slots, "unsafe" if layer == MACHINE else "auto", unsafe=True, modules=tuple(modules))
