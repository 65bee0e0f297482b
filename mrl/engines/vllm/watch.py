"""Detecting a hung vLLM process: it does not answer, or its running requests get no tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

_INTERVAL_SECONDS = 5.0
_LOOKS = 4
"""Minimum number of checks within the time that counts as a hang."""


async def until_it_hangs(ask: Callable[[], Awaitable[dict[str, Any]]], seconds: float) -> str:
    """Returns a description once the process has made no progress for `seconds`; errors of `ask` are raised.

    ask: the host's `pulse`: `working`, the requests that should be getting tokens (0 while it is paused or loads
    weights), and `moves`, which grows with every token. Time during which this process itself was stopped does not
    count.
    """
    interval = min(_INTERVAL_SECONDS, seconds / _LOOKS)
    still, moves, question = 0.0, -1, asyncio.ensure_future(ask())
    what = ""
    try:
        while still < seconds:
            begun = time.monotonic()
            await asyncio.wait([question], timeout=interval)
            pulse = question.result() if question.done() else None
            if pulse is not None:
                await asyncio.sleep(interval - (time.monotonic() - begun))
                question = asyncio.ensure_future(ask())
            passed = min(time.monotonic() - begun, 2 * interval)
            if pulse is None:
                still, what = still + passed, "it does not answer"
            elif not pulse["working"] or pulse["moves"] != moves:
                still, moves = 0.0, pulse["moves"]
            else:
                still, what = still + passed, f"none of its {pulse['working']} requests gets a token"
    finally:
        question.cancel()
    return f"{what} for {still:.0f} s"
