"""Whole runs on the real vLLM whose engine is killed, or stops, while it generates: the run ends as if nothing was."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mrl import MRLTrainer
from mrl.engines.vllm import VLLMEngine
from mrl.store.run import read_rows
from mrl.types import Completion, GenerateRequest

pytestmark = pytest.mark.vllm

STEPS, ROLLOUTS = 5, 16
GROUPS: list[int] = []
"""Process groups of the engines that were broken."""


def distinct(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) + 0.01 * len(text) for text in completions]


def break_one(monkeypatch: pytest.MonkeyPatch, how: signal.Signals) -> None:
    """In the third step, while several requests are in flight."""
    generate, calls = VLLMEngine.generate, 0
    GROUPS.clear()

    async def broken(engine: VLLMEngine, requests: list[GenerateRequest]) -> list[Completion]:
        nonlocal calls
        calls += 1
        if calls != 2 * ROLLOUTS + 3:
            return await generate(engine, requests)
        running = asyncio.create_task(generate(engine, requests))
        while (await engine.health())["in_flight"] < 4:
            await asyncio.sleep(0.001)
        GROUPS.append(engine.pid)
        os.killpg(engine.pid, how)
        return await running

    monkeypatch.setattr(VLLMEngine, "generate", broken)


@pytest.mark.parametrize(
    ("how", "method", "options"),
    [
        (signal.SIGKILL, "reload", {}),
        (signal.SIGKILL, "direct", {"use_lora": True, "lora_r": 8}),
        (signal.SIGSTOP, "direct", {"vllm_stall_timeout": 20.0}),
    ],
)
def test_a_run_outlives_its_engine(
    how: signal.Signals,
    method: str,
    options: dict[str, object],
    vllm_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_one(monkeypatch, how)
    result = MRLTrainer(
        model=vllm_model,
        device="cpu",
        train_dataset=[{"prompt": f"say {i}"} for i in range(8)],
        reward_funcs=distinct,
        run_dir=str(tmp_path / "run"),
        report_to=[],
        max_steps=STEPS,
        batch_size=4,
        num_generations=4,
        max_completion_length=100,
        max_model_len=256,
        temperature=1.0,
        top_p=1.0,
        learning_rate=1e-2,
        engine="vllm",
        num_rollout_workers=1,
        weight_sync_method=method,
        **options,
    ).train()
    assert result.status == "finished"
    assert len(GROUPS) == 1
    assert not [pid for pid in os.listdir("/proc") if group_of(pid) == GROUPS[0]]
    rows = list(read_rows(tmp_path / "run", "rollouts"))
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, STEPS + 1), ROLLOUTS)
    assert all(row["error"] is None and row["reward"] is not None for row in rows)
    assert all(row["samples"][0]["policy_version"] == row["step"] - 1 for row in rows), "none older"
    gaps = [row["train/logprob_gap_max"] for row in read_rows(tmp_path / "run", "metrics")]
    assert len(gaps) == STEPS
    assert max(gaps) < 1e-4, "the new engine, too, has the weights that were trained"
    said = [row["message"] for row in read_rows(tmp_path / "run", "events") if row["kind"] == "notice"]
    expected = "vLLM hangs" if how == signal.SIGSTOP else "the vLLM process died"
    assert len([message for message in said if f"rollout-0 is replaced: {expected}" in message]) == 1


def group_of(pid: str) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[2])
    except (OSError, ValueError):
        return None
