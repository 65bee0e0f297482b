"""Gradients over all ranks: their sum, and their norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mrl.actor.parallel.world import World
from mrl.weights.sharded import whole

BUCKET_BYTES = 64 * 2**20
"""Of gradients that are sent at once. Smaller ones are slower, and each is copied into one of these."""


@torch.no_grad()
def sum_gradients(world: World, parameters: Sequence[Tensor]) -> None:
    """Make every gradient of whole parameters its sum over the ranks. None where no rank has one.

    Once per update, after the last backward pass: with several micro-batches that is less to send than after each.
    """
    if world.size == 1:
        return
    had = world.total(torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32))
    used = [p for p, ranks in zip(parameters, had.tolist(), strict=True) if ranks]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([p.grad for p in used if p.grad is not None]):
        flat = world.total(torch.cat([gradient.flatten() for gradient in bucket]))
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def clip_gradients(parameters: Sequence[Tensor], most: float) -> Tensor:
    """Scale gradients down to the norm `most` where theirs is larger. Returns the norm before, a scalar, of the whole
    gradients also where they are sharded."""
    norm = whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))
    clip_grads_with_norm_(parameters, most, norm)
    return norm


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or sum(g.nbytes for g in [*bucket, gradient]) > BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
