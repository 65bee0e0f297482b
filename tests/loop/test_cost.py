"""What runs cost, and those that end because of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mrl.backends import BACKENDS, Resources, WorkerHandle
from mrl.backends.inline import InlineBackend
from mrl.backends.meter import Meter
from mrl.errors import ConfigError
from mrl.loop.cost import cost_before
from mrl.store.run import read_rows
from tests import small_runs

pytestmark = pytest.mark.inline("its own backend has the prices")


class Clock:
    """Goes on by an hour whenever it is looked at."""

    hours = 0

    def __call__(self) -> float:
        Clock.hours += 1
        return 3600.0 * Clock.hours


class Priced(InlineBackend):
    """A dollar an hour for each worker; every look at the clock takes an hour."""

    def __init__(self, call_timeout: float) -> None:
        super().__init__(call_timeout)
        self.meter = Meter(Clock())

    def price(self, name: str, resources: Resources) -> float:
        return 1.0

    def spent(self) -> float:
        return self.meter.dollars()

    async def spawn(self, worker: type, *, name: str, resources: Resources, args: dict[str, Any]) -> WorkerHandle:
        self.meter.start(name, 1.0)
        return await super().spawn(worker, name=name, resources=resources, args=args)

    async def close(self) -> None:
        await super().close()
        self.meter.stop()


@pytest.fixture(autouse=True)
def _priced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS._registered, "priced", Priced)


def costs(run: Path) -> list[float]:
    return [row["cost/dollars"] for row in read_rows(run, "metrics")]


def test_a_meter() -> None:
    now = [0.0]
    meter = Meter(lambda: now[0])
    meter.start("actor", 3.6)
    now[0] = 1000.0
    meter.start("rollout-0", 1.8)
    meter.start("actor", 3.6)  # another one in its place
    assert meter.dollars() == pytest.approx(1.0)
    now[0] = 2000.0
    meter.stop()
    now[0] = 9000.0
    assert meter.dollars() == pytest.approx(2.5)


@pytest.mark.parametrize("mode", [{}, {"mode": "simple", "algorithm": "grpo"}])
def test_a_run_that_has_cost_enough_ends_and_goes_on(mode: dict[str, Any], tiny_model: str, tmp_path: Path) -> None:
    """With a checkpoint after the step, and, with more money, over the same sum."""
    run = tmp_path / "r"
    options = {"backend": "priced", "save_steps": None if mode else 1, **mode}
    options = {name: value for name, value in options.items() if value is not None}
    result = small_runs.run(tiny_model, run, **options, max_steps=50, max_cost=30.0)
    assert result.status == "interrupted"
    assert result.checkpoint is not None
    (note,) = [row["message"] for row in read_rows(run, "events") if row["message"].startswith("max_cost")]
    assert re.search(r"the run has cost [\d.]+ dollars, of 30; writing a checkpoint and ending\. Raise max_cost", note)
    spent = cost_before(run)
    assert spent >= 30
    with pytest.raises(
        ConfigError, match=r"max_cost=30.0: this run has cost [\d.]+ dollars already, of 30; raise max_cost"
    ):
        small_runs.run(tiny_model, run, **options, max_steps=50, max_cost=30.0, resume=str(run), run_dir=None)
    more = spent + 40
    small_runs.run(tiny_model, run, **options, max_steps=50, max_cost=more, resume=str(run), run_dir=None)
    assert costs(run) == sorted(costs(run))
    assert costs(run)[-1] > spent


def test_no_price_no_limit(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"max_cost=5.0: backend inline knows no prices, so nothing would ever reach 5"
    ):
        small_runs.run(tiny_model, tmp_path / "r", max_cost=5.0)
    assert not (tmp_path / "r").exists()
