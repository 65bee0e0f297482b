"""Products of bfloat16 matrices that are summed up, and stay, in float32.

A product that is rounded to bfloat16 has eight bits left: logits around 30 then lie an eighth apart, and what is taken
for the same distribution in sampler and trainer differs by a hundredth of a nat and more. CUDA multiplies bfloat16 and
gives float32 at the same speed. Where that is not offered, the factors are widened first: the same numbers, in the time
that float32 takes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)


def product(left_NK: Tensor, right_KM: Tensor, out: Tensor | None = None) -> Tensor:
    """left @ right, N×M: in float32 for narrower factors, otherwise in theirs. No gradient. out: where to."""
    if left_NK.dtype not in NARROW:
        return torch.mm(left_NK, right_KM, out=out)
    if widens(left_NK.device):
        found: Tensor = torch.mm(left_NK, right_KM, out_dtype=torch.float32, out=out)
        return found
    return torch.mm(left_NK.float(), right_KM.float(), out=out)


def add_product(total_NM: Tensor, left_NK: Tensor, right_KM: Tensor) -> None:
    """total += left @ right, not rounded before it is added."""
    if total_NM.dtype == left_NK.dtype:
        total_NM.addmm_(left_NK, right_KM)
    elif widens(total_NM.device):
        torch.addmm(total_NM, left_NK, right_KM, out_dtype=total_NM.dtype, out=total_NM)
    else:
        total_NM += product(left_NK, right_KM)


@functools.cache
def widens(device: torch.device) -> bool:
    """Whether products of narrow factors can come out in float32 there, by trying."""
    ones = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    total = torch.zeros(8, 8, device=device)
    try:
        torch.mm(ones, ones, out_dtype=torch.float32, out=total)
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # NotImplementedError is one
        return False
    return True
