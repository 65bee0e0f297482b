"""Sums in one order, where a model's own code would add on several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_users = 0


@contextmanager
def fixed_order(device: torch.device) -> Iterator[None]:
    """On CPU torch's own operations give the same bits every time meanwhile.

    What mrl adds up it adds in one order anyway (`mrl.modeling.gather`); this is for models that index by themselves,
    to send tokens to experts for instance. Elsewhere it does nothing: on GPUs it would cost time, or forbid kernels.
    The switch is the whole process's; a user's own stays as it is.
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
