"""Verifiers as bad as they come, for the pool."""

from __future__ import annotations

import time

LIBRARIES = ("ctypes", "socket", "subprocess")


def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def evaluate(text: str) -> float:
    return float(eval(text))
