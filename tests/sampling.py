"""A few tests of many, others for every key: `pytest -m soak --sample 6 --sample-key COMMIT`.

A sample leaves out what takes minutes by itself (the whole quickstart, tens of kills).
"""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest


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
