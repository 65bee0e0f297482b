"""One typed error per boundary. Each message names the file, field or flag to change and what would work.

A bad rollout is data, not an exception: it is stored with its error and left out of the loss. What is raised here ends
a run (or a command), and the command line turns it into one message and exit code 2.
"""

from __future__ import annotations


class MRLError(Exception):
    """Base of every error mrl raises for its user."""

    worded = False
    """Whether the message names options as its reader gives them; if not, it names them as recipes do."""

    def reword(self, message: str) -> None:
        """Say it in the reader's words."""
        self.args, self.worded = (message,), True


class ConfigError(MRLError):
    """An option is unknown, has a bad value, or does not go with another."""


class DataError(MRLError):
    """A dataset cannot be read, is empty, or has a row or column that will not do."""


class ModelError(MRLError):
    """A model or tokenizer cannot be found or loaded."""


class RewardError(MRLError):
    """A reward function does not import, or breaks its contract in a way no retry mends."""


class RolloutError(MRLError):
    """A rollout function breaks its contract in a way no retry mends."""


class SandboxError(MRLError):
    """The sandbox itself failed; never a verdict on the program it ran."""


class EnvError(MRLError):
    """An environment could not be reached or broke off."""


class EngineError(MRLError):
    """An engine was asked for something it cannot do, or broke while generating."""


class EngineDied(EngineError):
    """An engine's own process is gone; another one has to be started."""


class WorkerDied(MRLError):
    """A worker is gone or missed its deadline. worker: its name."""

    def __init__(self, message: str, worker: str | None = None) -> None:
        super().__init__(message)
        self.worker = worker


class SyncError(MRLError):
    """Rollout workers do not hold the weights they were sent."""


class CheckpointError(MRLError):
    """A checkpoint is missing, damaged, or could not be written."""


class TrainingError(MRLError):
    """The run cannot go on: too many failed rollouts, updates that are not finite, or samplers with another policy."""


class StoreError(MRLError):
    """A run's record cannot be written or read: disk full, written by another process, or by another version of mrl."""
