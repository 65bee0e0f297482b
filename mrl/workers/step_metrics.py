"""The numbers of one training step."""

from __future__ import annotations

import math

from torch import Tensor


class StepMetrics:
    """Token-weighted means and maxima over the micro-batches and updates of a step."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.maxima: dict[str, float] = {}
        self.count = 0.0
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.skipped = 0

    def tokens(self, mask_BT: Tensor, **values_BT: Tensor) -> None:
        on_N = mask_BT.bool()
        self.count += float(on_N.sum())
        for name, value_BT in values_BT.items():
            value_N = value_BT[on_N].double()
            self.sums[name] = self.sums.get(name, 0.0) + value_N.sum().item()
            if name in ("ratio", "logprob_gap") and value_N.numel():
                # Kept when it is not finite: max() would drop a NaN that comes second.
                largest = value_N.max().item()
                self.maxima[name] = largest if math.isnan(largest) else max(self.maxima.get(name, largest), largest)

    def update(self, loss: float, grad_norm: float, *, skipped: bool) -> None:
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        self.skipped += skipped

    def summary(self) -> dict[str, float]:
        count = max(self.count, 1.0)
        return {
            "train/loss": sum(self.losses) / len(self.losses),
            "train/grad_norm": sum(self.grad_norms) / len(self.grad_norms),
            "train/updates_skipped": float(self.skipped),
            "train/tokens": self.count / len(self.losses),
            **{f"train/{name}": total / count for name, total in self.sums.items()},
            **{f"train/{name}_max": value for name, value in self.maxima.items()},
        }
