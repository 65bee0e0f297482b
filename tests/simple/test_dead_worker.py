"""A trainer of TRL's whose process dies goes on from its last checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.loop.recorded_run import RunResult
from mrl.store.run import read_rows
from tests.process_backend import ProcessHandle
from tests.small_runs import record_of, same_weights


@pytest.mark.slow
def test_the_run_is_the_one_without_a_death(
    simple: Callable[..., RunResult], processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"algorithm": "sft", "max_steps": 6, "save_steps": 2, "backend": "processes"}
    simple(**options, run_dir=str(tmp_path / "calm"))
    call, killed = ProcessHandle.call, []

    async def counted(self: ProcessHandle, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = await call(self, method, *args, **kwargs)
        if method == "next_records" and not killed and any(record["kind"] == "checkpoint" for record in answer):
            killed.append(self.name)
            os.kill(self.pid, signal.SIGKILL)
        return answer

    monkeypatch.setattr(ProcessHandle, "call", counted)
    result = simple(**options, run_dir=str(tmp_path / "stormy"))
    assert (result.status, result.steps, killed) == ("finished", 6, ["simple"])
    counter = "trl/num_tokens"  # TRL counts from where it was resumed
    stormy, calm = (record_of(tmp_path / name, counter)["metrics"] for name in ("stormy", "calm"))
    assert stormy == calm
    assert same_weights(tmp_path / "stormy", tmp_path / "calm")
    (event,) = (row for row in read_rows(tmp_path / "stormy", "events") if row["kind"] == "restart")
    assert "simple: its process died" in event["message"]
