"""What each of a run's workers needs of its backend, and which local files go there with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mrl.backends import Backend, Resources, check_backend
from mrl.config import OrchestratorConfig
from mrl.config.running import type_and_number
from mrl.errors import ConfigError
from mrl.models import base_of_adapter, resolve_model
from mrl.rewards import REWARDS
from mrl.rewards.functions import reward_paths, split_file
from mrl.rewards.spec import names_model, with_options
from mrl.store.find import find_run


def actor_resources(config: OrchestratorConfig) -> Resources:
    """Resources of the worker that trains."""
    return Resources(*type_and_number(config.runtime.actor_gpu))


def rollout_resources(config: OrchestratorConfig) -> Resources:
    """Resources of each worker that generates."""
    return Resources(*type_and_number(config.runtime.rollout_gpu))


def reward_resources() -> Resources:
    """Resources of each worker that scores."""
    return Resources()


def check_resources(config: OrchestratorConfig, *workers: Resources) -> None:
    """Raise ConfigError when the run's backend cannot provide such workers, or has an option with a bad value."""
    check_backend(config.runtime.backend, config.runtime.backend_options, list(workers))


async def model_for(backend: Backend, config: OrchestratorConfig) -> dict[str, Any]:
    """The model's options as workers need them: a folder is one that they can read. Raises ConfigError."""
    options = config.model.model_dump()
    folder = Path(resolve_model(config.model.model))
    if not folder.exists():
        return options  # the Hub's
    there = await backend.put(folder)
    if there == str(folder):
        return options
    base = base_of_adapter(str(folder))
    if base is not None and Path(base).exists():
        raise ConfigError(
            f"model: {config.model.model} is an adapter of the folder {base}, which workers of backend "
            f"{config.runtime.backend} cannot read; give them one model: `mrl checkpoints RUN export FOLDER --merged`"
        )
    return options | {"model": there}


def base_name(config: OrchestratorConfig) -> str:
    """The base model of the adapter that this run trains, wherever a worker has loaded it from."""
    source = resolve_model(config.model.model)
    return base_of_adapter(source) or source


async def rewards_for(backend: Backend, specs: Any) -> Any:
    """`reward_funcs` as workers need them: files and folders that they name are ones that workers can read."""
    if isinstance(specs, (list, tuple)):
        return [await rewards_for(backend, spec) for spec in specs]
    named = with_options(specs)
    if named is not None:
        name, options = named
        paths = [option for option in reward_paths(name) if isinstance(options.get(option), str)]
        here = {option: path for option in paths if (path := _local(options[option])) is not None}
        return {await rewards_for(backend, name): options | {k: await backend.put(v) for k, v in here.items()}}
    if not isinstance(specs, str):
        return specs
    found = split_file(specs)
    if found is None:
        folder = None if specs in REWARDS.names() else _local(specs)
        return specs if folder is None else await backend.put(folder)
    return f"{await backend.put(found[0])}:{found[1]}" if found[0].is_file() else specs


def _local(name: str) -> Path | None:
    """The file or folder here that a reward's option names; of a run, its newest checkpoint's."""
    path = os.path.expanduser(name)
    if os.path.isfile(path) or os.path.isfile(os.path.join(path, "config.json")):
        return Path(path)
    return Path(resolve_model(name)) if names_model(name) and find_run(name.rpartition("@")[0] or name) else None
