"""The seam to other backends: what goes to the worker and comes back is plain data, every call is short."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.backends import BACKENDS
from mrl.backends.inline import InlineBackend, InlineHandle
from mrl.loop.recorded_run import RunResult
from mrl.store.run import read_rows

SECONDS: dict[str, float] = {}


class PickledHandle(InlineHandle):
    """As if the worker were in another process: everything is copied on its way."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        result = pickle.dumps(await super().call(method, *pickle.loads(pickle.dumps(args)), **kwargs))
        SECONDS[method] = max(SECONDS.get(method, 0.0), time.monotonic() - start)
        return pickle.loads(result)


class PickledBackend(InlineBackend):
    shares_memory = False

    async def spawn(self, worker: type, *, name: str, resources: Any, args: dict[str, Any]) -> InlineHandle:
        handle = PickledHandle(worker(**pickle.loads(pickle.dumps(args))), name, self.call_timeout)
        self.handles.append(handle)
        return handle


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_the_trainer_is_one_worker_of_plain_data(
    algorithm: str, simple: Callable[..., RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS._registered, "pickled", PickledBackend)
    SECONDS.clear()
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\n\n"
        "def reward(completions, **_):\n    time.sleep(1.0)\n    return [float(len(t)) for t in completions]\n"
    )
    rewards = {"reward_funcs": f"{slow}:reward"} if algorithm == "grpo" else {}
    result = simple(algorithm, backend="pickled", max_steps=2, **rewards)
    assert result.status == "finished"
    assert len(list(read_rows(tmp_path / "run", "metrics"))) == 2
    assert len(list(read_rows(tmp_path / "run", "rollouts"))) == (32 if algorithm == "grpo" else 0)
    assert set(SECONDS) == {"initialize", "start", "next_records"}
    assert SECONDS["next_records"] < 0.9  # shorter than a step
