"""What a part finds, for people and as JSON."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Skip(Exception):
    """This part cannot run here, and why."""


class Report:
    """What one part found: `facts` are told, `checks` are right or wrong."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.facts: dict[str, Any] = {}
        self.checks: list[dict[str, Any]] = []

    @property
    def gpu(self) -> bool:
        """Without one, models and batches are small: the CPU is compared with itself."""
        return self.device != "cpu"

    def not_shown(self, what: str) -> None:
        """Tell what this part would find out on a GPU, where there is none."""
        if not self.gpu:
            self.facts["not shown on a CPU"] = what

    def at_most(self, what: str, value: float, limit: float) -> None:
        """Right if `value` is a number not above `limit`."""
        self.checks.append({"what": what, "value": value, "limit": limit, "ok": value <= limit})

    def at_least(self, what: str, value: float, limit: float) -> None:
        """Right if `value` is a number not below `limit`."""
        self.checks.append({"what": what, "value": value, "at least": limit, "ok": value >= limit})


Part = Callable[[Report], None]


def tried(part: Part, device: str) -> dict[str, Any]:
    """Run a part in this process. Its outcome is right, wrong, failed or skipped."""
    report = Report(device)
    error, outcome = None, "right"
    with _own_warnings() as said:
        try:
            part(report)
        except Skip as skip:
            outcome, error = "skipped", str(skip)
        except Exception:  # whatever it is belongs into the report
            outcome, error = "failed", traceback.format_exc(limit=-6)
    if outcome == "right" and not all(check["ok"] for check in report.checks):
        outcome = "wrong"
    if outcome == "right" and any("graph" in text.lower() for text in said):
        outcome = "wrong"  # a step that could not be recorded is taken without, and warned of
    return {
        "about": (part.__doc__ or "").strip().splitlines()[0],
        "outcome": outcome,
        "error": error,
        "facts": _plain(report.facts),
        "checks": _plain(report.checks),
        "warnings": said,
    }


def lines_of(name: str, found: dict[str, Any]) -> list[str]:
    """A part of the report for people."""
    lines = [f"\n{name}: {found['outcome'].upper()} ({found['seconds']:.0f} s)  {found.get('about', '')}".rstrip()]
    for check in found.get("checks", []):
        bound = f"at most {check['limit']:g}" if "limit" in check else f"at least {check['at least']:g}"
        value = check["value"] if isinstance(check["value"], str) else f"{check['value']:.3g}"
        lines.append(f"  {'  ' if check['ok'] else '! '}{check['what']}: {value} ({bound})")
    lines += [f"    {key}: {value}" for key, value in found.get("facts", {}).items()]
    lines += [f"  ! {text}" for text in found.get("warnings", [])]
    if found.get("error"):
        lines += [f"    {line}" for line in found["error"].strip().splitlines()]
    return lines


@contextmanager
def _own_warnings() -> Iterator[list[str]]:
    """mrl's own warnings, by their first lines."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    own = [one for one in caught if "/mrl/" in one.filename]
    said += sorted({str(one.message).splitlines()[0][:300] for one in own})


def _plain(value: Any) -> Any:
    """Something that JSON can hold: no numbers that are none."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
