"""Whole runs on the real vLLM whose engines are killed, or stop, while they generate: it is found and said, nothing of
them stays behind, and the run ends as if nothing was."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl import MRLTrainer
from mrl.engines.vllm.engine import VLLMEngine
from mrl.errors import EngineDied
from mrl.store.run import read_rows
from mrl.types import Completion, GenerateRequest
from tests.engines.vllm.processes import core_of, found, processes_of, shared_by

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STEPS, ROLLOUTS = 5, 16
STALL = 18.0
"""Seconds; the first step of an engine takes three, and several times that on a slow machine or a busy one."""
FAILURES: dict[str, tuple[Callable[[VLLMEngine], None], str]] = {
    "the process that speaks to us is killed": (
        lambda engine: os.kill(engine.pid, signal.SIGKILL),
        r"the vLLM process died \(it was killed without a word; .* lower vllm_kv_cache_gb from 1 to 0.5",
    ),
    "vLLM's own is killed": (lambda engine: os.kill(found(core_of(engine.pid)), signal.SIGKILL), "vLLM died: "),
    "all are killed": (lambda engine: os.killpg(engine.pid, signal.SIGKILL), "the vLLM process died "),
    "all stop": (
        lambda engine: os.killpg(engine.pid, signal.SIGSTOP),
        r"vLLM hangs: it does not answer for .* s \(vllm_stall_timeout",
    ),
    "the model stops": (
        lambda engine: os.kill(found(core_of(engine.pid)), signal.SIGSTOP),
        r"vLLM hangs: none of its .* requests gets a token for .* s \(vllm_stall_timeout",
    ),
}


def distinct(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) + 0.01 * len(text) for text in completions]


def break_engines(monkeypatch: pytest.MonkeyPatch, failures: dict[int, str]) -> tuple[list[int], set[Path]]:
    """One after the other, while several requests are in flight. failures: by the version that is served then. Returns
    where the process groups of those that were broken will be listed, and their files and folders."""
    generate, left = VLLMEngine.generate, dict(failures)
    groups, files = list[int](), set[Path]()

    async def broken(engine: VLLMEngine, requests: list[GenerateRequest]) -> list[Completion]:
        failure = left.pop(engine.version or 0, None)
        if failure is None:
            return await generate(engine, requests)
        running = asyncio.create_task(generate(engine, requests))
        while (await engine.health())["in_flight"] < 4:
            await asyncio.sleep(0.001)
            if running.done():  # too few were under way: the next call will do
                left[engine.version or 0] = failure
                return await running
        shared = shared_by(processes_of(engine.pid))
        groups.append(engine.pid)
        files.update(shared, [engine._process.folder])
        FAILURES[failure][0](engine)
        try:
            return await running
        except EngineDied:
            assert not processes_of(engine.pid), "gone as soon as its death is known, before anybody closes it"
            assert not [path for path in shared if path.exists() and path.parent == Path("/dev/shm")]
            raise

    monkeypatch.setattr(VLLMEngine, "generate", broken)
    return groups, files


SOAK = [pytest.param([name], how, {}, marks=pytest.mark.soak) for name in FAILURES for how in ("reload", "direct")]


@pytest.mark.parametrize(
    ("failures", "method", "options"),
    [
        (["the process that speaks to us is killed", "the model stops"], "reload", {}),
        (["vLLM's own is killed", "all stop"], "direct", {"use_lora": True, "lora_r": 8}),
        *SOAK,
    ],
    ids=lambda value: "-then-".join(value).replace(" ", "-") if isinstance(value, list) else None,
)
def test_a_run_outlives_its_engines(
    failures: list[str],
    method: str,
    options: dict[str, object],
    vllm_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups, files = break_engines(monkeypatch, dict(enumerate(failures, start=2)))
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
        vllm_stall_timeout=STALL,
        **options,
    ).train()
    assert result.status == "finished"
    assert len(set(groups)) == len(failures)
    assert not [pid for group in groups for pid in processes_of(group)]
    rows = list(read_rows(tmp_path / "run", "rollouts"))
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, STEPS + 1), ROLLOUTS)
    assert all(row["error"] is None and row["reward"] is not None for row in rows)
    assert all(row["samples"][0]["policy_version"] == row["step"] - 1 for row in rows), "none older"
    gaps = [row["train/logprob_gap_max"] for row in read_rows(tmp_path / "run", "metrics")]
    assert len(gaps) == STEPS
    assert max(gaps) < 1e-4, "the new engines, too, have the weights that were trained"
    said = [row["message"] for row in read_rows(tmp_path / "run", "events") if row["kind"] == "notice"]
    replaced = [message for message in said if "rollout-0 is replaced: " in message]
    assert len(replaced) == len(failures)
    for failure, message in zip(failures, replaced, strict=True):
        assert re.search(FAILURES[failure][1], message), message
    assert not (tmp_path / "run" / "weights").exists()
    assert not [path for path in files if path.exists()]
