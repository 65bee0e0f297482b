"""What each of a run's workers needs of its backend, and which local files go there with it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from mrl.backends import BACKENDS, Backend, Resources, check_backend, make_backend
from mrl.backends.code import put_code
from mrl.backends.torchrun import world_size
from mrl.config import OrchestratorConfig
from mrl.config.running import type_and_number
from mrl.errors import ConfigError
from mrl.models import base_of_adapter, resolve_model
from mrl.rewards import REWARDS
from mrl.rewards.functions import reward_code, reward_paths, split_file
from mrl.rewards.spec import names_model, with_options
from mrl.store.find import find_run

ACTOR = "actor"
"""The name of the worker that trains."""


def needs(config: OrchestratorConfig) -> dict[str, Resources]:
    """Of all the workers of a run in mrl's own loop, by name."""
    ranks, rollouts = actor_ranks(config), rollout_workers(config)
    return (
        {name: rank_resources(config, rank) for rank, name in enumerate(rank_names(ranks))}
        | {f"rollout-{index}": rollout_resources(config) for index in range(rollouts)}
        | {f"reward-{index}": reward_resources() for index in range(config.runtime.num_reward_workers)}
    )


def actor_resources(config: OrchestratorConfig) -> Resources:
    """Resources of the worker that trains; where it is several (`actor_ranks`), of all together."""
    return _resources(config.runtime.actor_gpu)


def actor_ranks(config: OrchestratorConfig) -> int:
    """How many processes train together: one for each GPU, or as many as torchrun has started with this one."""
    if config.runtime.actor_gpu is None:
        return world_size() if config.runtime.backend == "inline" else 1
    return type_and_number(config.runtime.actor_gpu)[1]


def rank_resources(config: OrchestratorConfig, rank: int) -> Resources:
    """Resources of one of the actor's processes, which knows its place among them from its environment, as under
    torchrun."""
    ranks, needed = actor_ranks(config), actor_resources(config)
    if ranks == 1:
        return needed
    each = 0 if needed.gpu is None else 1
    return replace(needed, gpus=each, cpus=1.0, env={"RANK": str(rank), "WORLD_SIZE": str(ranks)})


def rollout_resources(config: OrchestratorConfig) -> Resources:
    """Resources of each worker that generates. Raises ConfigError for a number of GPUs that is not the engine's."""
    needed = _resources(config.runtime.rollout_gpu)
    size = config.serving.tensor_parallel_size
    if needed.gpu is None or config.runtime.engine != "vllm" or needed.gpus == size:
        return needed
    if needed.gpus > 1:
        raise ConfigError(
            f"rollout_gpu: {config.runtime.rollout_gpu} is {needed.gpus} GPUs, and vLLM uses {size} of them; set "
            f"tensor_parallel_size: {needed.gpus}, or rollout_gpu: {needed.gpu}:{size}"
        )
    return replace(needed, gpus=size)


def reward_resources() -> Resources:
    """Resources of each worker that scores."""
    return Resources()


def rank_names(ranks: int) -> list[str]:
    """The names of the actor's processes."""
    return [ACTOR] if ranks == 1 else [f"{ACTOR}-{rank}" for rank in range(ranks)]


def rollout_workers(config: OrchestratorConfig) -> int:
    """How many rollout workers there are: for servers that run already, one for each."""
    return len(config.serving.vllm_urls) or config.runtime.num_rollout_workers


def shares_modules(config: OrchestratorConfig) -> bool:
    """Whether the actor is in one process, and rollout workers in the same."""
    return BACKENDS.get(config.runtime.backend).shares_memory and actor_ranks(config) == 1


def settle_sync(config: OrchestratorConfig) -> None:
    """Choose the weight sync method of a run that names none, by its backend. Raises ConfigError for one that needs
    what the backend has not."""
    runtime = config.runtime
    backend = make_backend(runtime.backend, runtime.backend_options, runtime.call_timeout)  # starts nothing
    named = {"weight_sync_method", "weight_sync_dir"} & runtime.model_fields_set
    if not named and backend.sync_method != runtime.weight_sync_method:
        runtime.weight_sync_method = backend.sync_method
    method = runtime.weight_sync_method
    over = runtime.delta_over if method == "delta" else method
    if over == "object_store" and backend.sync_method != over:
        raise ConfigError(
            f"weight_sync_method: object_store is Ray's, and backend is {runtime.backend}; use {backend.sync_method}, "
            "or backend: ray"
        )
    if over in ("reload", "checkpoint") and not backend.shares_disk:
        raise ConfigError(
            f"weight_sync_method: {method} passes weights as files on this machine's disk, which workers of backend "
            f"{runtime.backend} do not see; use {backend.sync_method}"
        )
    if over == "volume" and not backend.common_disk and runtime.weight_sync_dir is None:
        raise ConfigError(
            f"weight_sync_method: {method} needs a disk that all workers of backend {runtime.backend} see; name a "
            f"folder on one with weight_sync_dir, or use {backend.sync_method}"
        )


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
        sent: dict[str, Any] = {option: await backend.put(path) for option, path in here.items()}
        if not backend.shares_memory and (code := reward_code(name, options)) is not None:
            sent |= code.elsewhere(await put_code(backend, code.file, code.root))
        return {await rewards_for(backend, name): options | sent}
    if not isinstance(specs, str):
        return specs
    found = split_file(specs)
    if found is None:
        folder = None if specs in REWARDS.names() else _local(specs)
        return specs if folder is None else await backend.put(folder)
    return f"{await put_code(backend, found[0])}:{found[1]}" if found[0].is_file() else specs


def _resources(gpu: str | None) -> Resources:
    if gpu is None:
        return Resources("any", 1)
    kind, number = type_and_number(gpu)
    return Resources(cpus=number) if kind.lower() == "cpu" else Resources(kind, number)


def _local(name: str) -> Path | None:
    """The file or folder here that a reward's option names; of a run, its newest checkpoint's."""
    path = os.path.expanduser(name)
    if os.path.isfile(path) or os.path.isfile(os.path.join(path, "config.json")):
        return Path(path)
    return Path(resolve_model(name)) if names_model(name) and find_run(name.rpartition("@")[0] or name) else None
