"""Workers as Ray actors, together in one placement group."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.backends.base import Resources, WorkerHandle
from mrl.backends.ranks import Ranks
from mrl.backends.ray import cluster
from mrl.backends.ray.files import Files
from mrl.backends.ray.host import Host, surroundings
from mrl.backends.ray.link import RayLink, why
from mrl.backends.ray.placement import Bundle, actor_options, bundle, bundles
from mrl.backends.remote import RemoteHandle
from mrl.errors import ConfigError, WorkerDied
from mrl.system.threads import in_thread

_CALLS_AT_A_TIME = 100_000


class RayHandle(RemoteHandle):
    """A worker, the node of the cluster it is on, and its process there."""

    link: RayLink
    node = ""
    pid = 0


class RayBackend:
    """address: `local` starts a cluster on this machine, which ends with the run; `auto` and HOST:PORT connect to one
    that runs. A process that is connected to a cluster already stays with that one.
    runtime_env: Ray's, for all workers; under `actor`, `rollout` and `reward` what those have beside it.
    placement_timeout: seconds to wait for machines with room, and for a worker's process.
    shared_disk: whether workers see this machine's disk under the same paths; None = if the cluster is `local`.
    autoscaling: the cluster adds machines when they are asked for.
    """

    shares_memory = False
    sync_method = "object_store"

    def __init__(
        self,
        call_timeout: float,
        address: str = cluster.LOCAL,
        runtime_env: Mapping[str, Any] | None = None,
        placement_timeout: float = 300.0,
        shared_disk: bool | None = None,
        autoscaling: bool = False,
    ) -> None:
        cluster.check_options(address, runtime_env, placement_timeout, shared_disk, autoscaling)
        self.call_timeout, self.address, self.runtime_env = call_timeout, address, runtime_env
        self.placement_timeout, self.autoscaling = placement_timeout, autoscaling
        self.shares_disk = self.common_disk = address == cluster.LOCAL if shared_disk is None else shared_disk
        self.handles: list[RayHandle] = []
        self.connected = self.joined = False
        self.connecting = asyncio.Lock()
        self.group: Any = None
        self.reserved: dict[str, tuple[int, Bundle]] = {}
        """Index in the placement group, and what is there, by worker."""
        self.files = Files(f"/tmp/mrl-ray-{uuid.uuid4().hex[:12]}")

    @staticmethod
    def check(resources: list[Resources], **options: Any) -> None:
        """What the cluster has is asked when it is there (`reserve`). Raises ConfigError, also without ray."""
        cluster.check_environments(RayBackend(1.0, **options).runtime_env)

    def price(self, name: str, resources: Resources) -> None:
        """What the cluster costs is not known here."""

    def spent(self) -> None:
        """Nothing that is known here."""

    async def reserve(self, workers: Mapping[str, Resources]) -> None:
        """One placement group, the workers as close together as they fit. Raises ConfigError."""
        from ray.util import placement_group

        await self._connect()
        wanted = bundles(workers, self._machines(), growing=self.autoscaling)
        self.group = placement_group(list(wanted.values()), strategy="PACK")
        self.reserved = {name: (index, one) for index, (name, one) in enumerate(wanted.items())}
        try:
            async with asyncio.timeout(self.placement_timeout):
                await _answer(self.group.ready())
        except TimeoutError:
            import ray

            await self._free()
            free = ", ".join(f"{k} {v:g}" for k, v in sorted(ray.available_resources().items()) if k in ("CPU", "GPU"))
            raise ConfigError(
                f"backend: ray had no room for the run's {len(wanted)} workers within {self.placement_timeout:.0f} s: "
                f"others use the cluster (free now: {free or 'nothing'}); wait for them, ask for less, or raise "
                "placement_timeout in backend_options"
            ) from None

    async def spawn(self, worker: type, *, name: str, resources: Resources, args: dict[str, Any]) -> RayHandle:
        await self._connect()
        handle = RayHandle(name, RayLink(name, self._actor(name, resources)), self.call_timeout)
        self.handles.append(handle)
        try:
            handle.node, handle.pid = await self._placed(handle)
            if not self.shares_disk:
                await self.files.bring_to(handle.node)
            await handle.start(worker, args)
        except BaseException:
            self.handles.remove(handle)
            await handle.link.end()
            raise
        return handle

    async def put(self, path: Path) -> str:
        """Through the object store, to the disks of all machines where workers are, and later of those where one will
        be. Raises OSError."""
        if self.shares_disk:
            return str(path)
        return await self.files.put(path, {handle.node for handle in self.handles if handle.gone is None})

    def folder(self, run_dir: Path, name: str) -> str:
        return str((run_dir / name).absolute() if self.shares_disk else Path(self.files.folder, "run", name))

    async def fetch(self, worker: WorkerHandle, there: str, here: Path) -> None:
        if self.shares_disk:
            return
        first = worker.ranks[0] if isinstance(worker, Ranks) else worker
        assert isinstance(first, RayHandle)
        await self.files.fetch(first.name, first.node, there, here)

    def scorers(self) -> RayBackend:
        return self

    def takes_loop(self, reward_funcs: Any) -> bool:
        return False

    async def close(self) -> None:
        handles, self.handles = self.handles, []
        await asyncio.gather(*(handle.kill() for handle in handles))
        if self.connected:
            await self.files.close()
            await self._free()
            self.connected = False
            await in_thread(cluster.disconnect, self)

    # --- inner ------------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        async with self.connecting:
            if not self.connected:  # on a thread: it takes seconds, and Ctrl-C stays the run's
                common = cluster.environment(self.runtime_env, None)
                self.joined = await cluster.connected(self, self.address, common)
                self.connected = True

    def _machines(self) -> list[Bundle]:
        return [node["Resources"] for node in cluster.nodes()]

    def _actor(self, name: str, resources: Resources) -> Any:
        """A process for a worker: in the run's reservation, or, for those that it does not name, wherever there is a
        GPU for it. They take no processors: all of them may be reserved."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {"scheduling_strategy": "SPREAD"}
        if name in self.reserved:
            index, wanted = self.reserved[name]
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.group, index)
        else:
            wanted = bundle(resources, self._machines()) | {"CPU": 0}
        own = self._environment(name, resources)
        if own:
            options["runtime_env"] = own
        taken = surroundings(own_machine=self.address == cluster.LOCAL) if self.shares_disk else None
        return (
            ray.remote(Host)
            .options(
                **options,
                **actor_options(wanted),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=_CALLS_AT_A_TIME,
            )
            .remote(name, taken)
        )

    def _environment(self, name: str, resources: Resources) -> dict[str, Any]:
        role = name.partition("-")[0]
        own = cluster.environment(self.runtime_env, role)
        variables = {**own.get("env_vars", {}), **resources.env}
        if self.joined:  # the connection has another one's
            common = cluster.environment(self.runtime_env, None)
            own, variables = common | own, {**common.get("env_vars", {}), **variables}
        return own | ({"env_vars": variables} if variables else {})

    async def _placed(self, handle: RayHandle) -> tuple[str, int]:
        """Node and id of the worker's process, once it has started. Raises WorkerDied, and ConfigError for an
        environment that cannot be made."""
        from ray.exceptions import RayError, RuntimeEnvSetupError

        try:
            async with asyncio.timeout(self.placement_timeout):
                place: tuple[str, int] = await _answer(handle.link.actor.where.remote())
        except TimeoutError:
            raise WorkerDied(
                f"{handle.name}: Ray started no process for it within {self.placement_timeout:.0f} s; see `ray status` "
                "or raise placement_timeout in backend_options",
                handle.name,
            ) from None
        except RuntimeEnvSetupError as error:
            raise ConfigError(f"backend_options: runtime_env of {handle.name} cannot be made: {error}") from error
        except RayError as error:
            raise WorkerDied(f"{handle.name}: {why(error)} while it started: {error}", handle.name) from error
        return place

    async def _free(self) -> None:
        """Give the reservation back."""
        if self.group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(self.group)
            self.group, self.reserved = None, {}


async def _answer(reference: Any) -> Any:
    return await reference
