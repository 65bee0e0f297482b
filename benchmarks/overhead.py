"""What the loop itself costs: the share of a step that is not generation, reward or training.

    python benchmarks/overhead.py            # two minutes
    python benchmarks/overhead.py --quick    # the small model only

The run store and the trackers that need nothing else (console to nowhere, jsonl) are on, weights are shared with the
sampler. A step's time is that between two beginnings of generation, so that what happens between steps counts. The
model on which a step is shortest is the hardest case: what the loop does takes about the same time on any model.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from vs_trl import GENERATIONS, LIMITS, MODELS, PROMPT_TOKENS, PROMPTS, build_model

from mrl import MRLTrainer
from mrl.loop.orchestrator import Orchestrator

MODELS["8 M"] = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "heads": 8}
LIMITS["8 M"] = 128
WORK = ("generate", "reward", "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model only")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    print("| model | step, ms | generate | reward | train | the rest | share of the step |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="mrl-overhead-") as folder:
        for name in ["1 M"] if options.quick else ["1 M", "8 M"]:
            build_model(Path(folder) / name, name, "tail")
            steps = record(Path(folder), name, options.steps)
            median = {part: 1000 * statistics.median(step[part] for step in steps) for part in (*WORK, "rest", "all")}
            share = statistics.median(step["rest"] / step["all"] for step in steps)
            cells = " | ".join(f"{median[part]:.1f}" for part in (*WORK, "rest"))
            print(f"| {name} | {median['all']:.0f} | {cells} | {100 * share:.2f} % |", flush=True)


def record(folder: Path, name: str, steps: int) -> list[dict[str, float]]:
    """Seconds of each part of each step but the first, which warms up."""
    trainer = MRLTrainer(
        model=str(folder / name),
        train_dataset=[{"prompt": " ".join(f"w{100 + (37 * row + 11 * i) % 800}" for i in range(PROMPT_TOKENS))}
                       for row in range(64)],
        reward_funcs=reward,
        max_steps=steps,
        batch_size=PROMPTS,
        num_generations=GENERATIONS,
        max_completion_length=LIMITS[name],
        learning_rate=1e-6,
        temperature=1.0,
        top_p=1.0,
        num_rollout_workers=1,
        weight_sync_method="direct",
        run_dir=str(folder / f"run-{name}"),
        report_to=["console", "jsonl"],
    )  # fmt: skip
    with watched() as timeline, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.train()
    found = []
    for (start, seconds), (end, _) in pairwise(timeline[1:]):
        parts = {part: seconds[part] for part in WORK}
        found.append({**parts, "all": end - start, "rest": end - start - sum(parts.values())})
    return found


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[float, dict[str, float]]]]:
    """When each step began, and the seconds of its parts."""
    timeline: list[tuple[float, dict[str, float]]] = []
    original: Any = Orchestrator._one_step

    async def one_step(self: Orchestrator, *args: Any) -> dict[str, float]:
        start = time.perf_counter()
        metrics: dict[str, float] = await original(self, *args)
        timeline.append((start, dict(self.seconds)))
        return metrics

    Orchestrator._one_step = one_step  # type: ignore[method-assign]
    try:
        yield timeline
    finally:
        Orchestrator._one_step = original  # type: ignore[method-assign]


def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Something that differs within a group and takes no time."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


if __name__ == "__main__":
    main()
