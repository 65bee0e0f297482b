"""Tensors of which each process may hold a part only (torch's DTensor)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(model: Any) -> bool:
    """Whether this process holds only a part of the model's tensors."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all processes if it is sharded: they all have to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """What of a tensor this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_like(own: Tensor, values: Tensor) -> Tensor:
    """Of a whole tensor the part that a tensor of the same shape holds here; nothing is sent."""
    if not isinstance(own, DTensor):
        return values
    return distribute_tensor(values.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


@torch.no_grad()
def write_into(own: Tensor, values: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded."""
    local(own).copy_(local(part_like(own, values)))
