"""How long rows of an evaluation test take in environments that block, against what they have to.

python benchmarks/evaluation_concurrency.py --rows 8 --steps 3 --milliseconds 50
"""

from __future__ import annotations

import argparse
import asyncio
import time
from types import SimpleNamespace
from typing import Any

from mrl.evals import EvaluationRow, Message, OpenEnvRolloutProcessor, RolloutProcessorConfig


class Blocks:
    """An environment whose steps take their time."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, steps: int, seconds: float) -> None:
        self.steps, self.seconds = steps, seconds

    def reset(self) -> Any:
        self.left = self.steps
        return SimpleNamespace(observation=SimpleNamespace(text="go"), reward=None, done=False)

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        self.left -= 1
        return SimpleNamespace(observation=SimpleNamespace(text="on"), reward=1.0, done=self.left == 0)


class Says:
    """A model that answers at once."""

    def __init__(self, **params: Any) -> None:
        self.params = params

    async def _make_llm_call(self, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
        return {"choices": [{"message": {"content": "move"}}], "usage": {}}


async def measured(rows: int, steps: int, seconds: float) -> float:
    processor = OpenEnvRolloutProcessor(
        lambda: Blocks(steps, seconds), lambda seen, step, history: seen.text, lambda text: {"say": text},
        policy_factory=Says,
    )  # fmt: skip
    given = [EvaluationRow(messages=[Message(role="user", content=str(n))]) for n in range(rows)]
    config = RolloutProcessorConfig({"model": "says"}, semaphore=asyncio.Semaphore(rows), steps=steps)
    start = time.perf_counter()
    await asyncio.gather(*processor(given, config))
    took = time.perf_counter() - start
    await processor.acleanup()
    return took


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--milliseconds", type=float, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    ideal = options.steps * options.milliseconds / 1000
    for _ in range(options.repeats):
        took = asyncio.run(measured(options.rows, options.steps, options.milliseconds / 1000))
        print(f"{took:.3f} s, {took / ideal:.2f} x the {ideal:.3f} s of the steps")
