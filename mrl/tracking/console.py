"""`console`: live progress in a terminal; where there is none, a line every ten seconds at most."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from mrl.tracking.base import RunInfo, Status

LINE_EVERY_SECONDS = 10.0

SMOOTHING = 0.9
"""Weight of the past in the reward that is shown; the mean of all steps while there are few."""

ETA_STEPS = 50
"""The time left comes from the speed of so many last steps."""

SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("pass", "reward/pass_rate", "{:.0%}"),
    ("held-out", "eval/pass_rate", "{:.0%}"),
    ("loss", "train/loss", "{:.4f}"),
    ("held-out loss", "eval/loss", "{:.4f}"),
    ("tok/s", "rollout/tokens_per_second", "{:,.0f}"),
)


class ConsoleTracker:
    """Writes to stderr, so that stdout stays free for results."""

    direct = True
    run_id: str | None = None

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.live = self.console.is_terminal
        self.progress: Progress | None = None
        self.state: _State | None = None
        self.printed: tuple[float, str] = (float("-inf"), "")

    def start(self, run: RunInfo) -> None:
        facts = ", ".join(f"{name} {value}" for name, value in run.facts.items())
        going_on = f"  going on after step {run.step}" if run.step else ""
        self._print(f"[bold]{escape(run.name)}[/bold]  {escape(facts)}{going_on}", markup=True)
        self.state = _State(run.step, run.total_steps)
        if self.live:
            self.progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[shown]}", markup=False),
                _TimeLeft(self.state),
                console=self.console,
            )
            self.bar = self.progress.add_task("train", total=run.total_steps, completed=run.step, shown="–")
            self.progress.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self.state is None:
            return
        self.state.update(step, metrics)
        if self.progress:
            self.progress.update(self.bar, completed=step, shown=self.state.shown())
        elif time.monotonic() - self.printed[0] >= LINE_EVERY_SECONDS:
            self._line()

    def note(self, message: str) -> None:
        self._print(message)

    def finish(self, status: Status = "finished") -> None:
        if self.progress:
            self.progress.stop()
            self.progress = None
        elif self.state and self.state.values and not self.live:
            self._line()

    def _line(self) -> None:
        """Where the run is, unless that was the last thing said."""
        assert self.state is not None
        line = f"step {self.state.step}/{self.state.total}  {self.state.shown()}"
        if line != self.printed[1]:
            left = self.state.seconds_left()
            self._print(f"{line}  left {_duration(left)}" if left else line)
        self.printed = (time.monotonic(), line)

    def _print(self, text: str, markup: bool = False) -> None:
        # A log's lines are as long as they are; a message may hold what looks like markup.
        self.console.print(text, highlight=False, markup=markup, soft_wrap=True)


class _State:
    """The latest of every figure that is shown, and how fast the run goes."""

    def __init__(self, step: int, total: int) -> None:
        self.step = step
        self.total = total
        self.values: dict[str, float] = {}
        self.rewards = 0
        self.times: deque[tuple[int, float]] = deque([(step, time.monotonic())], maxlen=ETA_STEPS + 1)

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Take in a step's metrics, or an evaluation's, which does not count as a step."""
        smooth = self.values.get("reward/mean")
        self.values |= metrics
        if "reward/mean" in metrics and smooth is not None and smooth == smooth:  # a NaN is shown, and then forgotten
            past = min(SMOOTHING, self.rewards / (self.rewards + 1))
            self.values["reward/mean"] = past * smooth + (1 - past) * metrics["reward/mean"]
        self.rewards += "reward/mean" in metrics
        if step > self.step:
            self.times.append((step, time.monotonic()))
        self.step = step

    def shown(self) -> str:
        """The figures, in one line."""
        return "  ".join(
            f"{label} {form.format(self.values[name])}"
            for label, name, form in SHOWN
            if name in self.values and not (name == "train/loss" and "reward/mean" in self.values)
        )

    def seconds_left(self) -> float | None:
        """At the speed of the last steps, counting down between two; None when nothing is left, or not known yet."""
        (first, began), (last, ended) = self.times[0], self.times[-1]
        if last == first or last >= self.total:
            return None
        left = (ended - began) / (last - first) * (self.total - last)
        return max(left - (time.monotonic() - ended), 0.0)


class _TimeLeft(ProgressColumn):
    """Time left, from the run's own steps: rich's looks back 30 seconds, which may be less than a step."""

    def __init__(self, state: _State) -> None:
        super().__init__()
        self.state = state

    def render(self, task: Task) -> Text:
        left = self.state.seconds_left()
        return Text("" if left is None else f"left {_duration(left)}", style="progress.remaining")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
