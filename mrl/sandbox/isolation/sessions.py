"""What the supervisor and the children say to each other in one execution. `outcome` is set once it is over."""

from __future__ import annotations

import json
import secrets
from typing import Any

from . import frames
from .program import Program


class Session:
    """A script, or calls: each is sent only when the one before was answered."""

    def __init__(self, request: dict[str, Any], programs: list[Program], poller: Any) -> None:
        self.request, self.program, self.poller = request, programs[0], poller
        self.calls = request["calls"]
        self.script = not self.calls and request["peer"] is None
        self.answers: list[list[str]] = []
        self.blocks: list[list[str]] = []
        """What the tester said of each block; see PeerSession."""
        self.token = b""
        self.loaded = False
        self.outcome: str | None = None
        self.detail = ""
        self.exit_code: int | None = None
        self.exception = ""

    def begin(self) -> None:
        self.program.queue(frames.pack(b"s" if self.script else b"c", self.code()), self.poller)

    def code(self) -> bytes:
        return self.request["code"].encode("utf-8", "surrogatepass")

    def on_messages(self, program: Program) -> None:
        while self.outcome is None:
            try:
                message = program.next_message()
                if message is None:
                    return
                if program.confined:
                    self.on_message(program, *message)
                else:
                    self.on_start(program, *message)
            except ValueError:
                self.end("protocol", "a message too long, or one that cannot be read")

    def on_start(self, program: Program, kind: bytes, body: bytes) -> None:
        """The child's first message, written before it read the program. Later ones can be the program's own."""
        program.confined = kind == b"C"
        if not program.confined:
            self.end("sandbox_error", body.decode("ascii", "replace") if kind == b"S" else "a child broke its protocol")

    def on_message(self, program: Program, kind: bytes, body: bytes) -> None:
        """Raises ValueError."""
        if kind == b"V" or kind == b"X":
            self.on_answer(kind, body)
        elif kind == b"R" and not self.loaded and not self.script:
            self.loaded = True
            self.ask()
        else:
            self.on_end(kind, body)

    def on_answer(self, kind: bytes, body: bytes) -> None:
        if not self.token or not body.startswith(self.token):
            return self.end("protocol", "an answer to nothing that was asked")
        self.answers.append([kind.decode(), body[len(self.token) :].decode("ascii")])
        self.token = b""
        return self.ask()

    def on_end(self, kind: bytes, body: bytes) -> None:
        if kind == b"E":
            self.exception = body.decode("ascii")[:2000]
            self.outcome = None if self.script else "error"
        elif kind == b"M":
            self.exception = "MemoryError"
            self.outcome = None if self.script else "memory"
        elif kind == b"Q" and not self.script:
            self.exit_code = int(body.removeprefix(self.token)) & 0xFF
            self.outcome = "exited"
        else:
            self.end("protocol", "a message out of turn")

    def ask(self) -> None:
        """The next call, whose arguments nobody inside has seen before; or the end."""
        if self.program.incoming:
            self.end("protocol", "an answer before the question")
        elif len(self.answers) == len(self.calls):
            self.outcome = "done"
        else:
            self.token = secrets.token_hex(8).encode()
            call = dict(self.calls[len(self.answers)], id=self.token.decode())
            self.program.queue(frames.pack(b"q", json.dumps(call).encode()), self.poller)

    def end(self, outcome: str, detail: str) -> None:
        self.outcome, self.detail = outcome, detail


class PeerSession(Session):
    """Two children: the program, and the tester, which alone says what held. Their messages pass through here.

    To the program: `q` request, `l` what a callback returned. From it, only while a request is open: `V` and `X`,
    which close it, and `K`, a callback. From the tester: `P` request, `L` callback's result, `B` a block, `D` the end.
    """

    def __init__(self, request: dict[str, Any], programs: list[Program], poller: Any) -> None:
        super().__init__(request, programs, poller)
        self.tester = programs[1]
        self.open = 0

    def begin(self) -> None:
        self.program.queue(frames.pack(b"o", self.code()), self.poller)

    def ask(self) -> None:
        """The program is loaded: the tests begin."""
        plan = json.dumps({"code": self.request["code"], "blocks": self.request["peer"]})
        self.tester.queue(frames.pack(b"t", plan.encode()), self.poller)

    def on_message(self, program: Program, kind: bytes, body: bytes) -> None:
        if program is self.tester:
            self.on_tester(kind, body)
        elif kind in (b"V", b"X", b"K"):
            if not self.open:
                return self.end("protocol", "an answer to nothing that was asked")
            self.open -= kind != b"K"
            self.tester.queue(frames.pack(kind, body), self.poller)
        elif kind == b"R" and not self.loaded:
            self.loaded = True
            self.ask()
        else:
            self.on_end(kind, body)
        return None

    def on_tester(self, kind: bytes, body: bytes) -> None:
        if kind in (b"P", b"L"):
            self.open += kind == b"P"
            self.program.queue(frames.pack(b"q" if kind == b"P" else b"l", body), self.poller)
        elif kind == b"B":
            self.blocks.append(json.loads(body))
        elif kind == b"D":
            self.outcome = "done"
        elif kind == b"Z":
            self.end("protocol", body.decode("ascii")[:500])
        else:
            self.end("sandbox_error", "the tester broke its protocol")
