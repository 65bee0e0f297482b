"""`console`: live progress in a terminal; where there is none, a line every ten seconds at most."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mrl.system.units import duration
from mrl.tracking.base import WARNING, RunInfo
from mrl.tracking.console_state import State
from mrl.types import Outcome

LINE_EVERY_SECONDS = 10.0
PHASE_EVERY_SECONDS = 60.0
"""Without a terminal, the phase is printed when nothing was printed for so long."""

BAR_WIDTH = 40
"""At most; a bar that leaves no room for anything else is left out."""
LEAST_BAR = 8
GAP = "  "
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ConsoleTracker:
    """Writes to stderr, so that stdout stays free for results."""

    direct = True
    run_id: str | None = None

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.terminal = self.console.is_terminal and not self.console.is_dumb_terminal
        self.live: Live | None = None
        self.state: State | None = None
        self.printed: tuple[float, str] = (float("-inf"), "")
        self.waited = time.monotonic()
        """When a step or its phase was last printed."""
        self.loading = ""

    def start(self, run: RunInfo) -> None:
        facts = ", ".join(f"{name} {value}" for name, value in run.facts.items())
        going_on = f"  going on after step {run.step}" if run.step else ""
        self._print(f"[bold]{escape(run.name)}[/bold]  {escape(facts)}{going_on}", markup=True)
        self.state = State(run.step, run.total_steps)
        self.waited = time.monotonic()
        if self.terminal:
            self.live = Live(_Display(self.state), console=self.console, refresh_per_second=4)
            self.live.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self.state is None:
            return
        self.state.update(step, metrics)
        if self.live is None and time.monotonic() - self.printed[0] >= LINE_EVERY_SECONDS:
            self._line()

    def phase(self, name: str, detail: str = "") -> None:
        """What the run is doing now, e.g. `generating`, `1,024 tokens`."""
        if self.state is None:  # before the start there is no step to show it beside
            if name != self.loading:
                self.loading = name
                self._print(f"{name} {detail}".strip())
            return
        self.state.phase, self.state.detail = name, detail
        if self.live is None and name and time.monotonic() - self.waited >= PHASE_EVERY_SECONDS:
            self.waited = time.monotonic()
            doing = f"{name} {detail}".strip()
            self._print(f"step {self.state.step}/{self.state.total}{GAP}{doing}")

    def note(self, message: str) -> None:
        if self.terminal and message.startswith(WARNING):
            self._print(f"[yellow]{escape(WARNING)}[/yellow]{escape(message.removeprefix(WARNING))}", markup=True)
        else:
            self._print(message)

    def finish(self, status: Outcome = "finished") -> None:
        if self.state is not None:
            self.state.phase = self.state.detail = ""
        if self.live:
            self.live.stop()
            self.live = None
        elif self.state and self.state.values and not self.terminal:
            self._line()

    def _line(self) -> None:
        """Where the run is, unless that was the last thing said."""
        assert self.state is not None
        line = GAP.join([f"step {self.state.step}/{self.state.total}", *map(str, self.state.figures())])
        if line != self.printed[1]:
            left = self.state.seconds_left()
            self._print(f"{line}{GAP}left {duration(left)}" if left else line)
        self.waited = time.monotonic()
        self.printed = (self.waited, line)

    def _print(self, text: str, markup: bool = False) -> None:
        # A log's lines are as long as they are. A message may hold what looks like markup, and what a model said may
        # hold anything, sequences that move the cursor too.
        text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
        self.console.print(text, highlight=False, markup=markup, soft_wrap=not self.terminal)


@dataclass(frozen=True)
class _Display:
    """Two lines, as wide as the terminal is now: where the run is and what it does; its figures."""

    state: State

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._progress(options.max_width)
        figures = self.state.figures()
        if figures:
            texts = [str(figure) for figure in figures]
            kept = fitting(texts, [figure.weight for figure in figures], options.max_width)
            yield Text(GAP.join(kept), no_wrap=True, overflow="crop")

    def _progress(self, width: int) -> Table | Text:
        state, left = self.state, self.state.seconds_left()
        step = f"step {state.step}/{state.total}"
        texts = [step, state.phase, state.detail, "" if left is None else f"left {duration(left)}"]
        kept = fitting(texts, [9, 8, 6, 7], width)
        used = len(GAP.join(kept))
        if width - used - len(GAP) < LEAST_BAR:
            return Text(GAP.join(kept), no_wrap=True, overflow="crop")
        line = Table.grid(padding=(0, len(GAP), 0, 0))
        bar = ProgressBar(state.total, state.step, width=min(width - used - len(GAP), BAR_WIDTH))
        line.add_row(Text(kept[0]), bar, *map(Text, kept[1:]))
        return line


def fitting(texts: list[str], weights: list[int], width: int) -> list[str]:
    """Those that fit side by side, in their order: the weightiest first, and the first one whatever its width.

    One that does not fit is left out, and so is what weighs less.
    """
    kept: set[int] = set()
    used = -len(GAP)
    for place in sorted(range(len(texts)), key=lambda place: (place > 0, -weights[place])):
        if not texts[place]:
            continue
        used += len(GAP) + len(texts[place])
        if used > width and kept:
            break
        kept.add(place)
    return [text for place, text in enumerate(texts) if place in kept]
