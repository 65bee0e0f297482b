"""Sizes and durations in the unit that fits."""

from __future__ import annotations

import pytest

from mrl.system.units import duration, size


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (3_200_000, "3.2 MB"), (4e13, "40.0 TB")],
)
def test_sizes(count: float, expected: str) -> None:
    assert size(count) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(0.4, "0 s"), (59.7, "1 min"), (3599, "1 h 00 min"), (90, "2 min")])
def test_durations(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected
