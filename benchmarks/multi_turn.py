"""Conversations with an environment that takes its time: how close to the ideal they end, and what is computed twice.

    python benchmarks/multi_turn.py                  # a minute on two cores
    python benchmarks/multi_turn.py --prefix-gb 0    # the same without keys and values kept between turns

Attempts at tasks, in groups that share their first prompt, each of some turns. After a turn the environment sleeps a
random 0 to 200 ms and answers with tokens, and the next prompt begins with exactly the tokens before. Requests go one
by one through the rollout pool to one worker with engine `transformers`, which decodes on a thread beside the loop.

- *ideal*: the longer of two times that no schedule can go below, measured in the same round. The critical path: the
  turns of one conversation alone on the engine, with the sleeps of the one that sleeps longest. The work: the tokens of
  all conversations at the rate at which the engine decodes with a row for each, at a length halfway, and the prompts'
  new tokens at the rate of one prefill of as many rows. `decoding alone` leaves the prefill out of the work.
- *processor time* of the round over that of the work: nearly the same question, and less disturbed by other programs.
- *stall*: the longest that the event loop was kept from a timer of 1 ms.
- *prefill*: tokens that were computed before a completion, over those that have to be: the first prompt of each task
  and what environments said, once each. (A turn's last token, sampled and not computed, is not among those.)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import platform
import random
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2Config

from mrl.backends.inline import InlineHandle
from mrl.engines.transformers.engine import TransformersEngine
from mrl.types import GenerateRequest, SamplingParams, derive_seed
from mrl.workers.pool import RolloutPool
from mrl.workers.rollout import RolloutWorker

SHAPE = Qwen2Config(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    eos_token_id=None,
)
GROUP = 8
"""Attempts at a task."""
PROMPT, ANSWER = 64, 24
"""Tokens of the first prompt, and of an answer of the environment."""
SAID = (16, 48)
"""Fewest and most tokens of the policy's turns, which have any length in between."""
TICK = 0.001


@dataclass
class Round:
    """What one round measured, in seconds and tokens."""

    wall: float
    stall: float
    computed: int
    critical: float
    decoding: float
    prefill: float
    processor: float
    work_processor: float
    """Processor time that decoding and prefill take."""

    @property
    def ideal(self) -> float:
        return max(self.critical, self.decoding + self.prefill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sleep", type=float, default=0.2, help="longest sleep of the environment, seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefix-gb", type=float, help="memory for keys and values between turns")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}, CPU, {options.threads} thread(s)")
    print(f"{options.rollouts} rollouts of {options.turns} turns, sleeps of up to {1000 * options.sleep:.0f} ms\n")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPE).eval()
    prefix_bytes = None if options.prefix_gb is None else int(options.prefix_gb * 2**30)
    engine = TransformersEngine(model, None, max_model_len=1024, prefix_bytes=prefix_bytes)
    asyncio.run(one_round(engine, GROUP, 2, 0.0, 0))  # warms up
    rounds = [
        asyncio.run(one_round(engine, options.rollouts, options.turns, options.sleep, 1 + number))
        for number in range(options.rounds)
    ]
    engine.close()
    report(rounds, options.rollouts, options.turns)


