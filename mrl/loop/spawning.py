"""A run's workers: one actor, the rollout workers, the reward workers, and the way weights go between the first two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrl.backends import Backend, WorkerHandle, make_backend
from mrl.backends.ranks import Ranks
from mrl.config import OrchestratorConfig
from mrl.loop.colocate import gpu_share
from mrl.loop.preflight import colocated_places, engine_gpus, reward_worker_args
from mrl.loop.resources import (
    ACTOR,
    actor_ranks,
    actor_resources,
    base_name,
    model_for,
    rank_names,
    rank_resources,
    reward_resources,
    rewards_for,
    rollout_resources,
    shares_modules,
)
from mrl.sync import SYNC_METHODS, WeightSync
from mrl.system.gather import all_of
from mrl.types import derive_seed
from mrl.workers.reward_pool import RewardPool


def backend_of(config: OrchestratorConfig) -> Backend:
    """Where the run's workers live. Raises ConfigError."""
    return make_backend(config.runtime.backend, config.runtime.backend_options, config.runtime.call_timeout)


async def spawn_actor(
    backend: Backend, config: OrchestratorConfig, max_model_len: int | None, total_steps: int
) -> WorkerHandle:
    """The worker that trains, on its GPUs; not initialised yet."""
    from mrl.actor.worker import ActorWorker

    model = await model_for(backend, config) | {"max_model_len": max_model_len}
    if actor_resources(config).gpu is None:  # `actor_gpu: cpu`, also where there are GPUs
        model["device"] = "cpu"
    args = {
        "model": model,
        "training": config.training.model_dump(),
        "total_steps": total_steps,
        "algorithm": config.algorithm.model_dump(),
        "base_name": base_name(config),
    }
    names = rank_names(actor_ranks(config))
    ranks = await all_of(
        [
            backend.spawn(ActorWorker, name=name, resources=rank_resources(config, rank), args=args)
            for rank, name in enumerate(names)
        ]
    )
    if len(ranks) == 1:
        return ranks[0]
    meeting_point: tuple[str, int] = await ranks[0].call("meeting_point")
    await all_of([worker.call("meet", *meeting_point) for worker in ranks])
    return Ranks(ACTOR, ranks)


async def spawn_rollout(
    backend: Backend, config: OrchestratorConfig, max_model_len: int | None, index: int, *, alone: bool = False
) -> WorkerHandle:
    """Rollout worker number `index`; it has no weights yet. alone: no actor, and no other rollout worker."""
    from mrl.workers.rollout import RolloutWorker

    return await backend.spawn(
        RolloutWorker,
        name=f"rollout-{index}",
        resources=rollout_resources(config),
        args={
            "engine": config.runtime.engine,
            "model": await model_for(backend, config) | {"max_model_len": max_model_len},
            "options": engine_options(config, index, alone=alone),
        },
    )


async def spawn_rewards(
    backend: Backend,
    config: OrchestratorConfig,
    note: Callable[[str], None] = lambda message: None,
    folder: Path | None = None,
) -> RewardPool:
    """The workers that score. note: told of each replacement. folder: the run's."""
    from mrl.workers.reward import RewardWorker

    backend = backend.scorers()
    args = reward_worker_args(config.reward)
    args["reward_funcs"] = await rewards_for(backend, args["reward_funcs"])
    # Where a step takes the groups that end first, runs are not reproducible, and calls need not wait for each other.
    args["seed"] = None if backend.shares_memory or config.overlap.by_group else config.training.seed

    async def spawn(index: int) -> WorkerHandle:
        name = f"reward-{index}"
        worker = await backend.spawn(RewardWorker, name=name, resources=reward_resources(), args=args)
        await worker.call("open", None if folder is None else str(folder.absolute()))
        return worker

    workers = [await spawn(index) for index in range(config.runtime.num_reward_workers)]
    return RewardPool(workers, spawn, note, config.runtime.max_worker_restarts)


def engine_options(config: OrchestratorConfig, index: int, *, alone: bool = False) -> dict[str, Any]:
    """What rollout worker `index` makes its engine with. alone: no actor, and no other rollout worker."""
    options = config.serving.options_of(config.runtime.engine)
    if options:
        options["sync_timeout"] = config.runtime.sync_timeout
    elif config.runtime.engine == "transformers" and config.overlap.by_group:
        options["endless"] = True
    if config.runtime.engine == "vllm":
        options["seed"] = derive_seed(config.training.seed, "engine", index) % 2**31
    if alone and options.get("repeatable_sampling", False) is None:
        options["repeatable_sampling"] = True  # the same evaluation twice gives the same figures
    if "vllm_devices" in options:
        options["vllm_devices"] = config.serving.devices_of(0) if alone else engine_gpus(config)[0][index]
        options["colocate"] = not alone and index in colocated_places(config)
        if options["colocate"]:
            actor = engine_gpus(config)[1]
            assert actor is not None
            options["gpu_memory_utilization"] = gpu_share(config, actor)
    if "vllm_urls" in options:
        urls = options.pop("vllm_urls")
        options["url"] = urls[index]
    return options


def make_sync(config: OrchestratorConfig, folder: Path) -> WeightSync:
    """The run's way of sending weights. folder: where they are written unless `weight_sync_dir` says otherwise; a path
    of the workers."""
    runtime = config.runtime
    extra = {"over": runtime.delta_over, "full_every": runtime.delta_full_every}
    shared = runtime.weight_sync_dir
    where = folder if shared is None else Path(shared).expanduser() / f"mrl-weights-{folder.parent.name}"
    return SYNC_METHODS.get(runtime.weight_sync_method)(
        where.absolute(),  # engines run in other working directories
        deadline=runtime.sync_timeout,
        lora=config.serving.lora_sync if config.model.use_lora else None,
        shares_modules=shares_modules(config),
        **(extra if runtime.weight_sync_method == "delta" else {}),
    )
