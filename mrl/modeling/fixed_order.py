"""Deterministic sums on CPU, where a model's own code would add on several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_users = 0


@contextmanager
def fixed_order(device: torch.device) -> Iterator[None]:
    """Torch's CPU operations are deterministic inside.

    mrl's own sums have a fixed order anyway (`mrl.modeling.gather`); this is for models that index by themselves, for
    instance to route tokens to experts. On other devices it does nothing: it would cost time, or forbid kernels. The
    switch is process-wide; one that the user has set stays.
    """
    global _users
    if device.type != "cpu":
        yield
        return
    with _lock:
        mine = _users > 0 or torch.get_deterministic_debug_mode() == 0
        if mine:
            _users += 1
            torch.set_deterministic_debug_mode("warn")
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it costs time
    try:
        yield
    finally:
        with _lock:
            _users -= mine
            if mine and not _users:
                torch.set_deterministic_debug_mode("default")
                torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
