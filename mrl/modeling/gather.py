"""Gathering rows of a table, with a deterministic gradient.

The gradient of `table[index]` sums over every place a row was copied to. On CPU torch sums with several threads in
arbitrary order, so the last bits differ from call to call. Here it is known beforehand where each row goes, so a row's
parts are gathered together and summed in one fixed order, which is also faster.
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
    """Which of a table's N rows goes to each of P places, and the inverse for the backward pass."""

    row_P: Tensor
    back: list[tuple[Tensor, Tensor]]
    """(rows_R, places_RK) for each K: the rows that are copied to K places, and those places."""

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
