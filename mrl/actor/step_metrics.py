"""The numbers of one training step."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class StepMetrics:
    """Token-weighted means and maxima over the micro-batches and updates of a step.

    moved: how far the weights may have moved the logprobs of the compared tokens since these were sampled, in nats.
    """

    def __init__(self, moved: float = 0.0) -> None:
        self.moved = moved
        self.sums: dict[str, float] = {}
        self.maxima: dict[str, float] = {}
        self.count = 0.0
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.skipped = 0
        self.weights = WeightSums()
        self.compared_tokens = 0
        self.unexplained_sum = 0.0

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

    def importance(self, log_weights_N: Tensor, bounded_N: Tensor | None) -> None:
        """Weights of the sampler/trainer correction, one of each token or sequence. bounded_N: as they were used; None
        = they were not."""
        self.weights.add(log_weights_N, bounded_N)

    def unexplained(self, gap_N: Tensor) -> None:
        """The gaps, beyond what a cut explains, of the tokens that are compared."""
        self.compared_tokens += gap_N.numel()
        self.unexplained_sum += gap_N.double().sum().item()

    def unexplained_gap(self) -> float | None:
        """What neither a cut nor the weights' movement explains, in nats per token; None where nothing is compared."""
        if not self.compared_tokens:
            return None
        mean = self.unexplained_sum / self.compared_tokens
        return max(mean - self.moved, 0.0) if self.moved else mean  # max() would hide a mean that is not a number

    def update(self, loss: float, grad_norm: float, *, skipped: bool) -> None:
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        self.skipped += skipped

    def summary(self) -> dict[str, float]:
        count = max(self.count, 1.0)
        unexplained = self.unexplained_gap()
        return {
            "train/loss": sum(self.losses) / len(self.losses),
            "train/grad_norm": sum(self.grad_norms) / len(self.grad_norms),
            "train/updates_skipped": float(self.skipped),
            "train/tokens": self.count / len(self.losses),
            **{f"train/{name}": total / count for name, total in self.sums.items()},
            **{f"train/{name}_max": value for name, value in self.maxima.items()},
            **self.weights.summary(),
            **({} if unexplained is None else {"train/logprob_gap_unexplained": unexplained}),
        }


class WeightSums:
    """Sums over importance weights, as logarithms: a sequence's weight, a product over its tokens, leaves any float."""

    def __init__(self) -> None:
        self.count = 0
        self.log_sum = self.log_squares = self.log_dropped = torch.tensor(-torch.inf, dtype=torch.float64)
        self.bounded = False

    def add(self, log_weights_N: Tensor, bounded_N: Tensor | None) -> None:
        """bounded_N: what truncation or masking left of the weights; None = all."""
        log_weights_N = log_weights_N.double().cpu()
        self.count += log_weights_N.numel()
        self.log_sum = torch.logaddexp(self.log_sum, log_weights_N.logsumexp(0))
        self.log_squares = torch.logaddexp(self.log_squares, (2 * log_weights_N).logsumexp(0))
        if bounded_N is not None:
            self.bounded = True
            # Through the weight's own rounding a weight within the bounds would seem to lose a last bit.
            left_N = bounded_N.double().cpu() * torch.exp(-log_weights_N)
            lost_N = torch.where(left_N < 1 - 1e-6, 1 - left_N, 0.0)
            self.log_dropped = torch.logaddexp(self.log_dropped, (log_weights_N + lost_N.log()).logsumexp(0))

    def summary(self) -> dict[str, float]:
        if not self.count:
            return {}
        fractions = {"train/effective_sample_fraction": torch.exp(2 * self.log_sum - self.log_squares) / self.count}
        if self.bounded:
            fractions["train/importance_dropped_fraction"] = torch.exp(self.log_dropped - self.log_sum)
        return {name: value.item() for name, value in fractions.items()}
