"""When a vLLM process counts as hanging, with made-up answers (the real one: `test_vllm_failures.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from mrl.engines.vllm.watch import until_it_hangs
from mrl.errors import EngineDied

Pulse = dict[str, int]


async def hangs(pulses: Iterator[Pulse | None], seconds: float = 0.08) -> str:
    """What is found when the process answers so; None = it does not answer."""

    async def ask() -> Pulse:
        answer = next(pulses)
        if answer is None:
            await asyncio.sleep(60)
        assert answer is not None
        return answer

    return await until_it_hangs(ask, seconds)


def always(make: Callable[[int], Pulse | None]) -> Iterator[Pulse | None]:
    number = 0
    while True:
        yield make(number)
        number += 1


async def test_silence_and_requests_without_tokens_are_hangs() -> None:
    assert "does not answer" in await hangs(always(lambda n: None))
    assert "none of its 7 requests gets a token" in await hangs(always(lambda n: {"working": 7, "moves": 40}))
    late = always(lambda n: {"working": 1, "moves": min(n, 12)} if n < 20 else None)
    assert "requests gets a token" in await hangs(late)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: {"working": 0, "moves": 9},  # nothing to do, paused, or loading weights
        lambda n: {"working": 3, "moves": n},
        lambda n: {"working": 3, "moves": n // 2},  # slow
    ],
)
async def test_whoever_moves_or_has_nothing_to_do_does_not_hang(make: Callable[[int], Pulse]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await hangs(always(make))


async def test_a_process_that_dies_ends_the_watch() -> None:
    async def ask() -> Pulse:
        raise EngineDied("gone")

    with pytest.raises(EngineDied):
        await until_it_hangs(ask, 0.1)
