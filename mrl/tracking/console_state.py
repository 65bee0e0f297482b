"""What `console` shows of a run: the newest of every figure, the reward smoothed, the time that is left."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

SMOOTHING = 0.9
"""Weight of the past in the reward and the pass rate; the mean of all steps while there are few."""
SMOOTHED = ("reward/mean", "reward/pass_rate")

ETA_STEPS = 50
"""The time left comes from the speed of so many last steps."""

ALIKE_STEPS = 3
"""Steps in a row in which every group's rewards were equal, from which on they are counted in the display."""

SHOWN = (
    ("reward", "reward/mean", "{:.3f}", 10),
    ("pass", "reward/pass_rate", "{:.0%}", 8),
    ("failed", "rollout/failed_fraction", "{:.0%}", 3),
    ("held-out", "eval/pass_rate", "{:.0%}", 7),
    ("length", "rollout/completion_length_mean", "{:,.0f}", 6),
    ("truncated", "rollout/truncated_fraction", "{:.0%}", 4),
    ("entropy", "train/entropy", "{:.2f}", 5),
    ("loss", "train/loss", "{:.4f}", 10),
    ("held-out loss", "eval/loss", "{:.4f}", 7),
    ("tok/s", "rollout/tokens_per_second", "{:,.0f}", 2),
)
"""Label, metric, format, and how long it stays when there is little room."""
WEIGHT_OF_TROUBLE = 9


@dataclass(frozen=True)
class Figure:
    """One number with its label."""

    label: str
    value: str
    weight: int
    """The higher, the longer it is shown where there is little room."""

    def __str__(self) -> str:
        return f"{self.label} {self.value}"


class State:
    """The latest of every figure that is shown, and how fast the run goes."""

    def __init__(self, step: int, total: int) -> None:
        self.step = step
        self.total = total
        self.phase = self.detail = ""
        self.values: dict[str, float] = {}
        self.alike = 0
        """Steps in a row in which every group's rewards were equal."""
        self._seen = dict.fromkeys(SMOOTHED, 0)
        self._smooth: dict[str, float] = {}
        self.times: deque[tuple[int, float]] = deque([(step, time.monotonic())], maxlen=ETA_STEPS + 1)

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Take in a step's metrics, or an evaluation's, which does not count as a step."""
        self.values |= metrics
        for name in SMOOTHED:
            if name in metrics:
                self.values[name] = self._smoothed(name, metrics[name])
            elif "rollout/failed_fraction" in metrics:  # a step of which nothing could be scored
                self.values.pop(name, None)
        if "reward/zero_variance_groups" in metrics:
            self.alike = self.alike + 1 if metrics["reward/zero_variance_groups"] == 1 else 0
        if step > self.step:
            self.times.append((step, time.monotonic()))
        self.step = step

    def figures(self) -> list[Figure]:
        """What is known, in the order in which it is shown."""
        figures = []
        for label, name, form, weight in SHOWN:
            if name not in self.values or (name == "train/loss" and "rollout/failed_fraction" in self.values):
                continue
            trouble = name == "rollout/failed_fraction" and self.values[name] > 0
            figures.append(Figure(label, form.format(self.values[name]), WEIGHT_OF_TROUBLE if trouble else weight))
        if self.alike >= ALIKE_STEPS:
            after = next((place for place, figure in enumerate(figures) if figure.label == "pass"), -1) + 1
            figures.insert(after, Figure("groups alike for", f"{self.alike:,} steps", WEIGHT_OF_TROUBLE))
        return figures

    def seconds_left(self) -> float | None:
        """At the speed of the last steps, counting down between two; None when nothing is left, or not known yet."""
        (first, began), (last, ended) = self.times[0], self.times[-1]
        if last == first or last >= self.total:
            return None
        left = (ended - began) / (last - first) * (self.total - last)
        return max(left - (time.monotonic() - ended), 0.0)

    def _smoothed(self, name: str, value: float) -> float:
        past = min(SMOOTHING, self._seen[name] / (self._seen[name] + 1))
        smooth = self._smooth.get(name, value)
        self._seen[name] += 1
        found = past * smooth + (1 - past) * value
        if math.isfinite(found):  # a NaN is shown, and then forgotten
            self._smooth[name] = found
        return found
