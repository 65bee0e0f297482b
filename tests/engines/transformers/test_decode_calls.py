"""The thread that decodes answers every call."""

from __future__ import annotations

import asyncio

import pytest

from mrl.engines.transformers.decode_calls import Call, DecodeThread
from mrl.engines.transformers.decode_queue import RequestState
from mrl.types import GenerateRequest, SamplingParams


def test_requests_that_cannot_be_prepared_leave_nobody_waiting() -> None:
    """A processor of images may raise anything."""

    def states_of(call: Call) -> list[RequestState]:
        raise IndexError("no such patch")

    thread = DecodeThread(lambda states, calls: [], states_of)

    async def ask() -> None:
        async with asyncio.timeout(10):
            await thread.generate([GenerateRequest("r", (1,), SamplingParams(max_tokens=1), 0)])

    for _ in range(2):
        with pytest.raises(IndexError, match="no such patch"):
            asyncio.run(ask())
    thread.close()
