"""Datasets that have a name of their own: "tiny-code", or "name:argument".

A source is a function; a new one is one file and one line in `DATASETS`, or an entry point in `mrl.datasets`.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from mrl.errors import DataError
from mrl.registry import Registry


class DatasetSource(Protocol):
    """Rows for `dataset_name="name:argument"`."""

    def __call__(
        self, argument: str, *, config: str | None, split: str, max_samples: int | None, seed: int
    ) -> list[dict[str, Any]]:
        """argument: what follows the colon, "" without one. Raises DataError for an unknown argument, config or split.

        A source that draws its rows draws `max_samples` of them from `seed`; others may return more, the caller cuts.
        An attribute `reward` names the reward of its tasks when `reward_funcs` does not.
        """
        ...


DATASETS: Registry[DatasetSource] = Registry(
    "datasets",
    "dataset_name",
    {
        "tiny-code": "mrl.data.sources:tiny_code",
        "reasoning_gym": "mrl.data.reasoning_gym:reasoning_gym",
        "humaneval": "mrl.data.humaneval:humaneval",
    },
)


def own_reward(dataset_name: str) -> str | None:
    """The reward that comes with a dataset of a name of its own; None = none does."""
    name = dataset_name.partition(":")[0]
    return getattr(DATASETS.get(name), "reward", None) if name in DATASETS.names() else None


TINY_CODE_SPLITS: dict[str, Literal["train", "heldout"]] = {
    "train": "train",
    "heldout": "heldout",
    "test": "heldout",
    "validation": "heldout",
}


def tiny_code(
    argument: str, *, config: str | None, split: str, max_samples: int | None, seed: int
) -> list[dict[str, Any]]:
    """The tasks that come with mrl, without their solutions: what the policy must find, no column may give away."""
    from mrl import starter

    if argument or config:
        raise DataError(f"dataset 'tiny-code' has no config or argument, got {argument or config!r}")
    if split not in TINY_CODE_SPLITS:
        raise DataError(f"dataset 'tiny-code' has no split {split!r}: take 'train' or 'heldout'")
    rows = starter.load_tasks(TINY_CODE_SPLITS[split])
    return [{name: value for name, value in row.items() if name != "solution"} for row in rows]
