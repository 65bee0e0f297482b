"""What a person sees: a live line in a terminal, few whole lines in a log."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from mrl.tracking import RunInfo, console, console_state
from mrl.tracking.console import ConsoleTracker


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(console, "time", made)
    monkeypatch.setattr(console_state, "time", made)
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
    assert tracker.live is not None
    clock.now += 120
    tracker.log(102, {"reward/mean": 0.25})
    tracker.log(102, {"eval/pass_rate": 0.5})
    tracker.note("something happened")
    tracker.note("warning: step 102: " + "x" * 62 + " 12 of 16 rollouts could not be scored")
    tracker.live.refresh()
    tracker.finish()
    shown = text.getvalue()
    assert "going on after step 100" in shown
    assert "102/200" in shown
    assert "reward 0.250  held-out 50%" in shown
    assert "left 1 h 38 min" in shown
    assert "could not be scored" in shown.splitlines()  # words are kept whole
    assert shown.index("something happened") < shown.rindex("102/200")


FIGURES = {
    "reward/mean": 0.5,
    "reward/pass_rate": 0.25,
    "reward/zero_variance_groups": 0.5,
    "rollout/failed_fraction": 0.0,
    "rollout/completion_length_mean": 412.4,
    "rollout/truncated_fraction": 0.125,
    "rollout/tokens_per_second": 1234.0,
    "train/entropy": 1.234,
    "train/loss": 0.1,
}


def screen(clock: Clock, width: int, metrics: dict[str, float]) -> list[str]:
    """What a terminal of that width shows last, line by line."""
    tracker = ConsoleTracker(Console(file=io.StringIO(), force_terminal=True, width=width))
    tracker.start(a_run(200))
    clock.now += 120
    tracker.log(12, metrics)
    tracker.phase("generating", "12,345 tokens")
    assert tracker.live is not None
    seen = Console(file=io.StringIO(), width=width, record=True)
    seen.print(tracker.live.renderable)
    tracker.finish()
    return [line.rstrip() for line in seen.export_text().splitlines()]


def test_a_narrow_terminal_drops_the_least_important_first_and_never_the_step(clock: Clock) -> None:
    wide, middle, narrow, tiny = (screen(clock, width, FIGURES) for width in (120, 80, 40, 10))
    assert wide[0].startswith("step 12/200  ━")
    assert wide[0].endswith("  generating  12,345 tokens  left 31 min")
    assert wide[1] == "reward 0.500  pass 25%  failed 0%  length 412  truncated 12%  entropy 1.23  tok/s 1,234"
    assert middle[1] == "reward 0.500  pass 25%  failed 0%  length 412  truncated 12%  entropy 1.23"
    assert narrow == ["step 12/200  generating  left 31 min", "reward 0.500  pass 25%  length 412"]
    assert tiny[0].startswith("step 12/2")
    assert all(len(line) <= width for width, lines in ((80, middle), (40, narrow), (10, tiny)) for line in lines)


def test_failures_come_before_other_figures_and_alike_groups_are_counted(clock: Clock) -> None:
    failing = screen(clock, 40, FIGURES | {"rollout/failed_fraction": 0.5})
    assert failing[1] == "reward 0.500  pass 25%  failed 50%"
    tracker = tracker_on(io.StringIO())
    tracker.start(a_run())
    assert tracker.state is not None
    for step in range(1, 8):
        tracker.log(step, FIGURES | {"reward/zero_variance_groups": 1.0})
    assert [str(figure) for figure in tracker.state.figures()][2] == "groups alike for 7 steps"
    tracker.log(8, FIGURES)
    assert "alike" not in " ".join(map(str, tracker.state.figures()))
    tracker.log(9, {"rollout/failed_fraction": 1.0})  # nothing was scored: no reward is shown
    assert [figure.label for figure in tracker.state.figures()][:2] == ["failed", "length"]


def test_reward_and_pass_rate_are_smoothed_alike_and_a_nan_is_shown_once(clock: Clock) -> None:
    tracker = tracker_on(io.StringIO())
    tracker.start(a_run())
    assert tracker.state is not None

    def log(step: int, value: float) -> list[float]:
        tracker.log(step, {"reward/mean": value, "reward/pass_rate": value})
        assert tracker.state is not None
        return [tracker.state.values["reward/mean"], tracker.state.values["reward/pass_rate"]]

    for step, value in enumerate([0.0, 1.0, 1.0, 0.0], start=1):
        shown = log(step, value)
    assert shown == pytest.approx([0.5, 0.5])  # few steps: their mean
    for step in range(5, 40):
        log(step, 0.5)
    assert log(40, 1.0) == pytest.approx([0.55, 0.55])
    log(41, float("nan"))
    assert str(tracker.state.figures()[0]) == "reward nan"
    assert log(42, 1.0) == pytest.approx([0.595, 0.595])


def test_a_log_is_told_what_a_long_step_waits_for(clock: Clock) -> None:
    text = io.StringIO()
    tracker = tracker_on(text)
    tracker.phase("loading", "starter")
    tracker.phase("loading", "starter")
    tracker.start(a_run())
    for second in range(130):
        clock.now += 1
        tracker.phase("generating", f"{second * 10:,} tokens")
    lines = text.getvalue().splitlines()
    assert lines[0] == "loading starter"
    assert lines[2:] == ["step 0/100  generating 590 tokens", "step 0/100  generating 1,190 tokens"]


def test_what_a_model_says_cannot_move_the_cursor(clock: Clock) -> None:
    text = io.StringIO()
    tracker = tracker_on(text)
    tracker.start(a_run())
    tracker.note("completion: a\x1b[2Jb\rc\x07\n\tend")
    assert text.getvalue().splitlines()[1:] == [r"completion: a\x1b[2Jb\x0dc\x07", "        end"]


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
