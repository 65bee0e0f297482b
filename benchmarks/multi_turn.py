"""Conversations with an environment that takes its time: how close to the ideal they end, and what is computed twice.

    python benchmarks/multi_turn.py                  # a minute on two cores
    python benchmarks/multi_turn.py --prefix-gb 0    # the same without keys and values kept between turns

Attempts at tasks, in groups that share their first prompt, each of some turns. After a turn the environment sleeps a
random 0 to 200 ms and answers with tokens, and the next prompt begins with exactly the tokens before. Requests go one
by one through the rollout pool to one worker with engine `transformers`, which decodes on a thread beside the loop.

- *ideal*: the same conversations in a schedule that wastes nothing, by what the engine needs in the same round. At any
  moment every conversation that is not asleep decodes, in a step that takes as long as one of as many rows of equal
  lengths, the mean of all; those that woke up get their new tokens computed first, as fast as in a forward of many.
  No padding, no ended rows, no copies, no requests. It ends with the longest conversation.
- *work*: the ideal without an order: all tokens at the rate of the full batch. Nothing can be below it, and nothing
  reaches it where conversations differ in length, since the last ones decode alone.
- *processor time* of the round over that of the ideal: nearly the same question, and less disturbed by other programs.
- *stall*: the longest time between two ticks of a timer of 5 ms on the event loop, that included.
- *prefill*: tokens that were computed before a completion, over those that have to be: the first prompt of each task
  and what environments said, once each. (A turn's last token, sampled and not computed, is not among those.)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import heapq
import platform
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen2Config

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
TICK = 0.005


@dataclass
class Round:
    """What one round measured, in seconds and tokens."""

    wall: float
    processor: float
    stall: float
    computed: int
    ideal: float
    ideal_processor: float
    work: float


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
    asyncio.run(one_round(engine, model, GROUP, 2, 0.0, 0))  # warms up
    rounds = [
        asyncio.run(one_round(engine, model, options.rollouts, options.turns, options.sleep, 1 + number))
        for number in range(options.rounds)
    ]
    engine.close()
    report(rounds, options.rollouts, options.turns)


def report(rounds: list[Round], rollouts: int, turns: int) -> None:
    """Medians over the rounds; a ratio is the median of the rounds' ratios. The stall is the longest of all."""

    def middle(of: list[float]) -> float:
        return statistics.median(of)

    unique = -(-rollouts // GROUP) * PROMPT + rollouts * (turns - 1) * ANSWER
    print("| wall, s | ideal, s | work, s | wall / ideal | wall / work | processor time / ideal's ", end="")
    print("| longest stall, ms | prefill computed / unique |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    times = " | ".join(f"{middle([getattr(one, name) for one in rounds]):.2f}" for name in ("wall", "ideal", "work"))
    ratios = [
        middle([getattr(one, over) / getattr(one, under) for one in rounds])
        for over, under in (("wall", "ideal"), ("wall", "work"), ("processor", "ideal_processor"))
    ]
    computed = middle([one.computed / unique for one in rounds])
    stall = max(one.stall for one in rounds)
    print(f"| {times} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} | {1000 * stall:.0f} | {computed:.2f} |")


async def one_round(
    engine: TransformersEngine, model: PreTrainedModel, rollouts: int, turns: int, sleep: float, seed: int
) -> Round:
    """Every conversation, and what the ideal needs to know."""
    worker = RolloutWorker("transformers", {})
    worker.engine = engine
    policy = RolloutPool([InlineHandle(worker, "rollout-0", 600)], max_model_len=1024)
    await policy.ask_capacity()
    scripts = [Script.drawn(seed, number, turns, sleep) for number in range(rollouts)]
    before = await Costs.measured(engine, model, rollouts, turns)
    gc.collect()
    start, used = time.perf_counter(), time.process_time()
    async with watched_loop() as late:
        await asyncio.gather(*(converse(policy, script) for script in scripts))
    wall, processor = time.perf_counter() - start, time.process_time() - used
    after = await Costs.measured(engine, model, rollouts, turns)  # other programs come and go
    seconds, processor_seconds = ([one[kind] for one in (before, after)] for kind in (0, 1))
    return Round(
        wall,
        processor,
        max(late),
        policy.prefilled_tokens,
        statistics.mean(costs.ideal(scripts) for costs in seconds),
        statistics.mean(costs.ideal(scripts) for costs in processor_seconds),
        statistics.mean(costs.work(scripts) for costs in seconds),
    )


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


@dataclass
class Costs:
    """What the engine needs, in seconds."""

    first: float
    """To compute the first prompts."""
    rest: float
    """To compute what is new before a turn, for one conversation of many."""
    step: dict[int, float]
    """For a decode step, by its number of rows."""

    @classmethod
    async def measured(cls, engine: TransformersEngine, model: PreTrainedModel, rows: int, turns: int) -> list[Costs]:
        """In time, and in processor time. Rows are as long as a conversation is in the middle."""
        mean = sum(SAID) // 2
        length = PROMPT + (turns - 1) * (mean + ANSWER) // 2
        first = await time_of(engine, distinct(-(-rows // GROUP), PROMPT), 1)
        rest = time_of_rest(model, length, ANSWER + 1)
        steps: dict[int, tuple[float, float]] = {}
        for count in sorted({1, *(max(1, rows // part) for part in (16, 4, 2, 1))}):
            few, many = [await time_of(engine, distinct(1, length) * count, tokens) for tokens in (1, mean)]
            steps[count] = (many[0] - few[0]) / (mean - 1), (many[1] - few[1]) / (mean - 1)
        return [cls(first[kind], rest[kind], {n: both[kind] for n, both in steps.items()}) for kind in (0, 1)]

    def of_step(self, rows: int) -> float:
        """Between the numbers that were measured on a straight line."""
        above = min(count for count in self.step if count >= rows)
        below = max(count for count in self.step if count <= rows)
        share = (rows - below) / (above - below) if above > below else 0.0
        return self.step[below] + share * (self.step[above] - self.step[below])

    def work(self, scripts: Sequence[Script]) -> float:
        """See the module's docstring. The first token of a turn comes from its prefill."""
        steps = sum(said - 1 for script in scripts for said in script.said)
        turns = sum(len(script.answers) for script in scripts)
        return self.first + turns * self.rest + steps * self.of_step(len(scripts)) / len(scripts)

    def ideal(self, scripts: Sequence[Script]) -> float:
        """See the module's docstring."""
        now = self.first
        left = {script.name: script.said[0] - 1 for script in scripts}
        """Steps of those that decode, by name."""
        asleep: list[tuple[float, str]] = []
        turn = dict.fromkeys(left, 0)
        by_name = {script.name: script for script in scripts}
        while left or asleep:
            if not left:
                now = max(now, asleep[0][0])
            while asleep and asleep[0][0] <= now:
                _, name = heapq.heappop(asleep)
                turn[name] += 1
                left[name] = by_name[name].said[turn[name]] - 1
                now += self.rest
            now += self.of_step(len(left))
            for name in [name for name, steps in left.items() if steps == 1]:
                del left[name]
                if turn[name] < len(by_name[name].sleeps):
                    heapq.heappush(asleep, (now + by_name[name].sleeps[turn[name]], name))
            left = {name: steps - 1 for name, steps in left.items()}
        return now


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


async def time_of(engine: TransformersEngine, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Seconds, and seconds of processor time, for so many tokens after each of these prompts."""
    sampling = SamplingParams(max_tokens=tokens)
    requests = [GenerateRequest(str(row), tuple(prompt), sampling, row) for row, prompt in enumerate(prompts)]
    start, used = time.perf_counter(), time.process_time()
    await engine.generate(requests)
    return time.perf_counter() - start, time.process_time() - used


@torch.no_grad()
def time_of_rest(
    model: PreTrainedModel, length: int, tokens: int, rows: int = 32, repeats: int = 4
) -> tuple[float, float]:
    """The same for a forward of so many tokens that follow `length` known ones, per row."""
    ids_BT = torch.tensor(distinct(rows, length + tokens))
    cache = DynamicCache(config=model.config)
    model(input_ids=ids_BT[:, :length], past_key_values=cache, logits_to_keep=1)
    start, used = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        model(input_ids=ids_BT[:, length:], past_key_values=cache, logits_to_keep=1)
        cache.crop(-tokens)
    count = rows * repeats
    return (time.perf_counter() - start) / count, (time.process_time() - used) / count


def distinct(count: int, length: int) -> list[list[int]]:
    """So many prompts."""
    return [words(length, random.Random(number)) for number in range(count)]


def words(count: int, draw: random.Random) -> list[int]:
    """So many random tokens."""
    return [draw.randrange(SHAPE.vocab_size) for _ in range(count)]


@contextlib.asynccontextmanager
async def watched_loop() -> AsyncIterator[list[float]]:
    """Seconds from each tick to the next."""
    late: list[float] = [0.0]

    async def tick() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(TICK)
            late.append(time.perf_counter() - start)

    ticking = asyncio.create_task(tick())
    try:
        yield late
    finally:
        ticking.cancel()


if __name__ == "__main__":
    main()
