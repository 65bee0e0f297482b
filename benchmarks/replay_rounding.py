"""How far `mrl replay` is off the record by rounding alone, and how far by the smallest faults it is to find.

    python benchmarks/replay_rounding.py            # three minutes
    python benchmarks/replay_rounding.py --quick    # sizes that measure nothing

A run is replayed with other numbers of threads, which sum in another order, and in the other precision; then with one
sampled token's logprob changed in its record, and with one rollout's reward turned round. Each row is the metric that
is furthest off, as a share of it (of `mrl.loop.replay.SMALL` below that), and the maximum that is, in its own unit.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mrl.loop.replay as replay_module
from mrl import MRLTrainer
from mrl.loop.replay import SMALL, Difference, Replay, replay
from mrl.types import Group, Rollout

STEP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="sizes that measure nothing")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    print("| computed in | replayed | steps | furthest off | by | furthest maximum | by | verdict |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="mrl-replay-") as folder:
        for dtype in options.dtypes:
            for kind, changes in {"in step": {}, "ahead": {"async_mode": "queue", "max_staleness": 2}}.items():
                run = Path(folder) / f"{dtype} {kind}"
                train(run, quick=options.quick, dtype=dtype, **changes)
                for what, result in cases(run, dtype, quick=options.quick):
                    show(f"{dtype}, {kind}", what, result)


def train(run: Path, *, quick: bool, **changes: Any) -> None:
    sizes: dict[str, Any] = {"batch_size": 2, "num_generations": 4} if quick else {"batch_size": 16}
    MRLTrainer(
        model="starter",
        dataset_name="tiny-code",
        reward_funcs=scattered,
        run_dir=str(run),
        report_to=[],
        max_steps=STEP,
        max_completion_length=16 if quick else 64,
        learning_rate=5e-4,
        beta=0.05,
        save_steps=1,
        **sizes,
        **changes,
    ).train()


def scattered(completions: list[str]) -> list[float]:
    """A reward in which a group's completions differ, whatever they say."""
    return [sum(map(ord, text)) % 7 / 6 for text in completions]


def cases(run: Path, dtype: str, *, quick: bool) -> Iterator[tuple[str, Replay]]:
    for threads in (1, 2) if quick else (1, 2, 4):
        with computed_with(threads=threads):
            yield f"{threads} thread(s)", replay(run, STEP)
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    with computed_with(dtype=other):
        yield f"in {other}", replay(run, STEP)
    for nats in (0.5, 0.05):
        with recorded_otherwise(lambda groups, nats=nats: other_logprob(groups, nats)):
            yield f"one logprob {nats} nats off", replay(run, STEP)
    with recorded_otherwise(other_reward):
        yield "one reward turned round", replay(run, STEP)
    for checkpoint in (run / "checkpoints").glob("step-*"):
        checkpoint.rename(run / checkpoint.name)
    for threads in (1, 2) if quick else (1, 4):
        with computed_with(threads=threads):
            yield f"{threads} thread(s)", replay(run, STEP)


@contextlib.contextmanager
def computed_with(threads: int | None = None, dtype: str | None = None) -> Iterator[None]:
    recorded, config_of = replay_module._environments, replay_module._config_for_replay

    def environments(*arguments: Any) -> dict[int, dict[str, Any]]:
        found = recorded(*arguments)
        return found if threads is None else {step: facts | {"threads": threads} for step, facts in found.items()}

    def config(*arguments: Any) -> Any:
        found = config_of(*arguments)
        if dtype is not None:
            found.model.dtype = dtype
        return found

    with (
        mock.patch.object(replay_module, "_environments", environments),
        mock.patch.object(replay_module, "_config_for_replay", config),
    ):
        yield


@contextlib.contextmanager
def recorded_otherwise(change: Callable[[list[Group]], None]) -> Iterator[None]:
    stored = replay_module._groups

    def groups(run: Path, step: int) -> list[Group]:
        found = stored(run, step)
        change(found)
        return found

    with mock.patch.object(replay_module, "_groups", groups):
        yield


def other_logprob(groups: list[Group], nats: float) -> None:
    """Of the first token of a rollout that is trained on."""
    best_of(groups).samples[0].logprobs[0] -= nats


def other_reward(groups: list[Group]) -> None:
    """The best rollout of a group gets the reward of its worst."""
    rewards = {r.reward for r in next(filter(differs, groups)).rollouts if r.reward is not None}
    best_of(groups).reward = min(rewards)


def best_of(groups: list[Group]) -> Rollout:
    """Of the first group whose rewards differ, so that it has an advantage."""
    return max(next(filter(differs, groups)).rollouts, key=lambda rollout: rollout.reward or 0.0)


def differs(group: Group) -> bool:
    return len({rollout.reward for rollout in group.rollouts}) > 1


def show(run: str, what: str, result: Replay) -> None:
    means = [metric for metric in result.metrics if not metric.name.endswith("_max")]
    maxima = [metric for metric in result.metrics if metric.name.endswith("_max")]
    mean, largest = max(means, key=share), max(maxima, key=lambda metric: abs(metric.difference))
    steps = result.step - result.checkpoint
    shown = f"{mean.name} | {share(mean):.1e} | {largest.name} | {abs(largest.difference):.1e}"
    print(f"| {run} | {what} | {steps} | {shown} | {result.verdict} |", flush=True)


def share(metric: Difference) -> float:
    return abs(metric.difference) / max(abs(metric.recorded), abs(metric.replayed), SMALL)


if __name__ == "__main__":
    main()
