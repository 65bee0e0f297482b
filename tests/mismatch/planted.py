"""Samplers that do not do as they are told, and runs with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mrl.store.run import read_rows
from mrl.types import Completion, GenerateRequest
from tests import small_runs


class SamplesOtherwise:
    """Put before an engine's class: draws from another distribution than it is asked for, and reports the logprobs of
    that one."""

    changes: Mapping[str, Any] = MappingProxyType({})

    async def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        changed = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, **self.changes)) for r in requests]
        return await super().generate(changed)  # type: ignore[misc,no-any-return]


def run(model: str, folder: Path, engine: str = "transformers", **changes: Any) -> None:
    defaults = {
        "engine": engine,
        "train_dataset": [{"prompt": f"say {i}"} for i in range(7)],
        "batch_size": 3,
        "num_generations": 4,
        "max_completion_length": 16,
        "learning_rate": 1e-5,
        "weight_sync_method": "reload",
    }
    small_runs.run(model, folder, **(defaults | changes))


def warnings_of(folder: Path) -> list[str]:
    return [e["message"] for e in read_rows(folder, "events") if "max_logprob_gap" in e.get("message", "")]
