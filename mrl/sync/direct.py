"""`direct`: memory to memory. In one process workers use the actor's module itself. Otherwise its weights are copied
into shared memory, where workers on the same machine read them; those on other machines get them over the network into
their own."""

from __future__ import annotations

from mrl.backends.base import WorkerHandle
from mrl.sync.base import WeightSync
from mrl.system import scratch
from mrl.types import WeightRef


class DirectSync(WeightSync):
    """A copy of the weights in the actor's shared memory, served to other machines where there are any."""

    actor_machine: str | None = None

    async def publish(self, actor: WorkerHandle, workers: list[WorkerHandle], version: int) -> WeightRef:
        capabilities = [self.capabilities[worker.name] for worker in workers]
        if self.shares_modules and all("module" in a["accepts"] for a in capabilities):
            module: WeightRef = await actor.call("share_module", version)
            return module
        if self.actor_machine is None:
            self.actor_machine = await actor.call("machine")
        ref: WeightRef = await actor.call(
            "write_memory",
            version,
            # Unless all share this process, a worker's replacement may be on another machine.
            served=not self.shares_modules or any(a["machine"] != self.actor_machine for a in capabilities),
            **self.publish_options(workers),
        )
        return ref

    def close(self) -> None:
        """The memory is the actor's; of one that was killed on this machine it is removed here."""
        if self.actor_machine is not None:
            scratch.sweep(scratch.SHARED_MEMORY)
