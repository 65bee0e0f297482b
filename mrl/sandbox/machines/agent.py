"""On a machine apart: executions in on stdin, observations out on stdout, each as soon as it is there.

Programs and their tests run in the strongest layer of isolation that holds on that machine, one after another. Where
none does, the machine itself is what holds a program, and users of their own are what keeps it from the processes that
judge: those it cannot reach. Where there is no root to make them, nothing is judged.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from concurrent.futures import Future
from typing import Any

from mrl.errors import SandboxError
from mrl.sandbox import protocol
from mrl.sandbox.confine import layers
from mrl.sandbox.engine.client import IsolatedExecutor
from mrl.sandbox.protocol import Kind


def main(settings: bytes) -> None:
    """settings: JSON, see `bundle.greeting`. Returns when stdin ends. Programs never see stdin and stdout as they are
    here: both are duplicated away from 0 and 1 first."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    lock = threading.Lock()

    def send(kind: Kind, body: bytes) -> None:
        with lock:
            protocol.send(answers, kind, body)

    def reply(number: bytes, future: Future[dict[str, Any]]) -> None:
        send(Kind.OBSERVATION, number + json.dumps(future.result()).encode())

    try:
        executor = make_executor(**json.loads(settings))
    except SandboxError as error:
        send(Kind.NOT_READY, str(error).encode())
        return
    hello = {"layer": executor.layer, "python": sys.version.split()[0]}
    send(Kind.HELLO, json.dumps(hello).encode())
    try:
        while True:
            kind, body = protocol.receive(requests)
            if kind is Kind.REQUEST:
                number, request = body[:8], body[8:]
                seconds = json.loads(request)["limits"]["wall_seconds"]
                future = executor.submit_request(request, seconds)
                future.add_done_callback(lambda done, number=number: reply(number, done))  # type: ignore[misc]
    except (protocol.Closed, OSError):
        executor.shutdown()


def make_executor(slots: int, layer: str, modules: list[str]) -> IsolatedExecutor:
    """Raises SandboxError where no layer holds, and no users keep programs from their judges."""
    try:
        return IsolatedExecutor(slots, layer, modules=tuple(modules))
    except SandboxError as error:
        if layer == "auto" and layers.become_nobody([], "unsafe")[0] is not None:
            return IsolatedExecutor(slots, "unsafe", unsafe=True, modules=tuple(modules))
        raise SandboxError(
            f"on the rented machine programs cannot be kept from their judge, and nothing is judged there: {error}\n"
            "`sandbox: local` on a Linux machine is what works, or a service whose machines start their command as root"
        ) from None
