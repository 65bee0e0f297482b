"""Going on with a run: from which checkpoint, and whether it is still the same run."""

from __future__ import annotations

import hashlib
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mrl.config import OrchestratorConfig, flat_fields
from mrl.errors import CheckpointError, ConfigError
from mrl.rollouts import ROLLOUT_SOURCES
from mrl.store.checkpoints import Checkpoint, list_checkpoints, newest_intact
from mrl.store.find import find_run, runs_root, shortest_name
from mrl.system.shell import command
from mrl.types import Task

MAY_CHANGE = frozenset(
    {
        # How it runs, not what it computes.
        *("call_timeout", "num_rollout_workers", "actor_gpu", "rollout_gpu", "max_failed_fraction", "sync_timeout"),
        *("backend_options", "num_reward_workers", "actor_parallelism", "ddp_timeout"),
        *("serve", "serve_token_env"),
        *("weight_sync_dir", "max_worker_restarts", "max_cost", "max_logprob_gap", "reward_trial"),
        *("vllm_python", "gpu_memory_utilization", "vllm_kv_cache_gb", "vllm_enforce_eager", "vllm_max_num_seqs"),
        *("vllm_start_timeout", "vllm_stall_timeout", "vllm_devices", "vllm_urls", "vllm_api_key_env"),
        *("vllm_model_name", "colocate"),
        # What is recorded, and when.
        *("report_to", "log_completions", "save_steps", "save_total_limit", "best_metric", "checkpoint_errors"),
        *("run_dir", "run_name", "resume", "allow_change"),
        # How long it goes on (a schedule that decays depends on it: see `changes`).
        *("max_steps", "num_epochs"),
    }
)
"""Options that may differ when a run is resumed without making it another run."""

NEVER = frozenset({"mode", "algorithm", "use_lora", "lora_r", "lora_target_modules"})
"""Options that not even `allow_change` may change: they decide which tensors checkpoints hold."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run is resumed."""

    checkpoint: Checkpoint
    state: dict[str, Any]
    problems: list[str]
    """Later checkpoints that could not be used, and why."""


def existing_run(name: str) -> Path:
    """The folder of the run called `name`, or at that path. Raises ConfigError naming the latest runs there are."""
    run = find_run(name)
    if run is None:
        folders = sorted(runs_root().glob("*"), key=lambda path: path.stat().st_mtime)
        known = ", ".join(path.name for path in folders[-5:]) or "none"
        raise ConfigError(f"there is no run {name!r} (latest in {runs_root()}/: {known})")
    return run


def find_resume_point(run: Path) -> ResumePoint | None:
    """The newest intact checkpoint, or None when there is none at all.

    Raises CheckpointError when there are checkpoints and every one is damaged: the run must not start over unasked.
    """
    checkpoint, problems = newest_intact(run)
    if checkpoint is None and problems:
        listed = "\n  ".join(problems)
        raise CheckpointError(
            f"{run}: no checkpoint is intact; restore one of these files, or start a new run:\n  {listed}"
        )
    return None if checkpoint is None else ResumePoint(checkpoint, checkpoint.state, problems)


def resume_hint(run: Path) -> str:
    """What a stopped run has kept and how to resume it, in sentences."""
    if find_run(str(run)) is None:
        return "Nothing was kept: the run had not begun."
    checkpoints = list_checkpoints(run)
    kept = f"Kept: {checkpoints[-1].path}." if checkpoints else "Nothing was kept: no checkpoint had been written."
    return f"{kept} {'Go on' if checkpoints else 'Begin again'} with: {resume_command(run)}"


def resume_command(run: Path) -> str:
    """How to resume a run: a command, or Python where the run's record lacks what was given in Python."""
    try:
        given_in_python = [name for name, value in stored_options(run).items() if is_description(value)]
    except ConfigError:  # the command will say so
        given_in_python = []
    if given_in_python:
        arguments = [f"resume={shortest_name(run)!r}", *(f"{name}=…" for name in given_in_python)]
        return f"MRLTrainer({', '.join(arguments)}).train()"
    return command("mrl", "train", "--resume", shortest_name(run))


