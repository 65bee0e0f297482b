"""Workers in containers of Modal's: one container each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mrl.backends.base import Resources, WorkerHandle
from mrl.backends.inline import InlineBackend
from mrl.backends.meter import Meter
from mrl.backends.modal.connection import connect, disconnect
from mrl.backends.modal.gpus import modal_gpu
from mrl.backends.modal.link import Container, ModalLink, OneMethod
from mrl.backends.modal.prices import load_prices
from mrl.backends.modal.settings import LONGEST, Settings, require_modal
from mrl.backends.modal.storage import Storage, folder_of, storage_of
from mrl.backends.remote import RemoteHandle
from mrl.errors import ConfigError
from mrl.system.gather import all_of

LOOPS = ("auto", "here", "modal")
REWARDS_THERE = (None, "sandbox", ["sandbox"])
"""Values of `reward_funcs` with which the loop is at Modal, unless it is said where."""
SCORES = "reward-"
"""How the names of workers begin that score."""
DEFAULT_GPU = {"actor": "A100", "rollout": "A10"}
"""By role, where none is asked for."""


class ModalBackend:
    """What is not given of the first seven is as the environment variable MRL_MODAL has it, a JSON object.

    app, volume: their names at Modal; a volume that is named has to be there, the default one is made.
    secrets: names of secrets that containers get, e.g. of a Hugging Face token.
    packages: that containers need besides mrl's own, as pip names them.
    concurrent_inputs: calls that a container takes at a time.
    actor_nodes: containers that the actor's GPUs are in, as many in each. rdma: ask for RDMA between them.
    scaledown_window: seconds that Modal keeps a container after its run's loop has vanished.
    region, cloud: Modal's, for all containers.
    env: environment variables of all containers; what is secret belongs into a secret.
    memory_mb: of containers with a GPU; None = Modal's default.
    loop: where the run's loop is. `auto` = at Modal, with the rewards, where `reward_funcs` is not given or is
    `sandbox`, else in this process, which may be the only place that has what a reward function needs.
    detach: the app outlives this process; with the loop at Modal, the run goes on.
    prices: a file with prices, instead of ~/.config/mrl/prices.yaml (docs/cost.md).
    output: show what containers print; None = where the loop is at Modal.
    """

    shares_memory = shares_disk = False
    common_disk = True
    sync_method = "volume"

    def __init__(
        self,
        call_timeout: float,
        app: str | None = None,
        volume: str | None = None,
        secrets: Sequence[str] | None = None,
        packages: Sequence[str] | None = None,
        concurrent_inputs: int | None = None,
        actor_nodes: int | None = None,
        rdma: bool | None = None,
        scaledown_window: int = 300,
        region: str | None = None,
        cloud: str | None = None,
        env: Mapping[str, str] | None = None,
        memory_mb: int | None = None,
        loop: str = "auto",
        detach: bool = False,
        output: bool | None = None,
        prices: str | None = None,
    ) -> None:
        self.call_timeout = call_timeout
        options = {
            "app": app,
            "volume": volume,
            "secrets": secrets,
            "packages": packages,
            "concurrent_inputs": concurrent_inputs,
            "actor_nodes": actor_nodes,
            "rdma": rdma,
        }
        given = {name: value for name, value in options.items() if value is not None}
        self.settings = Settings.of(asdict(Settings.from_environment()) | given)
        self.made = ["volume"] if self.settings.volume == Settings.volume else []
        if loop not in LOOPS:
            raise ConfigError(f"backend_options: loop is {loop!r}; give {', '.join(LOOPS)}")
        for name, value, least in (("scaledown_window", scaledown_window, 1), ("memory_mb", memory_mb, 128)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(f"backend_options: {name} is {value!r}; give a whole number from {least}")
        for name, flag in (("detach", detach), ("output", output)):
            if flag not in (None, True, False):
                raise ConfigError(f"backend_options: {name} is {flag!r}; give true or false")
        self.loop, self.detach, self.output, self.memory_mb = loop, detach, bool(output), memory_mb
        self.placement: dict[str, Any] = {
            name: value for name, value in (("region", region), ("cloud", cloud)) if value is not None
        }
        if env is not None and not (isinstance(env, Mapping) and all(isinstance(v, str) for v in env.values())):
            raise ConfigError(f"backend_options: env is {env!r}; give names and texts, e.g. {{HF_HUB_OFFLINE: '1'}}")
        if env:
            self.placement["env"] = dict(env)
        self.scaledown_window = scaledown_window
        self.prices, self.meter = load_prices(prices), Meter()
        self.module: Any = None
        self.connecting = asyncio.Lock()
        self.storage: Storage | None = None
        self.handles: list[RemoteHandle] = []
        self.names: dict[str, itertools.count[int]] = {}
        self.run = uuid.uuid4().hex[:12]
        self.passing: set[str] = set()
        """Folders on the Volume that nobody needs once the run is over."""
        self.shared: dict[str, Container] = {}
        """Containers with several workers, by the name that these have in common."""
        self.here = InlineBackend(call_timeout)
        """Of the workers that score: they are where the loop is."""

    @staticmethod
    def check(resources: list[Resources], **options: Any) -> None:
        """Raises ConfigError, also without modal; asks nobody."""
        backend = ModalBackend(1.0, **options)
        for needs in resources:
            backend._gpu(needs, "actor")
        if (nodes := backend.settings.actor_nodes) > 1 and {ranks_of(needs) for needs in resources} == {1}:
            raise ConfigError(
                f"backend_options: actor_nodes is {nodes}, and the actor has one rank; give it a GPU and more in each "
                f"container, e.g. actor_gpu: H100:{8 * nodes}"
            )
        require_modal()

    def price(self, name: str, resources: Resources) -> float:
        """By list prices. Of ranks that share a container, each one's part. Memory counts where some is asked for.
        Workers that score are where the loop is, and cost nothing of their own."""
        if name.startswith(SCORES):
            return 0.0
        ranks = self._ranks_here(resources)
        gpu = self._gpu(resources, name.partition("-")[0])
        memory = resources.memory_mb or (self.memory_mb if gpu is not None else None)
        return self.prices.per_hour(gpu, resources.cpus * ranks, memory) / ranks

    def spent(self) -> float:
        return self.meter.dollars()

    async def reserve(self, workers: Mapping[str, Resources]) -> None:
        """Modal has no reservations. Raises ConfigError for what is missing there, and then starts the app."""
        await self._connect()

    async def spawn(self, worker: type, *, name: str, resources: Resources, args: dict[str, Any]) -> WorkerHandle:
        if name.startswith(SCORES):
            return await self.here.spawn(worker, name=name, resources=resources, args=args)
        await self._connect()
        self.meter.start(name, self.price(name, resources))
        link = ModalLink(name, self._container(name, resources, vllm=args.get("engine") == "vllm"))
        handle = RemoteHandle(name, link, self.call_timeout)
        self.handles.append(handle)
        try:
            await handle.start(worker, args)
        except BaseException:
            with contextlib.suppress(ValueError):  # the backend was closed meanwhile
                self.handles.remove(handle)
            await link.end()
            raise
        return handle

    async def put(self, path: Path) -> str:
        """To the Volume, by content: what is there is not sent again. Raises OSError."""
        await self._connect()
        assert self.storage is not None
        return await self.storage.put(path)

    def folder(self, run_dir: Path, name: str) -> str:
        there = folder_of(run_dir)
        if name not in ("", "checkpoints"):
            self.passing.add(f"{there}/{name}")
        return f"{there}/{name}"

    async def fetch(self, worker: WorkerHandle, there: str, here: Path) -> None:
        assert self.storage is not None
        await self.storage.fetch(there, here)

    def scorers(self) -> InlineBackend:
        """Reward functions run where the loop runs, which may be the only place that has what they need."""
        return self.here

    def takes_loop(self, reward_funcs: Any) -> bool:
        """As option `loop` says it."""
        return self.loop == "modal" or (self.loop == "auto" and reward_funcs in REWARDS_THERE)

    async def close(self) -> None:
        handles, self.handles = self.handles, []
        await all_of([self.here.close(), *(handle.kill() for handle in handles)])
        self.meter.stop()
        if self.storage is not None:
            await all_of([self.storage.remove(folder) for folder in sorted(self.passing)])
            self.storage = None
        await disconnect(self)

    # --- inner ------------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        async with self.connecting:
            if self.storage is None:
                self.module = await connect(self, self.settings, made=self.made, detach=self.detach, output=self.output)
                self.storage = storage_of(self.module.volume)

    def _container(self, name: str, resources: Resources, *, vllm: bool) -> Container:
        """Of a worker; ranks that train together are in one."""
        ranks = ranks_of(resources)
        role = name.partition("-")[0]
        shared = self.shared.get(role) if ranks > 1 else None
        if shared is not None and shared.gone is None:
            return shared
        spread = ranks > 1 and self.settings.actor_nodes > 1
        actor = "ActorCluster" if spread else "ActorWorker"
        kind = {"actor": actor, "rollout": "VLLMRolloutWorker" if vllm else "RolloutWorker"}
        options: dict[str, Any] = {
            **self.placement,
            "cpu": resources.cpus * self._ranks_here(resources),
            "timeout": min(LONGEST, int(self.call_timeout) + 60),
            "scaledown_window": self.scaledown_window,
        }
        env = {**self.placement.get("env", {}), **(resources.env if ranks == 1 else {})}
        gpu = self._gpu(resources, role)
        memory = resources.memory_mb or (self.memory_mb if gpu is not None else None)
        options |= {name: value for name, value in (("gpu", gpu), ("memory", memory), ("env", env)) if value}
        before = self.names.setdefault(name, itertools.count())
        cls = getattr(self.module, kind.get(role, "EnvironmentWorker")).with_options(**options)
        instance = cls(run=self.run, worker=role if ranks > 1 else name, before=next(before), ranks=ranks)
        assert self.storage is not None
        one = OneMethod(instance) if spread else instance
        container = Container(one, self.storage, self.settings.concurrent_inputs)
        if ranks > 1:
            self.shared[role] = container
        return container

    def _ranks_here(self, resources: Resources) -> int:
        """In one container. Raises ConfigError where they are not as many in each."""
        ranks, nodes = ranks_of(resources), self.settings.actor_nodes
        if ranks == 1 or nodes == 1:
            return ranks
        if ranks % nodes:
            raise ConfigError(
                f"backend_options: actor_nodes is {nodes}, and the actor's {ranks} ranks are not as many in each "
                "container; give a number of GPUs that it divides"
            )
        return ranks // nodes

    def _gpu(self, resources: Resources, role: str) -> str | None:
        """What Modal takes as `gpu=` for one of a worker's containers. Raises ConfigError."""
        return gpu_option(resources, role, self._ranks_here(resources))


def ranks_of(resources: Resources) -> int:
    """How many train together with a worker, itself among them."""
    return int(resources.env.get("WORLD_SIZE", "1"))


def gpu_option(resources: Resources, role: str, ranks: int) -> str | None:
    """What Modal takes as `gpu=` for a container of so many ranks. role: decides the type where none is named. Raises
    ConfigError."""
    number = resources.gpus * ranks
    if resources.gpu is None or not number:
        return None
    kind = DEFAULT_GPU.get(role, DEFAULT_GPU["rollout"]) if resources.gpu == "any" else resources.gpu
    return modal_gpu(kind, number)
