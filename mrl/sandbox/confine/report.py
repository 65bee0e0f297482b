"""What `mrl sandbox check` says."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass

from mrl.errors import SandboxError
from mrl.sandbox.confine import selftest
from mrl.sandbox.confine.names import LAYERS

WHAT = {
    "A": "user, pid, mount, ipc, net and uts namespaces; a root without /proc; seccomp; limits",
    "B": "Landlock; seccomp; limits (no scratch files)",
    "C": "seccomp that opens no file; only preloaded modules import; limits",
}


@dataclass(frozen=True, slots=True)
class Report:
    """The layer that will be used, and what the self-test found of each."""

    layer: str | None
    """None: programs are refused."""
    results: tuple[selftest.LayerResult, ...]
    facts: dict[str, str]
    problem: str = ""

    def lines(self) -> list[str]:
        out = [f"layer: {self.layer or 'none: programs are refused'}"]
        out += [f"  {name}: {value}" for name, value in self.facts.items()]
        for result in self.results:
            state = "holds" if result.holds else f"does not hold: {result.reason}"
            out.append(f"  {result.layer} ({WHAT[result.layer]}): {state}")
        return out + ([self.problem] if self.problem else [])


def describe(python: str = sys.executable) -> Report:
    """Runs the self-test of every layer. Raises nothing."""
    facts = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "user": "root (given up before a program runs)" if _is_root() else "not root",
        "python": python,
    }
    problem = selftest.unsupported()
    if problem:
        return Report(None, (), facts, problem)
    from mrl.sandbox.confine import kernel

    version = kernel.landlock_abi()
    facts["Landlock"] = f"version {version}" if version else "none"
    results = tuple(selftest.test_layer(layer, python) for layer in LAYERS)
    try:
        return Report(selftest.choose("auto", False, python), results, facts)
    except SandboxError as error:
        return Report(None, results, facts, str(error))


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0
