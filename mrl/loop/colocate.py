"""One GPU for actor and vLLM (`colocate`): whose turn it is, and the order in which it changes hands.

    generate -> drain -> vLLM sleeps -> the actor's tensors come back -> train -> write weights
             -> the actor's tensors leave -> vLLM wakes with the new weights -> versions confirmed -> generate

At most one side has its tensors on the GPU. Whatever fails in between leaves vLLM asleep or gone and the run ended: an
engine that slept without its weights serves nothing before weights were loaded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager

from mrl.backends import BACKENDS, WorkerHandle
from mrl.config import OrchestratorConfig
from mrl.engines.vllm import shares
from mrl.errors import ConfigError, EngineError, WorkerDied
from mrl.loop.model_size import model_size
from mrl.loop.resources import actor_ranks
from mrl.sync import WeightSync

KEEPS_WEIGHTS, DROPS_WEIGHTS = 1, 2
"""vLLM's levels of sleep: its weights wait in host memory, or are forgotten because new ones will come."""


class Colocation:
    """Lets the actor and the rollout workers on its GPU take turns. Without `colocate` it does nothing.

    workers: the run's, in which a replaced one takes its predecessor's place. places: of those on the actor's GPU.
    note: tells the user. timed: measures what takes time, by a name.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        actor: WorkerHandle,
        workers: Sequence[WorkerHandle],
        places: Sequence[int],
        sync: WeightSync,
        *,
        note: Callable[[str], None],
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.config, self.actor, self.workers = config, actor, workers
        self.places = places if config.serving.colocate else []
        self.note, self.timed = note, timed
        self.actor_away = False
        if self.places:
            sync.on_published = self.give_device

    async def start(self) -> None:
        """Start the engines while the GPU is empty, and put them to sleep until the actor has sent its first weights.

        Raises EngineError where one does not start, or cannot sleep."""
        for place in self.places:
            await self.workers[place].call("initialize_for_weight_sync")
            await self.workers[place].call("sleep", self._level(syncs=True))

    @asynccontextmanager
    async def training(self, drain: Callable[[], Awaitable[None]], *, syncs: bool) -> AsyncIterator[None]:
        """The actor has the GPU inside. A weight sync within gives it back (`give_device`), and wakes the engines.

        drain: returns when nothing is being sampled. syncs: weights will be sent before anything is generated.
        """
        if not self.places:
            yield
            return
        await drain()
        level = self._level(syncs=syncs)
        with self.timed("handover"):
            for place in self.places:
                await self._put_to_sleep(self.workers[place], level)
            self.actor_away = False
            await self.actor.call("return_to_device")
        yield
        if self.actor_away or syncs:
            return  # the sync woke them; or there was none because the run is being stopped, and nothing is generated
        with self.timed("handover"):
            await self.give_device()
            for place in self.places:
                await self.workers[place].call("wake")

    async def give_device(self) -> None:
        """The actor's tensors leave the GPU. Called between writing weights and loading them."""
        if self.places and not self.actor_away:
            await self.actor.call("leave_device")
            self.actor_away = True

    def _level(self, *, syncs: bool) -> int:
        """Weights are kept unless a full sync follows: an adapter's does not bring the base weights back."""
        adapter = self.config.model.use_lora and self.config.serving.lora_sync == "adapter"
        return DROPS_WEIGHTS if syncs and not adapter else KEEPS_WEIGHTS

    async def _put_to_sleep(self, worker: WorkerHandle, level: int) -> None:
        """A worker that cannot sleep keeps its memory, so it is killed: the next weight sync replaces it."""
        try:
            await worker.call("sleep", level)
        except (EngineError, WorkerDied) as error:
            self.note(f"{worker.name} did not go to sleep and is ended, another one will take its place: {error}")
            await worker.kill()


def check_colocate(config: OrchestratorConfig, gpus: list[list[int]], actor: int | None, seen: int) -> None:
    """Raise ConfigError where `colocate` cannot be. gpus: of each engine. actor: its GPU. seen: GPUs there are."""
    if not BACKENDS.get(config.runtime.backend).shares_memory:
        raise ConfigError(f"colocate: backend {config.runtime.backend} puts workers anywhere; use backend: inline")
    if actor_ranks(config) > 1:
        raise ConfigError("colocate: the actor has several GPUs; leave colocate out, or give the actor one GPU")
    if config.overlap.async_mode != "off":
        raise ConfigError(
            f"colocate: with async_mode: {config.overlap.async_mode} vLLM generates while the actor trains, and on one "
            "GPU they take turns; use async_mode: off, or give vLLM a GPU of its own"
        )
    if not seen:
        raise ConfigError("colocate: there is no GPU here, and vLLM cannot sleep on a CPU; leave it out")
    if actor is None:
        raise ConfigError(
            f"colocate: the actor is on {config.model.device} and has no GPU to share; leave colocate out, or set "
            "device: cuda"
        )
    if config.serving.vllm_args.get("enable_sleep_mode") is False:
        raise ConfigError("colocate: vllm_args {enable_sleep_mode: false} forbids what it needs; leave that out")
    crowded = [gpu for gpu in {gpu for own in gpus for gpu in own} if sum(gpu in own for own in gpus) > 1]
    if crowded:
        raise ConfigError(
            f"colocate: several rollout workers are on GPU {crowded[0]}; use num_rollout_workers: 1, or a GPU for each "
            "with vllm_devices"
        )
    if not any(actor in own for own in gpus):
        raise ConfigError(
            f"colocate: no engine is on the actor's GPU ({actor}), so there is nothing to take turns on; leave "
            f"colocate out, or name GPU {actor} in vllm_devices"
        )


def gpu_share(config: OrchestratorConfig, gpu: int) -> float:
    """`gpu_memory_utilization` of the run's engines. gpu: the actor's."""
    said = shares.explicit_utilization(config)
    return shares.utilization(gpu_memory(gpu)) if said is None else said


def gpu_shares(config: OrchestratorConfig, gpu: int, max_model_len: int) -> shares.Shares:
    """What each side gets of the actor's GPU. Raises ConfigError where it is too little, ModelError."""
    numbers = 4 if config.model.dtype == "float32" else 2
    return shares.divide(gpu_memory(gpu), model_size(config), config, max_model_len, bytes_per_number=numbers)


def gpu_memory(gpu: int) -> int:
    """Memory of a GPU in bytes, by its number here."""
    import torch

    return int(torch.cuda.get_device_properties(gpu).total_memory)
