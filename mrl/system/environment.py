"""What the last bits of a run's numbers depend on, beside its options: processor, threads, libraries."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LIBRARIES = ("mrl", "torch", "transformers", "peft", "datasets", "tokenizers", "numpy")


def library_versions() -> dict[str, str | None]:
    """Versions of Python and of what a run uses; None = not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def computing_environment(device: torch.device) -> dict[str, Any]:
    """What this thread computes on: `device`, `processor`, `threads` (torch's on CPU), and the libraries' versions."""
    import torch

    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    return {
        "device": device.type,
        "processor": processor,
        "threads": torch.get_num_threads(),
        **library_versions(),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What changed between two environments, as `name before → now`; what either does not know is left out."""
    return [f"{name} {before[name]} → {now[name]}" for name in before if name in now and before[name] != now[name]]


def _cpu() -> str:
    """The CPU's name and the instructions torch uses of it."""
    import torch

    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
