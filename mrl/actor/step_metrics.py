"""Metrics of one training step. They are accumulated on the model's device: the host synchronises once per update."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrl.actor.parallel.world import World
from mrl.system.transfers import to_host

WITH_MAXIMUM = ("ratio", "logprob_gap")
"""Values whose maximum is reported too."""


class StepMetrics:
    """Token-weighted means and maxima over the micro-batches and updates of a step.

    moved: the logprob gap, in nats per token, that updates since the compared tokens were sampled may explain. world:
    the ranks that each add their own micro-batches; `update` and `summary` are of all of them.
    """

    def __init__(self, moved: float = 0.0, world: World | None = None) -> None:
        self.moved, self.world = moved, world or World()
        self.names: list[str] = []
        self.sums_M: Tensor | None = None
        """In the order of `names`, then the number of tokens."""
        self.largest_M: Tensor | None = None
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.skipped = 0
        self.weights = WeightSums()
        self.compared_2: Tensor | None = None
        """Number of tokens compared with the sampler, and the sum of their unexplained gaps."""
        self.compared_tokens = 0.0
        self.unexplained_sum = 0.0
        """`compared_2` on the host, as of the last update."""

    def tokens(self, mask_BT: Tensor, **values_BT: Tensor) -> None:
        """Add a micro-batch's per-token values; every call must pass the same names."""
        self.names = list(values_BT)
        on_BT, exact = mask_BT.bool(), _exact(mask_BT)
        values_MBT = torch.stack([*(value_BT.to(exact) for value_BT in values_BT.values()), on_BT.to(exact)])
        sums_M = torch.where(on_BT, values_MBT, 0.0).sum(dim=(1, 2))
        self.sums_M = sums_M if self.sums_M is None else self.sums_M + sums_M
        at = [self.names.index(name) for name in WITH_MAXIMUM if name in self.names]
        if at:
            # amax and maximum propagate NaN.
            largest_M = torch.stack([torch.where(on_BT, values_MBT[m], -torch.inf).amax() for m in at])
            self.largest_M = largest_M if self.largest_M is None else torch.maximum(self.largest_M, largest_M)

    def importance(self, log_weights_BT: Tensor, bounded_BT: Tensor | None, counted_BT: Tensor | None = None) -> None:
        """Add the sampler/trainer importance weights of tokens or sequences. bounded_BT: after truncation or masking;
        None = not applied. counted_BT: which positions count; None = all."""
        self.weights.add(log_weights_BT, bounded_BT, counted_BT)

    def unexplained(self, gap_BT: Tensor, compared_BT: Tensor) -> None:
        """Add the logprob gaps of compared tokens, less what a sampling filter explains."""
        exact = _exact(gap_BT)
        found_2 = torch.stack([compared_BT.sum(dtype=exact), torch.where(compared_BT, gap_BT.to(exact), 0.0).sum()])
        self.compared_2 = found_2 if self.compared_2 is None else self.compared_2 + found_2

    def update(self, loss: Tensor, grad_norm: Tensor) -> tuple[float, float]:
        """Record an update's loss and gradient norm, and return them as floats. Synchronises with the device.

        loss: of this rank's micro-batches. grad_norm: of all ranks' gradient."""
        compared = [] if self.compared_2 is None else [self.world.total(self.compared_2.clone())]
        loss_1, grad_norm_1, *compared = to_host(self.world.total(loss.detach().clone()), grad_norm, *compared)
        if compared:
            self.compared_tokens, self.unexplained_sum = compared[0].tolist()
        self.losses.append(loss_1.item())
        self.grad_norms.append(grad_norm_1.item())
        return self.losses[-1], self.grad_norms[-1]

    def unexplained_gap(self) -> float | None:
        """The mean logprob gap that neither a sampling filter nor `moved` explains, in nats per token, up to the last
        update; None where no token is compared."""
        if not self.compared_tokens:
            return None
        mean = self.unexplained_sum / self.compared_tokens
        return max(mean - self.moved, 0.0) if self.moved else mean  # max() would hide NaN

    def summary(self) -> dict[str, float]:
        """The step's metrics. Call after at least one update."""
        return self.summary_with([])[0]

    def summary_with(self, others: list[Tensor]) -> tuple[dict[str, float], list[Tensor]]:
        """The step's metrics, and other tensors in host memory, for which the host does not wait once more."""
        assert self.sums_M is not None
        parts = [self.world.total(self.sums_M.clone())]
        if self.largest_M is not None:
            parts.append(self.world.each(self.largest_M).amax(dim=0))  # a collective maximum would hide NaN
        logs = [self.world.each(log).logsumexp(dim=0) for log in self.weights.sums]
        (sums_M, *largest), rest = _split(to_host(*parts, *logs, *others), len(parts))
        weights, brought = _split(rest, len(logs))
        *sums, tokens = sums_M.tolist()
        with_maximum = [name for name in WITH_MAXIMUM if name in self.names]
        maxima = dict(zip(with_maximum, largest[0].tolist() if largest else [], strict=True))
        unexplained = self.unexplained_gap()
        found = {
            "train/loss": sum(self.losses) / len(self.losses),
            "train/grad_norm": sum(self.grad_norms) / len(self.grad_norms),
            "train/updates_skipped": float(self.skipped),
            "train/tokens": tokens / len(self.losses),
            **{f"train/{name}": total / max(tokens, 1.0) for name, total in zip(self.names, sums, strict=True)},
            **{f"train/{name}_max": value for name, value in maxima.items() if value != -math.inf},
            **self.weights.summary(weights),
            **({} if unexplained is None else {"train/logprob_gap_unexplained": unexplained}),
        }
        return found, brought


class WeightSums:
    """Sums over importance weights, as logarithms: a sequence's weight, a product over tokens, may overflow."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        """log Σ 1, log Σ w, log Σ w², log Σ of the weight that truncation or masking removed; empty at first."""
        self.bounded = False

    def add(self, log_weights_BT: Tensor, bounded_BT: Tensor | None, counted_BT: Tensor | None) -> None:
        """bounded_BT: weights after truncation or masking; None = not applied. counted_BT: which positions count."""
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
            # The threshold ignores rounding: a weight within the bounds may differ in the last bit.
            left_BT = bounded_BT.to(exact) * torch.exp(-log_weights_BT)
            lost_BT = torch.where(left_BT < 1 - 1e-6, 1 - left_BT, 0.0)
            logs.append(log_weights_BT + lost_BT.log())
        found = [torch.where(counted_BT, log_BT, -torch.inf).flatten().logsumexp(0) for log_BT in logs]
        self.sums = [torch.logaddexp(a, b) for a, b in zip(self.sums, found, strict=True)] if self.sums else found

    def summary(self, sums: list[Tensor]) -> dict[str, float]:
        """sums: `self.sums` in host memory."""
        if not sums or sums[0] == -torch.inf:
            return {}
        log_count, log_sum, log_squares, log_dropped = sums
        fractions = {"train/effective_sample_fraction": torch.exp(2 * log_sum - log_squares - log_count)}
        if self.bounded:
            fractions["train/importance_dropped_fraction"] = torch.exp(log_dropped - log_sum)
        return {name: value.item() for name, value in fractions.items()}


def _exact(values: Tensor) -> torch.dtype:
    """The dtype for sums: Apple's devices have no float64."""
    return torch.float32 if values.device.type == "mps" else torch.float64


def _split(values: list[Tensor], at: int) -> tuple[list[Tensor], list[Tensor]]:
    return values[:at], values[at:]
