"""Several trackers: none can stop or stall the run, and each trouble is told once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mrl.errors import ConfigError
from mrl.tracking import TRACKERS, RunInfo, TrackerSet, check_trackers, several


class Recorder:
    """Keeps its calls; the base of the misbehaving ones."""

    made: ClassVar[list[Recorder]] = []
    run_id: str | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        Recorder.made.append(self)

    def start(self, run: RunInfo) -> None:
        self.run_id = run.resume_ids.get("good", "new-id")
        self.calls.append(("start", run.step))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.calls.append(("log", step, metrics, threading.current_thread().name))

    def note(self, message: str) -> None:
        self.calls.append(("note", message))

    def finish(self, status: str = "finished") -> None:
        self.calls.append(("finish", status))


class Direct(Recorder):
    direct = True


class Shows(Direct):
    def phase(self, name: str, detail: str) -> None:
        self.calls.append(("phase", name, detail))
        if name == "broken":
            raise ValueError("no such phase")


class FailsToStart(Recorder):
    def start(self, run: RunInfo) -> None:
        self.run_id = "half"
        raise ConnectionError("no route to host")


class FailsAtStepTwo(Recorder):
    def log(self, step: int, metrics: dict[str, float]) -> None:
        super().log(step, metrics)
        if step == 2:
            raise ValueError("bad row")


class Exits(Recorder):
    def finish(self, status: str = "finished") -> None:
        sys.exit(3)


class CannotBeMade(Recorder):
    def __init__(self) -> None:
        raise OSError("disk full")


class Hangs(Recorder):
    release = threading.Event()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        super().log(step, metrics)
        Hangs.release.wait(60)


class HangsAtStart(Recorder):
    def start(self, run: RunInfo) -> None:
        Hangs.release.wait(60)


FAKES = {
    "good": Recorder,
    "direct": Direct,
    "shows": Shows,
    "no-start": FailsToStart,
    "step-two": FailsAtStepTwo,
    "exits": Exits,
    "unmade": CannotBeMade,
    "hangs": Hangs,
    "hangs-at-start": HangsAtStart,
}


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(TRACKERS, "_registered", dict(FAKES))
    monkeypatch.setattr(several, "START_SECONDS", 0.2)
    monkeypatch.setattr(several, "FINISH_SECONDS", 1.0)
    Recorder.made = []
    Hangs.release.clear()
    yield
    Hangs.release.set()


def a_run(**changes: Any) -> RunInfo:
    return RunInfo("run", Path("runs/run"), 3, {}, **changes)


def drive(names: list[str], steps: int = 3) -> list[str]:
    said: list[str] = []
    trackers = TrackerSet(names, said.append)
    trackers.start(a_run())
    for step in range(1, steps + 1):
        trackers.log(step, {"reward/mean": float(step)})
    trackers.note("hello")
    trackers.finish("interrupted")
    return said


def test_every_tracker_gets_every_call_in_order() -> None:
    assert drive(["good", "direct", "good"]) == []
    good, direct = sorted(Recorder.made, key=lambda made: isinstance(made, Direct))
    for tracker in (good, direct):
        assert [call[:3] for call in tracker.calls] == [
            ("start", 0),
            ("log", 1, {"reward/mean": 1.0}),
            ("log", 2, {"reward/mean": 2.0}),
            ("log", 3, {"reward/mean": 3.0}),
            ("note", "hello"),
            ("finish", "interrupted"),
        ]
    assert good.calls[1][3] == "tracker-good"
    assert direct.calls[1][3] == threading.current_thread().name


def test_a_row_is_not_changed_by_what_the_loop_does_with_it_later() -> None:
    trackers = TrackerSet(["good"], print)
    trackers.start(a_run())
    metrics = {"reward/mean": 1.0}
    trackers.log(1, metrics)
    metrics["reward/mean"] = 2.0
    trackers.finish()
    assert Recorder.made[0].calls[1][2] == {"reward/mean": 1.0}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no-start", "ConnectionError: no route to host"),
        ("step-two", "ValueError: bad row"),
        ("exits", "SystemExit: 3"),
        ("unmade", "OSError: disk full"),
    ],
)
def test_a_failing_tracker_is_told_once_and_left_out(name: str, error: str) -> None:
    assert drive([name, "good"]) == [f"tracker {name} failed and is left out: {error}"]
    assert [type(made) for made in Recorder.made if made.calls[-1:] == [("finish", "interrupted")]] == [Recorder]
    failed = next((made for made in Recorder.made if isinstance(made, FailsAtStepTwo)), None)
    assert failed is None or [call[1] for call in failed.calls] == [0, 1, 2]


def test_a_failing_direct_tracker_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Direct, "log", lambda self, step, metrics: 1 / 0)
    assert drive(["direct", "good"]) == ["tracker direct failed and is left out: ZeroDivisionError: division by zero"]
    assert len(Recorder.made[-1].calls) == 6


def test_say_may_note_and_is_called_on_the_callers_thread() -> None:
    threads: list[str] = []

    def say(message: str) -> None:
        threads.append(threading.current_thread().name)
        trackers.note(message)

    trackers = TrackerSet(["no-start", "direct"], say)
    trackers.start(a_run())
    trackers.finish()
    assert threads == [threading.current_thread().name]
    direct = next(made for made in Recorder.made if isinstance(made, Direct))
    assert [call[0] for call in direct.calls] == ["start", "note", "finish"]


def test_phases_go_to_those_who_show_them_before_the_start_as_well() -> None:
    said: list[str] = []
    trackers = TrackerSet(["good", "direct", "shows"], said.append)
    trackers.phase("loading")
    trackers.start(a_run())
    trackers.phase("generating", "12 tokens")
    trackers.phase("broken")
    trackers.finish()
    shows = next(made for made in Recorder.made if isinstance(made, Shows))
    assert [call[0] for call in shows.calls] == ["phase", "start", "phase", "phase"]
    assert said == ["tracker shows failed and is left out: ValueError: no such phase"]
    assert all(call[0] != "phase" for made in Recorder.made if made is not shows for call in made.calls)


@pytest.mark.parametrize("name", ["hangs", "hangs-at-start"])
def test_a_hanging_tracker_does_not_stall_the_loop(name: str) -> None:
    said: list[str] = []
    trackers = TrackerSet([name, "good"], said.append)
    trackers.start(a_run())
    began = time.monotonic()
    for step in range(several.MAX_WAITING + 50):
        trackers.log(step, {"reward/mean": 1.0})
        if step % 500 == 0:
            trackers.run_ids()
            time.sleep(0.05)
    assert time.monotonic() - began < 2
    trackers.finish()
    assert time.monotonic() - began < 5
    assert said == [
        f"tracker {name} does not keep up; its oldest rows are dropped",
        f"tracker {name} did not finish in 1 s; rows may be lost",
    ]
    good = next(made for made in Recorder.made if type(made) is Recorder)
    assert len(good.calls) == several.MAX_WAITING + 52


def test_the_newest_rows_are_the_ones_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "MAX_WAITING", 10)
    monkeypatch.setattr(several, "FINISH_SECONDS", 20.0)
    trackers = TrackerSet(["hangs"], print)
    trackers.start(a_run())
    for step in range(100):
        trackers.log(step, {})
    Hangs.release.set()
    trackers.finish()
    calls = Recorder.made[0].calls
    assert [call[1] for call in calls[-10:]] == [*range(91, 100), "finished"]
    assert len(calls) <= 13


def test_ids_are_for_the_checkpoint_and_survive_failure_and_absence() -> None:
    trackers = TrackerSet(["good", "no-start", "direct"], lambda message: None)
    trackers.start(a_run(step=5, resume_ids={"good": "old-id", "not-used-today": "kept"}))
    expected = {"good": "old-id", "not-used-today": "kept", "no-start": "half", "direct": "old-id"}
    assert trackers.run_ids() == expected
    trackers.finish()
    trackers.finish()
    assert trackers.run_ids() == expected


def test_a_run_that_never_started_finishes() -> None:
    trackers = TrackerSet(["good", "direct", "hangs"], print)
    trackers.note("too early")
    trackers.finish("failed")
    assert Recorder.made == []


def test_a_hanging_tracker_does_not_keep_the_process() -> None:
    program = """
