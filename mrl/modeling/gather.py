"""Rows of a table, each to where it is wanted, with a gradient that is the same every time.

The gradient of `table[index]` adds up what comes back from every place a row went to. On CPU torch adds it with several
threads at once, in whatever order they come: the last bits of the sum differ from call to call. Here it is known
beforehand where each row goes, so every row's parts are fetched together and summed in one fixed order, which also
takes less time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrl.system.transfers import to_device


@dataclass(frozen=True)
class Gather:
    """Which of a table's N rows goes to each of P places, and the way back."""

    row_P: Tensor
    back: list[tuple[Tensor, Tensor]]
    """(rows_R, places_RK): the rows that went to K places, one such pair for each K; a row is in one pair at most."""

    def __call__(self, table_NF: Tensor) -> Tensor:
        """N×F → P×F."""
        taken_PF: Tensor = _Taken.apply(table_NF, self)
        return taken_PF


def make_gather(row_P: np.ndarray, device: torch.device, filled_P: np.ndarray | None = None) -> Gather:
    """row_P: which row each place gets. filled_P: places whose gradient counts; the others are padding."""
    place_Q = np.arange(len(row_P)) if filled_P is None else np.nonzero(filled_P)[0]
    place_Q = place_Q[np.argsort(row_P[place_Q], kind="stable")]
    rows_U, first_U, count_U = np.unique(row_P[place_Q], return_index=True, return_counts=True)

    def tensor(values: np.ndarray) -> Tensor:
        return to_device(device, torch.from_numpy(values.astype(np.int64)))

    back = []
    for count in np.unique(count_U):
        equal_U = count_U == count
        back.append((tensor(rows_U[equal_U]), tensor(place_Q[first_U[equal_U][:, None] + np.arange(count)])))
    return Gather(tensor(row_P), back)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_NF: Tensor, gather: Gather) -> Tensor:
        ctx.gather, ctx.rows = gather, len(table_NF)
        return table_NF.index_select(0, gather.row_P)

    @staticmethod
    def backward(ctx: Any, grad_PF: Tensor) -> tuple[Tensor, None]:
        grad_NF = grad_PF.new_zeros(ctx.rows, grad_PF.shape[1])
        for rows_R, places_RK in ctx.gather.back:
            parts = grad_PF.index_select(0, places_RK.flatten())
            if places_RK.shape[1] > 1:
                parts = parts.view(*places_RK.shape, -1).sum(dim=1)
            grad_NF.index_copy_(0, rows_R, parts)
        return grad_NF, None