def report(rounds: list[Round], rollouts: int, turns: int) -> None:
    """Medians over the rounds; a ratio is the median of the rounds' ratios. The stall is the longest of all."""

    def middle(of: list[float]) -> float:
        return statistics.median(of)

    unique = -(-rollouts // GROUP) * PROMPT + rollouts * (turns - 1) * ANSWER
    print("| wall, s | critical path, s | decoding, s | prefill, s | wall / ideal | wall / decoding alone |", end="")
    print(" processor time / work's | longest stall, ms | prefill computed / unique |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    times = " | ".join(
        f"{middle([getattr(one, name) for one in rounds]):.2f}" for name in ("wall", "critical", "decoding", "prefill")
    )
    against = middle([one.wall / one.ideal for one in rounds])
    alone = middle([one.wall / max(one.critical, one.decoding) for one in rounds])
    computed = middle([one.computed / unique for one in rounds])
    processor = middle([one.processor / one.work_processor for one in rounds])
    stall = max(one.stall for one in rounds)
    print(f"| {times} | {against:.2f} | {alone:.2f} | {processor:.2f} | {1000 * stall:.0f} | {computed:.2f} |")


async def one_round(engine: TransformersEngine, rollouts: int, turns: int, sleep: float, seed: int) -> Round:
    """Every conversation, and what the ideal needs to know."""
    worker = RolloutWorker("transformers", {})
    worker.engine = engine
    policy = RolloutPool([InlineHandle(worker, "rollout-0", 600)], max_model_len=1024)
    await policy.ask_capacity()
    scripts = [Script.drawn(seed, number, turns, sleep) for number in range(rollouts)]
    gc.collect()
    start, used = time.perf_counter(), time.process_time()
    async with watched_loop() as late:
        await asyncio.gather(*(converse(policy, script) for script in scripts))
    wall, processor = time.perf_counter() - start, time.process_time() - used
    computed = policy.prefilled_tokens

    start = time.perf_counter()
    await converse(policy, Script.drawn(-1 - seed, 0, turns, sleep=0.0))
    critical = time.perf_counter() - start + max(sum(script.sleeps) for script in scripts)
    tokens = sum(sum(script.said) for script in scripts)
    mean = sum(SAID) // 2
    length = PROMPT + (turns - 1) * (mean + ANSWER) // 2
    short, long = [await time_of(engine, rollouts, length, count) for count in (1, mean)]
    new = await time_of(engine, rollouts, ANSWER, 1)
    share = tokens / (mean - 1) / rollouts
    decoding, decoding_processor = ((b - a) * share for a, b in zip(short, long, strict=True))
    prefill, prefill_processor = (seconds * (turns - 1) for seconds in new)
    work_processor = decoding_processor + prefill_processor
    return Round(wall, max(late), computed, critical, decoding, prefill, processor, work_processor)


@dataclass
class Script:
    """What happens in a conversation, but for the words of the policy."""

    name: str
    seed: int
    prompt: list[int]
    said: list[int]
    """Tokens of each of the policy's turns."""
    sleeps: list[float]
    answers: list[list[int]]

    @classmethod
    def drawn(cls, seed: int, number: int, turns: int, sleep: float) -> Script:
        draw = random.Random(f"{seed}/{number}")
        return cls(
            f"{seed}/{number}",
            derive_seed(seed, number),
            words(PROMPT, random.Random(f"{seed}/task {number // GROUP}")),
            [draw.randint(*SAID) for _ in range(turns)],
            [draw.uniform(0, sleep) for _ in range(turns - 1)],
            [words(ANSWER, draw) for _ in range(turns - 1)],
        )


async def converse(policy: RolloutPool, script: Script) -> list[int]:
    """One attempt. Returns all its tokens."""
    ids = list(script.prompt)
    for turn, said in enumerate(script.said):
        sampling, own = SamplingParams(max_tokens=said), derive_seed(script.seed, turn)
        completion = await policy.generate(
            GenerateRequest(f"{script.name}/{turn}", tuple(ids), sampling, own, session=script.name)
        )
        ids += completion.token_ids
        if turn < len(script.answers):
            await asyncio.sleep(script.sleeps[turn])
            ids += script.answers[turn]
    return ids


async def time_of(engine: TransformersEngine, rows: int, length: int, tokens: int) -> tuple[float, float]:
    """Seconds, and seconds of processor time, for one request per row, each with a prompt of its own."""
    requests = [
        GenerateRequest(str(row), tuple(words(length, random.Random(row))), SamplingParams(max_tokens=tokens), row)
        for row in range(rows)
    ]
    start, used = time.perf_counter(), time.process_time()
    await engine.generate(requests)
    return time.perf_counter() - start, time.process_time() - used


def words(count: int, draw: random.Random) -> list[int]:
    """So many random tokens."""
    return [draw.randrange(SHAPE.vocab_size) for _ in range(count)]


@contextlib.asynccontextmanager
async def watched_loop() -> AsyncIterator[list[float]]:
    """How much later than asked for a timer came, each time, in seconds."""
    late: list[float] = [0.0]

    async def tick() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(TICK)
            late.append(time.perf_counter() - start - TICK)

    ticking = asyncio.create_task(tick())
    try:
        yield late
    finally:
        ticking.cancel()


if __name__ == "__main__":
    main()
