"""Time, memory and waits of the device."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu_checks.report import Report


def timed(work: Callable[[], Any], report: Report, repeat: int = 3) -> float:
    """Seconds of the quickest of some runs."""
    found = []
    for _ in range(repeat):
        finish(report)
        start = time.perf_counter()
        work()
        finish(report)
        found.append(time.perf_counter() - start)
    return min(found)


def seconds_of(work: Coroutine[Any, Any, Any]) -> float:
    """Seconds that it takes, rounded."""
    start = time.perf_counter()
    asyncio.run(work)
    return round(time.perf_counter() - start, 3)


def finish(report: Report) -> None:
    """Wait for what the device still computes."""
    if report.gpu:
        torch.cuda.synchronize(report.device)


def allocated(report: Report) -> int:
    """Bytes of tensors on the GPU; 0 on a CPU, of which torch counts none."""
    return torch.cuda.memory_allocated(report.device) if report.gpu else 0


def peak(report: Report, work: Callable[[], Any]) -> int:
    """Bytes of tensors on the GPU at the highest, beyond what is there before; 0 on a CPU."""
    before = allocated(report)
    if report.gpu:
        torch.cuda.reset_peak_memory_stats(report.device)
    work()
    finish(report)
    return torch.cuda.max_memory_allocated(report.device) - before if report.gpu else 0


def gpu_used() -> int:
    """Bytes in use on the first GPU, by whomever."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


@contextmanager
def host_waits() -> Iterator[Counter[str]]:
    """Where the host waits for the GPU meanwhile, and how often. torch tells of copies, numbers that are asked for and
    shapes that depend on them, by the line of Python that it was in; not of `synchronize`."""
    found: Counter[str] = Counter()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in caught:
        if "called a synchronizing" in str(one.message):
            found[f"{Path(one.filename).name}:{one.lineno}"] += 1
        elif "debug mode" not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
