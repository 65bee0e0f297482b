"""`diagnose()`: look at the machine and the packages, and try every member of every kind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mrl.cli.doctor.machine import Machine, gpus, machine
from mrl.cli.doctor.packages import OPTIONAL, Package, conflicts, packages
from mrl.cli.doctor.probes import PROBES, TookTooLong
from mrl.errors import MRLError
from mrl.system.shell import command

PROBE_SECONDS = 120.0
"""What one probe may take, imports included; then nothing is known. Together they usually take under 10 s."""
BUSY = "the machine may be busy: try again when it is not"


@dataclass(slots=True)
class Check:
    """One member of an open set, tried."""

    kind: str
    """`engine`, `backend`, `sandbox` …"""
    name: str
    default: bool
    """Whether a run uses it when nothing else is asked for."""
    ok: bool
    """It works. Not so where `slow` is set: then nobody knows."""
    detail: str
    """What worked, or what went wrong."""
    fix: str
    """What to do about it; empty when it works, or when `detail` says so itself."""
    seconds: float
    slow: bool = False
    """It took longer than it was given, and neither worked nor failed."""


@dataclass(slots=True)
class Report:
    """Plain data: `dataclasses.asdict` gives JSON."""

    ok: bool
    """The default engine, backend and sandbox work."""
    machine: Machine
    gpus: list[str]
    packages: list[Package]
    problems: list[str]
    """What is installed and does not go together, each with its remedy."""
    checks: list[Check]


def diagnose(timeout: float = PROBE_SECONDS) -> Report:
    """Try everything. timeout: seconds for each probe. Never raises for what it finds."""
    found, torch_problem = gpus()
    problems = conflicts() + ([torch_problem] if torch_problem else [])
    checks = [
        try_member(kind, name, registry, name == default, timeout)
        for kind, registry, default in members()
        for name in sorted(registry.names(), key=lambda name: (name != default, name))
    ]
    missing = {kind for kind, _, _ in members()} - {check.kind for check in checks if check.default}
    ok = not missing and all(check.ok for check in checks if check.default)
    return Report(ok, machine(), found, packages(), problems, checks)


def members() -> Sequence[tuple[str, Any, str]]:
    """(kind, its registry, the default's name)."""
    from mrl.backends import BACKENDS
    from mrl.config import RewardConfig, RuntimeConfig
    from mrl.engines import ENGINES
    from mrl.sandbox import SANDBOXES

    runtime = RuntimeConfig()
    return [
        ("engine", ENGINES, runtime.engine),
        ("backend", BACKENDS, runtime.backend),
        ("sandbox", SANDBOXES, RewardConfig().sandbox),
    ]


def try_member(kind: str, name: str, registry: Any, default: bool, timeout: float) -> Check:
    """Run its probe on a thread of its own, so that what hangs is left behind and reported."""
    result: list[str | BaseException] = []

    def run() -> None:
        try:
            own = f"{kind}:{name}"
            probe = PROBES.get(own if own in PROBES.names() else kind)
            result.append(asyncio.run(_call(probe, registry.get(name))))
        except BaseException as error:  # whatever a broken member raises is the finding, even SystemExit
            result.append(error)

    start = time.perf_counter()
    thread = threading.Thread(target=run, name=f"mrl-doctor-{kind}-{name}", daemon=True)
    thread.start()
    thread.join(timeout)
    seconds = time.perf_counter() - start
    if not result:
        return Check(kind, name, default, False, f"took longer than {timeout:g} s", BUSY, seconds, slow=True)
    if isinstance(result[0], TookTooLong | TimeoutError):
        return Check(kind, name, default, False, str(result[0]) or "timed out", BUSY, seconds, slow=True)
    if isinstance(result[0], str):
        return Check(kind, name, default, True, result[0], "", seconds)
    detail, fix = _explain(result[0], kind)
    return Check(kind, name, default, False, detail, fix, seconds)


async def _call(probe: Any, member: Any) -> str:
    return str(await probe(member))


def _explain(error: BaseException, kind: str) -> tuple[str, str]:
    """What went wrong, and what to do."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.split(".")[0].replace("_", "-")
        if package == "mrl":
            return f"a part of mrl is missing: {text}", "reinstall mrl"
        known = package in OPTIONAL
        return f"{package} is not installed", command(
            "pip", "install", package
        ) if known else f"install {package} ({text})"
    if isinstance(error, MRLError):  # says itself what to change
        return text, ""
    if isinstance(error, ImportError | OSError | AttributeError):
        return f"{type(error).__name__}: {text}", "its installation looks broken: reinstall it; see the problems above"
    return f"{type(error).__name__}: {text}", f"choose another {kind}, or report this with the output of `mrl doctor`"
