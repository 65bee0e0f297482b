"""Which curves a run's page draws, and their points."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mrl.store.find import COST
from mrl.store.read import RunReader, Split

MOST_POINTS = 4_000
"""Of a curve: of a longer one, every second, third … point is sent, and the last."""


@dataclass(frozen=True)
class Panel:
    """One chart. `reward/*/mean` stands for every metric of that form."""

    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    spread: bool = False
    """Whether a mean is drawn with the band of its standard deviation."""
    stacked: bool = False
    """Whether the curves are parts of a sum."""
    log: bool = False


PANELS = (
    Panel("Reward", ("reward/mean", "eval:eval/mean"), spread=True),
    Panel("Reward by function", ("reward/*/mean",), spread=True),
    Panel("Pass rate", ("reward/pass_rate", "eval:eval/pass_rate")),
    Panel("KL", ("train/kl", "train/sampler_kl"), "nats"),
    Panel("Entropy", ("train/entropy",), "nats per token"),
    Panel(
        "Completion length",
        ("rollout/completion_length_mean", "rollout/completion_length_max", "eval:eval/completion_length_mean"),
        "tokens",
    ),
    Panel("Truncated, failed", ("rollout/truncated_fraction", "rollout/failed_fraction"), "share"),
    Panel("Clipped", ("train/clipped_low_fraction", "train/clipped_high_fraction"), "share of tokens"),
    Panel("Logprob gap", ("train/logprob_gap", "train/logprob_gap_max"), "nats", log=True),
    Panel("Tokens per second", ("rollout/tokens_per_second",), "tokens/s"),
    Panel(
        "Seconds by phase",
        (
            *("time/generate", "time/reward", "time/reference", "time/train", "time/sync", "time/wait"),
            *("time/handover", "eval:time/eval"),
        ),
        "s",
        stacked=True,
    ),
    Panel("Staleness", ("rollout/staleness_mean", "rollout/staleness_max"), "policy versions"),
    Panel("Groups without a signal", ("reward/zero_variance_groups",), "share"),
    Panel("Loss", ("train/loss", "eval:eval/loss")),
    Panel("Gradient norm", ("train/grad_norm",)),
    Panel("Learning rate", ("train/learning_rate",)),
    Panel("Cost", (COST,), "dollars, since the beginning"),
)


@dataclass(frozen=True)
class Chart:
    """A panel with the metrics that a run has."""

    panel: Panel
    metrics: list[str]
    """`eval:` before those of evaluations."""


def all_metrics(reader: RunReader) -> list[str]:
    """Every metric of a run, `eval:` before those of evaluations."""
    return [*reader.metric_names(), *(f"eval:{name}" for name in reader.metric_names("eval"))]


def charts(names: Iterable[str]) -> list[Chart]:
    """Those panels that have anything to draw."""
    there = list(names)
    found = [Chart(panel, _matching(panel, there)) for panel in PANELS]
    return [chart for chart in found if chart.metrics]


def points(reader: RunReader, names: Iterable[str], since: int = -1) -> dict[str, dict[str, list[Any]]]:
    """Steps and values of each metric after the step `since`; what is not finite is its name."""
    return {name: _points(reader, name, since) for name in names}


def spread_of(name: str) -> str | None:
    """The metric with the standard deviation of a mean."""
    return f"{name.removesuffix('mean')}std" if name.endswith("/mean") else None


def _matching(panel: Panel, there: list[str]) -> list[str]:
    found: list[str] = []
    for pattern in panel.metrics:
        before, star, after = pattern.partition("*")
        if star:
            found += [name for name in there if name.startswith(before) and name.endswith(after) and _middle(name)]
        elif pattern in there:
            found.append(pattern)
    return found


def _middle(name: str) -> bool:
    return name.count("/") == 2


def _points(reader: RunReader, name: str, since: int) -> dict[str, list[Any]]:
    split: Split = "eval" if name.startswith("eval:") else "train"
    series = reader.series(name.removeprefix("eval:"), split, since)
    stride = math.ceil(len(series) / MOST_POINTS) or 1
    kept = series[::stride]
    if kept and kept[-1] != series[-1]:
        kept.append(series[-1])
    values = [value if value is None or math.isfinite(value) else str(value) for _, value in kept]
    return {"x": [step for step, _ in kept], "y": values}
