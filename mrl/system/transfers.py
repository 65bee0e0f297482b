"""Copies between the host and an accelerator that wait no more than they must.

Kernels run asynchronously while the host goes on. A plain copy makes the host wait until all of them are done. Copies
to the device need not wait, and what comes back can come in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(device: torch.device, values: Sequence[Any] | Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Host values as a tensor on the device, without waiting; on the CPU it is what `torch.tensor` makes."""
    made = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return made
    if device.type == "cuda":  # from pageable memory CUDA may wait all the same
        made = made.pin_memory()
    return made.to(device, non_blocking=asynchronous(device))


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Small tensors of one device in host memory, with one synchronisation for all. On the CPU they are those given."""
    if all(tensor.is_cpu for tensor in tensors):
        return list(tensors)
    widest_first = sorted(range(len(tensors)), key=lambda at: -tensors[at].element_size())  # keeps each one aligned
    parts = [tensors[at].detach().reshape(-1).view(torch.uint8) for at in widest_first]
    found = torch.cat(parts).cpu().split([len(part) for part in parts])
    by_place = dict(zip(widest_first, found, strict=True))
    return [by_place[at].view(t.dtype).view(t.shape) for at, t in enumerate(tensors)]


def stream_to_host(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, names: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor in host memory) one after the other, each valid until the next is asked for.

    From a device they come through two pinned buffers on a stream of their own: while one is used the next is on its
    way. Tensors of the host are those given. Each is looked up once, when its turn comes; do not write to them
    meanwhile. dtype: what floating-point ones are cast to before they leave; None = what they are. names: which, in
    their order; None = all.
    """
    in_flight: _HostCopy | None = None
    streams: dict[torch.device, _CopyStream] = {}
    try:
        for name in [*(tensors if names is None else names), None]:
            before, in_flight = in_flight, None
            if name is not None:
                given = _cast(tensors[name], dtype)
                if asynchronous(given.device):
                    device = streams.setdefault(given.device, _CopyStream(given.device))
                    in_flight = device.send(name, given)
                else:
                    in_flight = _HostCopy(name, given, given.cpu(), None)
            if before is not None:
                yield before.name, before.arrive()
    finally:
        for device in streams.values():
            device.end()


def on_host(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All of them in host memory at once; what is there already, in its dtype, is what was given.

    Tensors that share memory on a device share it here.
    """
    first_of: dict[tuple[int, torch.Size], str] = {}
    same_as = {}
    if isinstance(tensors, dict):  # they all live, so that an address tells which is which
        for name, tensor in tensors.items():
            same_as[name] = first_of.setdefault((tensor.data_ptr(), tensor.shape), name) if tensor.numel() else name
    distinct = {name: tensors[name] for name in tensors if same_as[name] == name} if same_as else tensors
    found = {}
    for name, here in stream_to_host(distinct, dtype):
        borrowed = not (same_as and tensors[name].is_cpu)
        found[name] = here.clone() if borrowed else here
    return {name: found[same_as.get(name, name)] for name in tensors}


def asynchronous(device: torch.device) -> bool:
    """Whether copies to and from it can proceed while the host goes on. Apple's devices have no streams."""
    return device.type not in ("cpu", "mps", "meta")


def wait(device: torch.device) -> None:
    """Wait for all copies to and from this device, which need not be the current one."""
    if asynchronous(device):
        torch.get_device_module(device).synchronize(device)


class _HostCopy:
    """One tensor on its way to the host."""

    def __init__(self, name: str, given: Tensor, host: Tensor, event: Any) -> None:
        self.name, self.host, self.event = name, host, event
        self.given = given
        """It has to live until its copy has arrived."""

    def arrive(self) -> Tensor:
        """Its copy; the host waits for it."""
        if self.event is not None:
            self.event.synchronize()
        return self.host


class _CopyStream:
    """Copies from one device to the host: a stream, and two buffers that are used in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.stream = self.module.Stream(device)
        self.buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self.count = 0

    def send(self, name: str, given: Tensor) -> _HostCopy:
        self.count += 1
        if self.buffers[self.count % 2].numel() < given.nbytes:
            pinned = self.device.type == "cuda"
            self.buffers[self.count % 2] = torch.empty(given.nbytes, dtype=torch.uint8, pin_memory=pinned)
        host = self.buffers[self.count % 2][: given.nbytes].view(given.dtype).view(given.shape)
        self.stream.wait_stream(self.module.current_stream(self.device))  # copy what is computed by now
        with self.module.stream(self.stream):
            host.copy_(given, non_blocking=True)
        event = self.module.Event()
        event.record(self.stream)
        return _HostCopy(name, given, host, event)

    def end(self) -> None:
        """Later work on the device waits for the copies: it may write to the tensors, or reuse their memory."""
        self.module.current_stream(self.device).wait_stream(self.stream)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to(dtype) if dtype is not None and tensor.is_floating_point() else tensor.detach()
