"""`object_store`: through Ray's object store. One copy on the actor's node and one on each other node, for all
workers there. The objects of a version are freed when the next has been published."""

from __future__ import annotations

from mrl.backends.base import WorkerHandle
from mrl.sync.base import WeightSync
from mrl.types import WeightRef


class ObjectStoreSync(WeightSync):
    """Its references hold the objects: a replaced worker finds the current version."""

    async def publish(self, actor: WorkerHandle, workers: list[WorkerHandle], version: int) -> WeightRef:
        ref: WeightRef = await actor.call("write_objects", version, **self.publish_options(workers))
        return ref

    def close(self) -> None:
        self.current = None
