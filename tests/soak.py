"""What is left to `make soak`, and which of it one commit runs: `pytest -m soak --soak-sample 6 --soak-key COMMIT`.

A sample leaves out what takes minutes by itself (the whole quickstart, tens of kills); `make soak` has it all.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """`values` as parameters of a test, of which all but `kept` are left to `make soak`."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.soak) for value in values]


def slow_but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """`values` as parameters of a test, of which all but `kept` are slow."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]


def rows_but(kept: Collection[tuple[Any, ...]], rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The same for parameters that come several at a time."""
    return [row if row in kept else pytest.param(*row, marks=pytest.mark.soak) for row in rows]


def takes_long(item: pytest.Item) -> bool:
    """Whether a test has a time limit of its own, beyond everyone's: minutes, which a sample has not got."""
    own = item.get_closest_marker("timeout")
    return own is not None and own.args[0] > float(item.config.getini("timeout") or 0)


def sample(ids: list[str], number: int, key: str) -> set[str]:
    """`number` tests, the same ones for the same key and tests; of one file a second one only after all files had one.

    ids: as pytest names tests, `file::name[parameters]`.
    """
    shuffled = sorted(ids, key=lambda one: hashlib.sha256(f"{key} {one}".encode()).digest())
    seen: Counter[str] = Counter()
    turns = {}
    for one in shuffled:
        file = one.partition("::")[0]
        turns[one] = seen[file]
        seen[file] += 1
    return set(sorted(shuffled, key=turns.__getitem__)[:number])
