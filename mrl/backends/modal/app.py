"""The Modal app: its classes and its function. Modal imports this module in every container.

A class of Modal's with `max_containers=1` and parameters of its own is one worker, addressable alone: N workers of one
class without parameters would be one pool, of which a weight sync would reach some.
"""

# Modal reads the types of parameters, so annotations are not put off here.

import asyncio
from collections.abc import Callable
from typing import Any

import cloudpickle
import modal
import modal.experimental

from mrl.backends.modal.cluster import Cluster, serve_cluster
from mrl.backends.modal.host import CONTROL_INPUTS, Host, bring_files
from mrl.backends.modal.images import rollout_image, training_image
from mrl.backends.modal.settings import LONGEST, Settings
from mrl.backends.modal.storage import STORAGE, Mounted
from mrl.backends.served import that_travels
from mrl.system import shared_disk

settings = Settings.from_environment()
app = modal.App(settings.app)
volume = modal.Volume.from_name(settings.volume, create_if_missing=True, version=2)
_secrets = [modal.Secret.from_name(name) for name in settings.secrets]
_training, _sampling = training_image(settings), rollout_image(settings)
_common: dict[str, Any] = {"volumes": {str(STORAGE): volume}, "secrets": _secrets, "timeout": LONGEST}
_one: dict[str, Any] = {**_common, "max_containers": 1, "scaledown_window": 300}
_inputs = settings.concurrent_inputs + CONTROL_INPUTS


class Worker:
    """What all classes do: `Host` answers."""

    ranks: int

    @modal.enter()
    def begin(self) -> None:
        shared_disk.register(Mounted(volume))
        self.host = Host(self.ranks)

    @modal.method()
    async def answer(self, place: int, content: bytes, begins: bool) -> bytes:
        answer = await self.host.answer(place, content, begins=begins)
        await self._leave_unless_begun()
        return answer

    @modal.method()
    async def give_up(self, place: int, worker: str, number: int) -> None:
        await self.host.give_up(place, worker, number)

    @modal.method()
    async def hold(self, seconds: float) -> bool:
        held = await self.host.hold(seconds)
        await self._leave_unless_begun()
        return held

    @modal.method()
    async def leave(self) -> None:
        await modal.experimental.stop_fetching_inputs.aio()

    async def _leave_unless_begun(self) -> None:
        """A container that took a lost one's place is of no use, and costs money."""
        if not self.host.begun.is_set():
            await modal.experimental.stop_fetching_inputs.aio()


# Of each class: which run and worker it is, how many before it had this name, and how many processes it is.


@app.cls(image=_training, **_one)
@modal.concurrent(max_inputs=_inputs)
class ActorWorker(Worker):
    """Trains."""

    run: str = modal.parameter(default="")
    worker: str = modal.parameter(default="")
    before: int = modal.parameter(default=0)
    ranks: int = modal.parameter(default=1)


if settings.actor_nodes > 1:  # Modal knows a cluster's size with its class

    @app.cls(image=_training, **_one | {"max_containers": settings.actor_nodes})
    @modal.concurrent(max_inputs=_inputs)
    @modal.clustered(size=settings.actor_nodes, rdma=settings.rdma)
    class ActorCluster:
        """An actor over several containers. Every input reaches each of them, and the first one's answer counts."""

        run: str = modal.parameter(default="")
        worker: str = modal.parameter(default="")
        before: int = modal.parameter(default=0)
        ranks: int = modal.parameter(default=1)

        @modal.enter()
        def begin(self) -> None:
            shared_disk.register(Mounted(volume))
            context = modal.Cluster.from_context()
            cluster = Cluster(tuple(context.container_ips()), context.container_rank(), self.run)
            if cluster.own > 0:
                serve_cluster(cluster, bring_files)
            self.host = Host(self.ranks, cluster)

        @modal.method()
        async def take(self, what: str, given: tuple[Any, ...]) -> Any:  # a cluster's class may have one method
            if what == "leave":
                return await modal.experimental.stop_fetching_inputs.aio()
            named: dict[str, Callable[..., Any]] = {
                "answer": lambda place, content, begins: self.host.answer(place, content, begins=begins),
                "give_up": self.host.give_up,
                "hold": self.host.hold,
            }
            answer = await named[what](*given)
            if not self.host.begun.is_set():
                await modal.experimental.stop_fetching_inputs.aio()
            return answer


@app.cls(image=_training, **_one)
@modal.concurrent(max_inputs=_inputs)
class RolloutWorker(Worker):
    """Samples, with the engine `transformers`."""

    run: str = modal.parameter(default="")
    worker: str = modal.parameter(default="")
    before: int = modal.parameter(default=0)
    ranks: int = modal.parameter(default=1)


@app.cls(image=_sampling, **_one)
@modal.concurrent(max_inputs=_inputs)
class VLLMRolloutWorker(Worker):
    """Samples, with vLLM."""

    run: str = modal.parameter(default="")
    worker: str = modal.parameter(default="")
    before: int = modal.parameter(default=0)
    ranks: int = modal.parameter(default=1)


@app.cls(image=_training, **_one)
@modal.concurrent(max_inputs=_inputs)
class EnvironmentWorker(Worker):
    """Whatever computes on no GPU: environments."""

    run: str = modal.parameter(default="")
    worker: str = modal.parameter(default="")
    before: int = modal.parameter(default=0)
    ranks: int = modal.parameter(default=1)


@app.cls(image=_training, **_one, retries=modal.Retries(max_retries=10, initial_delay=1.0))
@modal.concurrent(max_inputs=CONTROL_INPUTS)
class Loop:
    """A whole run's loop. When its container dies, or has been there for as long as Modal allows, Modal makes the same
    call in another one, and the run goes on from its checkpoint."""

    run: str = modal.parameter(default="")

    @modal.enter()
    def begin(self) -> None:
        shared_disk.register(Mounted(volume))
        self.work: Any = None
        self.asked: int | None = None

    @modal.method()
    async def train(self, content: bytes) -> bytes:
        """content: a pickled object with `run()` and `stop(signal)`. Returns what came of it, pickled like an Answer:
        an exception would be tried again. A call that Modal gives up is, in another container."""
        try:
            self.work = cloudpickle.loads(content)
            if self.asked is not None:
                self.work.stop(self.asked)
            return cloudpickle.dumps(("returned", await asyncio.to_thread(self.work.run)))
        except (Exception, SystemExit) as error:
            return cloudpickle.dumps(("raised", that_travels(error)))

    @modal.method()
    async def stop(self, number: int) -> None:
        self.asked = number
        if self.work is not None:
            self.work.stop(number)
