"""How much of a device's memory is to be had, for those who size their work by it."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import torch

_claims: WeakKeyDictionary[object, tuple[torch.device, int]] = WeakKeyDictionary()
_lock = threading.Lock()


def unclaimed(device: torch.device) -> int | None:
    """Bytes of an accelerator that nobody has, and nobody in this process is going to take; None for other devices,
    whose memory is the machine's."""
    if device.type in ("cpu", "mps"):
        return None
    module = torch.get_device_module(device)
    free: int = module.mem_get_info(device)[0]
    if device.type == "cuda":  # torch keeps what was freed
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with _lock:
        claimed = sum(size for where, size in _claims.values() if where == device)
    return max(0, free - claimed)


def claim(owner: object, device: torch.device, size: int) -> None:
    """As long as `owner` lives it will take so many bytes there, sooner or later; 0 = it has taken them."""
    with _lock:
        _claims[owner] = (device, size)


def rounded(count: int) -> int:
    """Down to three binary digits, so that a little more or less free memory changes nothing."""
    digits = max(0, count.bit_length() - 3)
    return count >> digits << digits
