"""Between the host and an accelerator, so that neither waits for the other without need.

An accelerator works through what it was given while the host goes on. A plain copy between the two makes the host wait
until all of that is done. What goes to the device needs no waiting, and what comes back can come in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def onto(device: torch.device, values: Sequence[Any] | Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Values of the host as a tensor on the device. Nothing waits; on the CPU it is what `torch.tensor` makes."""
    made = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return made
    if device.type == "cuda":  # from pageable memory CUDA may wait all the same
        made = made.pin_memory()
    return made.to(device, non_blocking=_asynchronous(device))


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Small tensors of one device in host memory, after one wait for all of them. On the CPU they are those given."""
    if all(tensor.is_cpu for tensor in tensors):
        return list(tensors)
    widest_first = sorted(range(len(tensors)), key=lambda at: -tensors[at].element_size())  # keeps each one aligned
    parts = [tensors[at].detach().reshape(-1).view(torch.uint8) for at in widest_first]
    found = torch.cat(parts).cpu().split([len(part) for part in parts])
    by_place = dict(zip(widest_first, found, strict=True))
    return [by_place[at].view(t.dtype).view(t.shape) for at, t in enumerate(tensors)]


def leaving(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor in host memory) one after the other, each valid until the next is asked for.

    From a device they come through two pinned buffers on a stream of their own: while one is used the next is on its
    way. Tensors of the host are those given. Do not write to the tensors meanwhile. dtype: what floating-point ones are
    cast to before they leave; None = what they are.
    """
    names = list(tensors)
    devices = {tensor.device for tensor in tensors.values() if _asynchronous(tensor.device)}
    if len(devices) != 1:
        yield from ((name, _cast(tensors[name], dtype).cpu()) for name in names)
        return
    (device,) = devices
    module = torch.get_device_module(device)
    stream, arrived = module.Stream(device), [module.Event(), module.Event()]
    size = max(
        tensor.numel() * max(tensor.element_size(), dtype.itemsize if dtype else 0) for tensor in tensors.values()
    )
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
    sent: dict[int, tuple[Tensor, Tensor]] = {}
    """On the device and in host memory, by buffer: the first has to live until its copy has arrived."""

    def send(at: int) -> None:
        given = _cast(tensors[names[at]], dtype)
        host = buffers[at % 2][: given.nbytes].view(given.dtype).view(given.shape)
        stream.wait_stream(module.current_stream(device))  # what is computed now is what leaves
        with module.stream(stream):
            host.copy_(given, non_blocking=True)
        arrived[at % 2].record(stream)
        sent[at % 2] = given, host

    try:
        send(0)
        for at, name in enumerate(names):
            arrived[at % 2].synchronize()
            if at + 1 < len(names):
                send(at + 1)
            yield name, sent[at % 2][1]
    finally:
        module.current_stream(device).wait_stream(stream)  # before they are written to, or their memory used again


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to(dtype) if dtype is not None and tensor.is_floating_point() else tensor.detach()


def on_host(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """All of them in host memory at once, see `leaving`. What is there already, in its dtype, is what was given."""
    return {name: here if tensors[name].is_cpu else here.clone() for name, here in leaving(tensors, dtype)}


def _asynchronous(device: torch.device) -> bool:
    """Whether copies may go on while the host does. Apple's devices have no streams."""
    return device.type not in ("cpu", "mps", "meta")
