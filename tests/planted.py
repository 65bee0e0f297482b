"""Samplers that do not do as they are told, and runs with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mrl import MRLTrainer
from mrl.store.run import read_rows
from mrl.types import Completion, GenerateRequest


class SamplesOtherwise:
    """Put before an engine's class: draws from another distribution than it is asked for, and reports the logprobs of
    that one."""

    changes: Mapping[str, Any] = MappingProxyType({})

    async def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        changed = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, **self.changes)) for r in requests]
        return await super().generate(changed)  # type: ignore[misc,no-any-return]


def distinct(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) / 8 for text in completions]


def run(model: str, folder: Path, engine: str = "transformers", **options: Any) -> None:
    defaults = {
        "model": model,
        "device": "cpu",
        "engine": engine,
        "train_dataset": [{"prompt": f"say {i}"} for i in range(7)],
        "reward_funcs": distinct,
        "run_dir": str(folder),
        "report_to": [],
        "max_steps": 4,
        "batch_size": 3,
        "num_generations": 4,
        "max_completion_length": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "learning_rate": 1e-5,
        "num_rollout_workers": 1,
        "weight_sync_method": "reload",
        "save_steps": 1,
    }
    MRLTrainer(**(defaults | options)).train()


def warnings_of(folder: Path) -> list[str]:
    return [e["message"] for e in read_rows(folder, "events") if "max_logprob_gap" in e.get("message", "")]
