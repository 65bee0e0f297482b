"""Weight sync: how a new policy version reaches the rollout workers."""

from mrl.registry import Registry
from mrl.sync.base import WeightSync

SYNC_METHODS: Registry[type[WeightSync]] = Registry(
    "sync",
    "weight_sync_method",
    {
        "reload": "mrl.sync.reload:ReloadSync",
        "direct": "mrl.sync.direct:DirectSync",
        "object_store": "mrl.sync.object_store:ObjectStoreSync",
        "volume": "mrl.sync.volume:VolumeSync",
        "checkpoint": "mrl.sync.checkpoint:CheckpointSync",
        "delta": "mrl.sync.delta:DeltaSync",
    },
)

__all__ = ["SYNC_METHODS", "WeightSync"]
