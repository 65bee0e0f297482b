"""A run's policy as a model to measure: which checkpoint a name stands for, and how it was prompted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.errors import ConfigError
from mrl.loop.resume import existing_run, stored_options
from mrl.store.checkpoints import Checkpoint, find_checkpoint
from mrl.store.find import find_run, runs_root

PROMPTS_AND_LIMITS = (
    *("prompt_format", "system_prompt", "chat_template_kwargs"),
    *("max_tokens", "max_model_len", "stop", "dtype"),
)
"""Options of a run that hold for whoever measures it."""


def find_run_of(model: str) -> tuple[Path, Checkpoint] | None:
    """The run and the checkpoint a model's name stands for: RUN, RUN@best, RUN@40, a run's folder, or a checkpoint's.

    None = it is no run. Raises ConfigError where it can be nothing else and is not there, CheckpointError when the run
    has no such checkpoint.
    """
    path = Path(model).expanduser()
    if model == "starter":
        return None
    if path.parent.name == "checkpoints" and (run := find_run(str(path.parent.parent))) is not None:
        return run, find_checkpoint(run, path.name)
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return None
    name, _, which = model.rpartition("@") if "@" in model else (model, "", "newest")
    found = find_run(name)
    if found is None and "/" in name and not path.exists() and path.parent.resolve() == runs_root().resolve():
        existing_run(name)
    return None if found is None else (found, find_checkpoint(found, which))


def as_in_run(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """`options` with a run's own for how it was prompted and where its completions ended, and the folder of the
    checkpoint as `model`; for another model, with its name. Raises ConfigError, CheckpointError."""
    found = find_run_of(model)
    if found is None:
        if not Path(model).expanduser().exists() and model.endswith((".py", ".jsonl")):
            raise ConfigError(f"--model: {model} is no model, but a file")
        return options | {"model": model}
    run, checkpoint = found
    recorded = stored_options(run)
    if recorded.get("max_tokens") is None and "max_completion_length" in recorded:  # its completions ended there
        recorded["max_tokens"] = recorded["max_completion_length"]
    own = {name: recorded[name] for name in PROMPTS_AND_LIMITS if recorded.get(name) is not None}
    return own | options | {"model": str(checkpoint.path)}
