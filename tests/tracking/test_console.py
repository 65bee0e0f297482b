"""What a person sees: a live line in a terminal, few whole lines in a log."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from mrl.tracking import RunInfo, console
from mrl.tracking.console import ConsoleTracker


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(console, "time", made)
    return made


def tracker_on(text: io.StringIO, terminal: bool = False) -> ConsoleTracker:
    return ConsoleTracker(Console(file=text, force_terminal=terminal, width=100))


def a_run(steps: int = 100, step: int = 0) -> RunInfo:
    return RunInfo("my-run", Path("runs/my-run"), steps, {}, {"tasks": 10}, step=step)


def test_a_log_gets_a_line_every_ten_seconds_and_the_last_one(clock: Clock) -> None:
    text = io.StringIO()
    tracker = tracker_on(text)
    tracker.start(a_run(30))
    for step in range(1, 31):
        clock.now += 1
        tracker.log(step, {"reward/mean": 1.0, "reward/pass_rate": 0.5, "rollout/tokens_per_second": 1234.0})
    tracker.log(30, {"eval/pass_rate": 0.75})
    tracker.finish()
    lines = text.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "my-run",
        "step 1/30",
        "step 11/30",
        "step 21/30",
        "step 30/30",
    ]
    assert lines[2] == "step 11/30  reward 1.000  pass 50%  tok/s 1,234  left 19 s"
    assert lines[-1] == "step 30/30  reward 1.000  pass 50%  held-out 75%  tok/s 1,234"
    assert "\x1b" not in text.getvalue()
    assert "\r" not in text.getvalue()


def test_messages_are_printed_as_they_are(clock: Clock) -> None:
    text = io.StringIO()
    tracker = tracker_on(text)
    tracker.start(a_run())
    message = "[task-1] reward [/b] 0.5 " + "x" * 300
    tracker.note(message)
    assert message in text.getvalue().splitlines()


def test_a_terminal_shows_step_reward_held_out_and_time_left_and_messages_above(clock: Clock) -> None:
    text = io.StringIO()
    tracker = tracker_on(text, terminal=True)
    tracker.start(a_run(200, step=100))
    assert tracker.progress is not None
    clock.now += 120
    tracker.log(102, {"reward/mean": 0.25})
    tracker.log(102, {"eval/pass_rate": 0.5})
    tracker.note("something happened")
    tracker.progress.refresh()
    tracker.finish()
    shown = text.getvalue()
    assert "going on after step 100" in shown
    assert "102/200" in shown
    assert "reward 0.250  held-out 50%" in shown
    assert "left 1 h 38 min" in shown
    assert shown.index("something happened") < shown.rindex("102/200")


def test_the_reward_is_smoothed_and_a_nan_is_shown_once(clock: Clock) -> None:
    tracker = tracker_on(io.StringIO())
    tracker.start(a_run())
    assert tracker.state is not None
    for step, reward in enumerate([0.0, 1.0, 1.0, 0.0], start=1):
        tracker.log(step, {"reward/mean": reward})
    assert tracker.state.values["reward/mean"] == pytest.approx(0.5)  # few steps: their mean
    for step in range(5, 40):
        tracker.log(step, {"reward/mean": 0.5})
    tracker.log(40, {"reward/mean": 1.0})
    assert tracker.state.values["reward/mean"] == pytest.approx(0.55)
    tracker.log(41, {"reward/mean": float("nan")})
    assert "reward nan" in tracker.state.shown()
    tracker.log(42, {"reward/mean": 0.25})
    assert "reward 0.250" in tracker.state.shown()


def test_the_time_left_follows_the_last_steps_and_counts_down(clock: Clock) -> None:
    tracker = tracker_on(io.StringIO())
    tracker.start(a_run(1000))
    assert tracker.state is not None
    assert tracker.state.seconds_left() is None
    for step in range(1, 101):
        clock.now += 100 if step <= 40 else 2  # slow at first
        tracker.log(step, {})
    assert tracker.state.seconds_left() == pytest.approx(2 * 900)
    clock.now += 1
    assert tracker.state.seconds_left() == pytest.approx(2 * 900 - 1)
    clock.now += 10_000
    assert tracker.state.seconds_left() == 0


def test_nothing_happens_before_the_start() -> None:
    text = io.StringIO()
    tracker = tracker_on(text)
    tracker.log(1, {"reward/mean": 1.0})
    tracker.finish()
    assert text.getvalue() == ""
