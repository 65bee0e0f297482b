"""Free memory of a device, for code that sizes its work by it."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import torch

_claims: WeakKeyDictionary[object, tuple[torch.device, int]] = WeakKeyDictionary()
_lock = threading.Lock()


def unclaimed(device: torch.device) -> int | None:
    """Bytes of an accelerator that are free and that nobody in this process has claimed; None for other devices, which
    use the machine's memory."""
    if device.type in ("cpu", "mps"):
        return None
    module = torch.get_device_module(device)
    free: int = module.mem_get_info(device)[0]
    if device.type == "cuda":  # torch's allocator keeps what was freed
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with _lock:
        claimed = sum(size for where, size in _claims.values() if where == device)
    return max(0, free - claimed)


def claim(owner: object, device: torch.device, size: int) -> None:
    """`owner` will allocate this many bytes there, sooner or later; 0 = it has. Ends with `owner`."""
    with _lock:
        _claims[owner] = (device, size)


def rounded(count: int) -> int:
    """Down to three binary digits, so that a little more or less free memory changes nothing."""
    digits = max(0, count.bit_length() - 3)
    return count >> digits << digits
