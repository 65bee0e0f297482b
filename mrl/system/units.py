"""Sizes, durations and counts as people read them."""

from __future__ import annotations

SIZE_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(count: float) -> str:
    """A number of bytes in the unit that fits, in powers of 1000: `940 B`, `3.2 kB`, `1.5 GB`."""
    for unit in SIZE_UNITS[:-1]:
        if round(count, 0 if unit == "B" else 1) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} {SIZE_UNITS[-1]}"


def duration(seconds: float) -> str:
    """`12 s`, `38 min`, `1 h 05 min`."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def plural(count: int, noun: str) -> str:
    """`1 step`, `1,024 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
