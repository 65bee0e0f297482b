"""An evaluation on its own, as a run that holds nothing else: its rollouts after step 0, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from mrl.config import OrchestratorConfig
from mrl.store.find import runs_root
from mrl.store.run import RunStore
from mrl.types import Group

EVENT = "evaluation"
"""The kind of the event whose details say `model` (what was measured) and `of` (on what)."""


def write_evaluation(
    config: OrchestratorConfig,
    metrics: dict[str, float],
    groups: Iterable[Group],
    *,
    of: str,
    model: str,
    **details: Any,
) -> Path:
    """Its folder, below the runs'. of: a test or a dataset. Raises ConfigError or StoreError."""
    last = of.rstrip("/").rpartition("/")[2][:80]
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in last)
    folder = _free(runs_root() / f"eval-{name}-{datetime.now():%Y%m%d-%H%M%S}")
    store = RunStore(folder, config)
    try:
        store.write_eval(0, metrics, groups)
        store.event(EVENT, f"{of} of {model}", of=of, model=model, **details)
        store.finish("finished")
    finally:
        store.close()
    return folder


def _free(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}{'' if n == 1 else f'-{n}'}") for n in range(1, 1000))
    return next(one for one in names if not one.exists())