import time
from pathlib import Path
from mrl.tracking import TRACKERS, RunInfo, TrackerSet, several
several.FINISH_SECONDS = 0.5

@TRACKERS.register("sleeps")
class Sleeps:
    run_id = None
    def start(self, run): time.sleep(600)
    log = note = finish = start

trackers = TrackerSet(["sleeps"], print)
trackers.start(RunInfo("run", Path("."), 1, {}))
trackers.log(1, {})
trackers.finish()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "tracker sleeps did not finish in 0 s; rows may be lost\n"


class TestCheck:
    def test_what_is_missing_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(several.importlib.util, "find_spec", lambda name: None)
        for name in ("wandb", "trackio", "tensorboard", "mlflow"):
            with pytest.raises(ConfigError, match=rf"report_to: {name} .* pip install 'mrl\[{name}\]'"):
                check_trackers(["console", "jsonl", name])

    def test_a_folder_of_that_name_is_not_the_library(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "no_such_library").mkdir()
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(Recorder, "requires", ("no_such_library",), raising=False)
        with pytest.raises(ConfigError, match="no_such_library"):
            check_trackers(["good"])

    def test_an_unknown_name(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'console'"):
            check_trackers(["consol"])

    def test_a_trackers_own_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def check() -> None:
            raise ConfigError("report_to: good needs a key")

        monkeypatch.setattr(Recorder, "check", staticmethod(check), raising=False)
        with pytest.raises(ConfigError, match="needs a key"):
            check_trackers(["good"])

    def test_what_needs_nothing(self) -> None:
        check_trackers(["console", "jsonl"])
        check_trackers([])