def stored_options(run: Path) -> dict[str, Any]:
    """A run's options by flat name, as its config.yaml has them. Raises ConfigError."""
    path = run / "config.yaml"
    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
        return {name: value for section in sections.values() for name, value in section.items()}
    except (OSError, ValueError, yaml.YAMLError, AttributeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{where}: cannot be read ({problem}), so the run cannot be resumed; restore it") from None


def resumed_config(run: Path, given: dict[str, Any]) -> OrchestratorConfig:
    """The run's own configuration, overridden by what was `given`. Raises ConfigError.

    Callables and datasets are not in a run's record: they have to be given again. The record holds every option; those
    at their defaults do not count as given.
    """
    fields = flat_fields()
    options = {name: value for name, value in stored_options(run).items() if name in fields}
    known = {name: v for name, v in options.items() if v != fields[name][1].get_default(call_default_factory=True)}
    lost = [name for name, value in known.items() if is_description(value) and name not in given]
    if lost:
        raise ConfigError(
            f"{run}: {', '.join(lost)} was given in Python and is not in the run's record "
            f"({known[lost[0]]}); resume from Python and pass it again"
        )
    return OrchestratorConfig.from_flat(**(known | given))


def record_options(run: Path, config: OrchestratorConfig) -> None:
    """Replace a run's recorded options by those it is resumed with."""
    partial = run / "config.yaml.partial"
    partial.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8")
    os.replace(partial, run / "config.yaml")


def check_same_run(run: Path, config: OrchestratorConfig) -> None:
    """Raise ConfigError when options changed that would make it another run and `allow_change` does not name them."""
    now, default = (
        {name: value for section in options.to_dict().values() for name, value in section.items()}
        for options in (config, OrchestratorConfig())
    )
    before = default | stored_options(run)  # an option that is newer than the run was at its default
    allowed = MAY_CHANGE | set(config.run.allow_change)
    unknown = set(config.run.allow_change) - set(now)
    if unknown:
        raise ConfigError(f"allow_change: there is no option {', '.join(sorted(unknown))}")
    # TRL's trainers count in updates.
    never = NEVER | ({"num_iterations"} if now["mode"] == "simple" else set())
    shapes = [name for name in sorted(never) if _comparable(before.get(name)) != _comparable(now[name])]
    if shapes:
        listed = ", ".join(f"{name}: {before.get(name)!r} -> {now[name]!r}" for name in shapes)
        raise ConfigError(
            f"{run}: its checkpoints do not fit these options ({listed}), whatever allow_change says; leave them as "
            f"they were, or start a new run from its newest checkpoint: model: {run}"
        )
    if now["rollout_source"] == before["rollout_source"]:
        free = getattr(ROLLOUT_SOURCES.get(config.rollout.source), "may_change", ())
        for options in (before, now):
            kept = options["rollout_options"]
            if isinstance(kept, dict):  # objects are recorded as a text
                options["rollout_options"] = {k: v for k, v in kept.items() if k not in free}
    changed = [name for name in now if name not in allowed and _comparable(before.get(name)) != _comparable(now[name])]
    if config.training.lr_scheduler_type != "constant":
        changed += [n for n in ("max_steps", "num_epochs") if n not in config.run.allow_change and before[n] != now[n]]
    if changed:
        listed = "\n".join(f"  {name}: {before.get(name)!r} -> {now[name]!r}" for name in changed)
        raise ConfigError(
            f"{run}: with these changes it would be another run:\n{listed}\n"
            f"Leave them as they were, start a new run, or say that you mean it: allow_change: [{', '.join(changed)}]"
        )


def check_same_tasks(point: ResumePoint, tasks: list[Task], config: OrchestratorConfig) -> None:
    """Raise ConfigError when the tasks are not those the checkpoint was trained on."""
    if point.state["tasks"] != fingerprint(tasks) and "dataset_name" not in config.run.allow_change:
        raise ConfigError(
            f"{point.checkpoint.path}: the tasks are not those this run was trained on, so prompts would be skipped or "
            "repeated. Restore the dataset, or go on with allow_change: [dataset_name]"
        )


def fingerprint(tasks: list[Task]) -> str:
    """A hash of every task, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for task in tasks:
        digest.update(json.dumps([task.id, task.prompt, task.columns], sort_keys=True, default=str).encode())
    return digest.hexdigest()


def random_state() -> dict[str, Any]:
    """The states of Python's and numpy's global generators, which reward functions may draw from, as plain data."""
    import numpy

    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put `random_state`'s answer back."""
    import numpy

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))


def is_description(value: Any) -> bool:
    """Whether a recorded option stands for a Python object that could not be written down."""
    values = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else [value]
    return any(isinstance(item, str) and item.startswith("<") and item.endswith(">") for item in values)


def _comparable(value: Any) -> Any:
    """A recorded function without its file and line, which may change; the function itself may not."""
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if isinstance(value, dict):
        return {name: _comparable(item) for name, item in value.items()}
    return value.partition(", ")[0] if is_description(value) else value
