"""What is left to `make soak`; a commit runs a sample of it (tests/sampling.py)."""

from __future__ import annotations

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
