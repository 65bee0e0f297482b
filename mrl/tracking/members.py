"""The registry of trackers."""

from mrl.registry import Registry
from mrl.tracking.base import Tracker

TRACKERS: Registry[type[Tracker]] = Registry(
    "trackers",
    "report_to",
    {
        "console": "mrl.tracking.console:ConsoleTracker",
        "jsonl": "mrl.tracking.jsonl:JsonlTracker",
        "mlflow": "mrl.tracking.mlflow:MlflowTracker",
        "tensorboard": "mrl.tracking.tensorboard:TensorBoardTracker",
        "trackio": "mrl.tracking.trackio:TrackioTracker",
        "wandb": "mrl.tracking.wandb:WandbTracker",
    },
)
