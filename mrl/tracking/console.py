"""`console`: live progress in a terminal, a line per step where there is none."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mrl.tracking.base import RunInfo

LINE_EVERY_SECONDS = 10.0


class ConsoleTracker:
    """Writes to stderr, so that stdout stays free for results."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal
        self.last_line = 0.0

    def start(self, run: RunInfo) -> None:
        facts = ", ".join(f"{name} {value}" for name, value in run.facts.items())
        self.console.print(f"[bold]{run.name}[/bold]  {facts}", highlight=False)
        self.total = run.total_steps
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[shown]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.live,
        )
        self.bar = self.progress.add_task("train", total=run.total_steps, shown="reward –")
        self.progress.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        shown = _shown(metrics)
        self.progress.update(self.bar, completed=step, shown=shown)
        if not self.live and (time.monotonic() - self.last_line > LINE_EVERY_SECONDS or step in (1, self.total)):
            self.last_line = time.monotonic()
            left = self.progress.tasks[0].time_remaining
            eta = f"  left {left / 60:.1f} min" if left else ""
            self.console.print(f"step {step}/{self.total}  {shown}{eta}", highlight=False)

    def note(self, message: str) -> None:
        self.console.print(message, highlight=False)

    def finish(self) -> None:
        if hasattr(self, "progress"):
            self.progress.stop()


def _shown(metrics: dict[str, float]) -> str:
    parts = []
    for label, name, form in (
        ("reward", "reward/mean", "{:.3f}"),
        ("pass", "reward/pass_rate", "{:.0%}"),
        ("held-out", "eval/pass_rate", "{:.0%}"),
        ("tok/s", "rollout/tokens_per_second", "{:,.0f}"),
    ):
        if name in metrics:
            parts.append(f"{label} {form.format(metrics[name])}")
    return "  ".join(parts)
