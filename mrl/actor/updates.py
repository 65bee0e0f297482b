"""A step's updates: the loss and its gradient over all micro-batches, then the optimizer."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mrl.actor.micro_batches import MicroBatch
from mrl.actor.objective import Objective
from mrl.actor.parallel.gradients import clip_gradients, sum_gradients
from mrl.actor.passes import Passes
from mrl.actor.step_metrics import StepMetrics
from mrl.config import TrainingConfig
from mrl.errors import TrainingError
from mrl.mismatch import Comparison, MismatchProbe
from mrl.modeling.compiled import CompiledLayers
from mrl.modeling.fixed_order import fixed_order
from mrl.modeling.token_batch import TokenBatch, make_token_batch
from mrl.system.memory import claim
from mrl.system.transfers import to_device, to_host
from mrl.types import Sample, TrainBatch
from mrl.weights.sharded import is_sharded, whole

MAX_SKIPPED_IN_A_ROW = 3


class Updates:
    """Changes the policy."""

    def __init__(
        self,
        config: TrainingConfig,
        objective: Objective,
        passes: Passes,
        optimizer: Any,
        scheduler: Any,
        *,
        parameters: list[torch.nn.Parameter],
        probe: MismatchProbe,
        compiled: CompiledLayers | None,
    ) -> None:
        self.config, self.objective, self.passes = config, objective, passes
        self.optimizer, self.scheduler, self.parameters = optimizer, scheduler, parameters
        self.probe, self.compiled = probe, compiled
        self.model, self.world, self.device = passes.model, passes.world, passes.device
        self.dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in self.model.modules())
        self.skipped_in_a_row = 0
        self.keep_gradient_norms = False
        self.gradient_norms: dict[str, float] = {}
        """By parameter, before clipping, of the last update; only while `keep_gradient_norms` is set."""
        self.old_logprobs: list[list[float]] = []
        """Of the last step's samples, in their order: the policy's logprobs before the step's updates."""

    def train(self, batch: TrainBatch, comparison: Comparison) -> dict[str, float]:
        """`num_iterations` updates on a batch that has samples. Returns the step's metrics. Raises TrainingError."""
        self.old_logprobs = []
        tokens = make_token_batch(batch, self.device, comparison.version)
        micro_batches = self.passes.micro_batches(batch.samples)
        entropy_BT = None
        if self.objective.needs_entropies or self.dropout:
            tokens.old_logprobs_BT, entropy_BT = self.passes.old_policy(tokens, micro_batches)
        self.objective.prepare(tokens, batch, entropy_BT)
        parts = [tokens.take(part.index) if part.counts else tokens.take(part.index).silent() for part in micro_batches]
        for part in parts:
            if self.objective.kl_in_loss and part.ref_logprobs_BT is None:
                part.ref_logprobs_BT = self.passes.reference_policy(part)
        metrics = StepMetrics(comparison.moved, self.world)
        all_parts = functools.partial(self._all_parts, tokens, micro_batches, parts)
        for _ in range(self.config.num_iterations):
            self.update(parts, metrics, all_parts)
        found, old_logprobs = metrics.summary_with([_sampled(part) for part in all_parts()])
        self.old_logprobs = self._by_sample(batch.samples, micro_batches, old_logprobs)
        return found | {"train/learning_rate": float(self.scheduler.get_last_lr()[0])}

    def pass_over(self) -> dict[str, float]:
        """A step without samples: no update, but the schedule advances."""
        self.old_logprobs = []
        for _ in range(self.config.num_iterations):
            self._advance_schedule()
        rate = float(self.scheduler.get_last_lr()[0])
        return {"train/tokens": 0.0, "train/updates_skipped": 0.0, "train/learning_rate": rate}

    def update(self, parts: list[TokenBatch], metrics: StepMetrics, all_parts: Callable[[], list[TokenBatch]]) -> None:
        """parts: this rank's micro-batches. all_parts: gives every rank's."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device)
        with fixed_order(self.device), self.compiled.active() if self.compiled else contextlib.nullcontext():
            for part in parts:
                part_loss = self.objective.part_loss(part, *self.passes.trained(part), metrics)
                part_loss.backward()
                loss += part_loss.detach()
        for part in parts:  # the first update's own forward pass gave the old policy's logprobs
            if part.old_logprobs_BT is None:
                part.old_logprobs_BT = part.new_logprobs_BT
        if not is_sharded(self.model):
            sum_gradients(self.world, self.parameters)
        if self.keep_gradient_norms:
            named = ((name, p.grad) for name, p in self.model.named_parameters())
            norms = {name: whole(grad.norm()) for name, grad in named if grad is not None}
            values = (value.item() for value in to_host(*norms.values()))
            self.gradient_norms = dict(zip(norms, values, strict=True))
        norm = clip_gradients(self.parameters, self.config.max_grad_norm)
        total, grad_norm = metrics.update(loss, norm)
        self.probe.examine(self.model, all_parts, metrics.unexplained_gap())
        self.model.eval()
        finite = math.isfinite(total) and math.isfinite(grad_norm)
        if finite:
            self.optimizer.step()
            claim(self.optimizer, self.device, 0)  # from now on its state is allocated
        self._advance_schedule()
        self.optimizer.zero_grad(set_to_none=True)
        metrics.skipped += not finite
        self._watch_for_divergence(finite, total, grad_norm)

    # --- inner ------------------------------------------------------------------------------------------------------

    def _all_parts(
        self, tokens: TokenBatch, micro_batches: list[MicroBatch], parts: list[TokenBatch]
    ) -> list[TokenBatch]:
        """Every rank's micro-batches, with the old policy's logprobs."""
        if self.world.size == 1:
            return parts
        old_BT = torch.zeros_like(tokens.mask_BT)
        for micro_batch, part in zip(micro_batches, parts, strict=True):
            if micro_batch.counts and part.old_logprobs_BT is not None:
                place = (to_device(self.device, micro_batch.index), slice(part.mask_BT.shape[1]))
                old_BT[place] = part.old_logprobs_BT
        return [replace(tokens, old_logprobs_BT=self.world.total(old_BT), layout=None)]

    def _by_sample(
        self, samples: list[Sample], micro_batches: list[MicroBatch], parts: list[Tensor]
    ) -> list[list[float]]:
        """parts: a value for each token of every micro-batch in `_all_parts`, on the host; B×T each."""
        rows = [part.index for part in micro_batches] if self.world.size == 1 else [list(range(len(samples)))]
        found: list[list[float]] = [[] for _ in samples]
        for index, values_BT in zip(rows, parts, strict=True):
            for at, values in zip(index, values_BT.tolist(), strict=True):
                found[at] = values[: len(samples[at].completion_ids)]
        return found

    def _advance_schedule(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns when the first update was skipped
            self.scheduler.step()

    def _watch_for_divergence(self, finite: bool, loss: float, grad_norm: float) -> None:
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"{self.skipped_in_a_row} updates in a row had no finite loss or gradient (loss {loss}, gradient norm "
                f"{grad_norm}). Lower learning_rate (now {self.config.learning_rate}) or max_grad_norm (now "
                f"{self.config.max_grad_norm}), and look at train/ratio_max and train/logprob_gap_max before it."
            )


def _sampled(part: TokenBatch) -> Tensor:
    """The old policy's logprobs of the tokens the policy sampled; B×T, 0 elsewhere."""
    assert part.old_logprobs_BT is not None
    return torch.where(part.mask_BT > 0, part.old_logprobs_BT, 0.0).float()
