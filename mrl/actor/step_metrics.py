"""The numbers of one training step. They are added up where the model is: the host waits for them once an update."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrl.system.transfers import to_host

WITH_MAXIMUM = ("ratio", "logprob_gap")
"""Values of which the largest is told, too."""


class StepMetrics:
    """Token-weighted means and maxima over the micro-batches and updates of a step.

    moved: how far the weights may have moved the logprobs of the compared tokens since these were sampled, in nats.
    """

    def __init__(self, moved: float = 0.0) -> None:
        self.moved = moved
        self.names: list[str] = []
        self.sums_M: Tensor | None = None
        """By `names`, and behind them the tokens there were."""
        self.largest_M: Tensor | None = None
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.skipped = 0
        self.weights = WeightSums()
        self.compared_2: Tensor | None = None
        """Tokens that are compared with the sampler, and the sum of their unexplained gaps."""
        self.compared_tokens = 0.0
        self.unexplained_sum = 0.0
        """The same, as the host knew them at the last update."""

    def tokens(self, mask_BT: Tensor, **values_BT: Tensor) -> None:
        """Of a micro-batch; always the same values."""
        self.names = list(values_BT)
        on_BT, exact = mask_BT.bool(), _exact(mask_BT)
        values_MBT = torch.stack([*(value_BT.to(exact) for value_BT in values_BT.values()), on_BT.to(exact)])
        sums_M = torch.where(on_BT, values_MBT, 0.0).sum(dim=(1, 2))
        self.sums_M = sums_M if self.sums_M is None else self.sums_M + sums_M
        at = [self.names.index(name) for name in WITH_MAXIMUM if name in self.names]
        if at:
            # amax and maximum keep what is not a number.
            largest_M = torch.stack([torch.where(on_BT, values_MBT[m], -torch.inf).amax() for m in at])
            self.largest_M = largest_M if self.largest_M is None else torch.maximum(self.largest_M, largest_M)

    def importance(self, log_weights_BT: Tensor, bounded_BT: Tensor | None, counted_BT: Tensor | None = None) -> None:
        """Weights of the sampler/trainer correction, one of each token or sequence. bounded_BT: as they were used; None
        = they were not. counted_BT: where the weights are; None = everywhere."""
        self.weights.add(log_weights_BT, bounded_BT, counted_BT)

    def unexplained(self, gap_BT: Tensor, compared_BT: Tensor) -> None:
        """The gaps, beyond what a cut explains, of the tokens that are compared."""
        exact = _exact(gap_BT)
        found_2 = torch.stack([compared_BT.sum(dtype=exact), torch.where(compared_BT, gap_BT.to(exact), 0.0).sum()])
        self.compared_2 = found_2 if self.compared_2 is None else self.compared_2 + found_2

    def update(self, loss: Tensor, grad_norm: Tensor) -> tuple[float, float]:
        """An update is about to be made: the loss and the gradient's norm as numbers. Here the host waits."""
        compared = [] if self.compared_2 is None else [self.compared_2]
        loss_1, grad_norm_1, *compared = to_host(loss, grad_norm, *compared)
        if compared:
            self.compared_tokens, self.unexplained_sum = compared[0].tolist()
        self.losses.append(loss_1.item())
        self.grad_norms.append(grad_norm_1.item())
        return self.losses[-1], self.grad_norms[-1]

    def unexplained_gap(self) -> float | None:
        """What neither a cut nor the weights' movement explains, in nats per token, up to the last update; None where
        nothing is compared."""
        if not self.compared_tokens:
            return None
        mean = self.unexplained_sum / self.compared_tokens
        return max(mean - self.moved, 0.0) if self.moved else mean  # max() would hide a mean that is not a number

    def summary(self) -> dict[str, float]:
        """After at least one update."""
        assert self.sums_M is not None
        parts = [self.sums_M, *([] if self.largest_M is None else [self.largest_M])]
        (sums_M, *largest), weights = _split(to_host(*parts, *self.weights.sums), len(parts))
        *sums, tokens = sums_M.tolist()
        with_maximum = [name for name in WITH_MAXIMUM if name in self.names]
        maxima = dict(zip(with_maximum, largest[0].tolist() if largest else [], strict=True))
        unexplained = self.unexplained_gap()
        return {
            "train/loss": sum(self.losses) / len(self.losses),
            "train/grad_norm": sum(self.grad_norms) / len(self.grad_norms),
            "train/updates_skipped": float(self.skipped),
            "train/tokens": tokens / len(self.losses),
            **{f"train/{name}": total / max(tokens, 1.0) for name, total in zip(self.names, sums, strict=True)},
            **{f"train/{name}_max": value for name, value in maxima.items() if value != -math.inf},
            **self.weights.summary(weights),
            **({} if unexplained is None else {"train/logprob_gap_unexplained": unexplained}),
        }


class WeightSums:
    """Sums over importance weights, as logarithms: a sequence's weight, a product over its tokens, leaves any float."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        """log Σ 1, log Σ w, log Σ w², log Σ of what was dropped of the weights; none before the first."""
        self.bounded = False

    def add(self, log_weights_BT: Tensor, bounded_BT: Tensor | None, counted_BT: Tensor | None) -> None:
        """bounded_BT: what truncation or masking left of the weights; None = all. counted_BT: where they are."""
        if not log_weights_BT.numel():
            return
        exact = _exact(log_weights_BT)
        counted_BT = torch.ones_like(log_weights_BT, dtype=torch.bool) if counted_BT is None else counted_BT
        log_weights_BT = log_weights_BT.to(exact)
        logs = [torch.zeros_like(log_weights_BT), log_weights_BT, 2 * log_weights_BT]
        if bounded_BT is None:
            logs.append(torch.full_like(log_weights_BT, -torch.inf))
        else:
            self.bounded = True
            # Through the weight's own rounding a weight within the bounds would seem to lose a last bit.
            left_BT = bounded_BT.to(exact) * torch.exp(-log_weights_BT)
            lost_BT = torch.where(left_BT < 1 - 1e-6, 1 - left_BT, 0.0)
            logs.append(log_weights_BT + lost_BT.log())
        found = [torch.where(counted_BT, log_BT, -torch.inf).flatten().logsumexp(0) for log_BT in logs]
        self.sums = [torch.logaddexp(a, b) for a, b in zip(self.sums, found, strict=True)] if self.sums else found

    def summary(self, sums: list[Tensor]) -> dict[str, float]:
        """sums: these, in host memory."""
        if not sums or sums[0] == -torch.inf:
            return {}
        log_count, log_sum, log_squares, log_dropped = sums
        fractions = {"train/effective_sample_fraction": torch.exp(2 * log_sum - log_squares - log_count)}
        if self.bounded:
            fractions["train/importance_dropped_fraction"] = torch.exp(log_dropped - log_sum)
        return {name: value.item() for name, value in fractions.items()}


def _exact(values: Tensor) -> torch.dtype:
    """What sums are made in: Apple's devices have no float64."""
    return torch.float32 if values.device.type == "mps" else torch.float64


def _split(values: list[Tensor], at: int) -> tuple[list[Tensor], list[Tensor]]:
    return values[:at], values[at:]
