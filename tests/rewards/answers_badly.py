"""Verifiers as bad as they come, for the pool: what their answers do, they do in the process that judges them."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

LIBRARIES = ("ctypes",)
CHANNEL = 4


def sleeping(seconds: float) -> Callable[[str], float]:
    time.sleep(seconds)
    return lambda text: (time.sleep(float(text)), 1.0)[1]


def unreadable() -> None:
    return None


def failing() -> Callable[[str], float]:
    raise RuntimeError("no such task")


def acting() -> Callable[[str], Any]:
    return lambda text: ACTS[text]()


def _write(token: str, said: int | None = None) -> None:
    body = json.dumps([token, [], 1.0, [], [], ""]).encode()
    os.write(CHANNEL, (len(body) if said is None else said).to_bytes(4, "big") + b"V" + body)


def _token() -> str:
    frame: Any = sys._getframe()
    while "token" not in frame.f_locals:
        frame = frame.f_back
    found: str = frame.f_locals["token"]
    return found


def _then(*_: Any) -> float:
    return 1.0


ACTS: dict[str, Callable[[], Any]] = {
    "answers": lambda: 1.0,
    "answers without being asked": lambda: _then(_write("")),
    "answers the next one too": lambda: _then(_write(_token()), _write(_token()), _write("")),
    "says half a message": lambda: (_write("", said=1000), time.sleep(60)),
    "announces too much": lambda: _then(_write("", said=2**31)),
    "says nothing": lambda: time.sleep(60),
    "hangs up": lambda: (os.close(CHANNEL), time.sleep(60)),
    "leaves": lambda: os._exit(0),
    "exits": lambda: sys.exit(0),
    "raises": lambda: 1 / 0,
    "crashes": lambda: ctypes.string_at(0),
    "eats": lambda: bytearray(1 << 40),
    "prints": lambda: [print("x" * 1_000_000) for _ in range(50)],
    "answers an object": lambda: object(),
    "answers too much": lambda: "x" * 10_000_000,
    "evaluates": lambda: eval("1.0"),
}
WORTH_NOTHING = [act for act in ACTS if act not in ("answers", "answers the next one too")]
