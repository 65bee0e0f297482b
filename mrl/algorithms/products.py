"""Matrix products of bfloat16 factors with float32 accumulation and output.

An output rounded to bfloat16 keeps eight bits: logits around 30 are then 1/8 apart, and the same distribution differs
by a hundredth of a nat or more between sampler and trainer. CUDA can multiply bfloat16 into float32 at the same speed.
Where that is not supported, the factors are cast to float32 first: the same numbers at float32 speed.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)


def product(left_NK: Tensor, right_KM: Tensor, out: Tensor | None = None) -> Tensor:
    """left @ right, N×M: float32 for narrower factors, otherwise in their dtype. No gradient. out: output tensor."""
    if left_NK.dtype not in NARROW:
        return torch.mm(left_NK, right_KM, out=out)
    if widens(left_NK.device):
        found: Tensor = torch.mm(left_NK, right_KM, out_dtype=torch.float32, out=out)
        return found
    return torch.mm(left_NK.float(), right_KM.float(), out=out)


def add_product(total_NM: Tensor, left_NK: Tensor, right_KM: Tensor) -> None:
    """total += left @ right; the product is not rounded before it is added."""
    if total_NM.dtype == left_NK.dtype:
        total_NM.addmm_(left_NK, right_KM)
    elif widens(total_NM.device):
        torch.addmm(total_NM, left_NK, right_KM, out_dtype=total_NM.dtype, out=total_NM)
    else:
        total_NM += product(left_NK, right_KM)


@functools.cache
def widens(device: torch.device) -> bool:
    """Whether the device can multiply narrow factors into float32; found by trying. Raises torch.OutOfMemoryError."""
    ones = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    total = torch.zeros(8, 8, device=device)
    try:
        torch.mm(ones, ones, out_dtype=torch.float32, out=total)
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except torch.OutOfMemoryError:  # says nothing of what the device can do, and must not be remembered as if it did
        raise
    except (RuntimeError, TypeError):  # NotImplementedError is one
        return False
    return True
