"""Forward passes over a step's samples, micro-batch by micro-batch, under the policy or the reference model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.actor.micro_batches import MicroBatch, by_count, by_tokens, of_rank
from mrl.actor.objective import Objective, kl_estimator
from mrl.actor.parallel.world import World
from mrl.algorithms.kl import estimate_kl
from mrl.modeling.evaluating import evaluating
from mrl.modeling.forward import Forward
from mrl.modeling.token_batch import TokenBatch, make_token_batch
from mrl.system.transfers import to_device
from mrl.types import Sample, TrainBatch


class Passes:
    """Several ranks share a step's samples: each computes its own, and gets the results of all.

    reference: None = the policy without its adapter. into: how many micro-batches a step is split into; 1 = as many as
    `micro_batch_tokens` demand.
    """

    def __init__(
        self,
        forward: Forward,
        model: Any,
        reference: Any | None,
        objective: Objective,
        *,
        world: World,
        device: torch.device,
        micro_batch_tokens: int,
        into: int,
    ) -> None:
        self.forward, self.model, self.reference, self.objective = forward, model, reference, objective
        self.world, self.device, self.micro_batch_tokens, self.into = world, device, micro_batch_tokens, into

    def micro_batches(self, samples: list[Sample]) -> list[MicroBatch]:
        """This rank's, as many as every rank's."""
        packs = self.forward.packs

        def split(own: Sequence[Sample]) -> list[list[int]]:
            if self.into > 1:
                return by_count(own, self.into)
            return by_tokens(own, self.micro_batch_tokens, shared_prompts=packs)

        return of_rank(samples, self.world.rank, self.world.size, split, shared_prompts=packs)

    def trained(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the tokens the policy sampled, at the sampler's temperature; B×T, 0 elsewhere. With
        gradients."""
        logprobs_BT, entropy_BT = self.forward.logprobs(self.model, tokens, entropy_grad=self.objective.entropy_grad)
        tokens.new_logprobs_BT = logprobs_BT.detach()
        return logprobs_BT, entropy_BT

    @torch.no_grad()
    def policy(self, tokens: TokenBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """The same without gradients and dropout."""
        return self._under(self.model, tokens, entropy=entropy)

    @torch.no_grad()
    def reference_policy(self, tokens: TokenBatch) -> Tensor:
        """Logprobs under the reference model; B×T."""
        if self.reference is not None:
            return self._under(self.reference, tokens)[0]
        with self.model.disable_adapter():
            return self._under(self.model, tokens)[0]

    def old_policy(self, tokens: TokenBatch, micro_batches: list[MicroBatch]) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the whole batch before its first update; B×T each."""
        logprobs_BT, entropy_BT = torch.zeros_like(tokens.mask_BT), torch.zeros_like(tokens.mask_BT)
        for micro_batch in micro_batches:
            part = tokens.take(micro_batch.index)
            place = (to_device(self.device, micro_batch.index), slice(part.mask_BT.shape[1]))
            found = self.policy(part, entropy=True)
            if micro_batch.counts:
                logprobs_BT[place], entropy_BT[place] = found
        return self.world.total(logprobs_BT), self.world.total(entropy_BT)

    def reference_logprobs(self, samples: list[Sample], temperature: float) -> list[list[float]]:
        """Of each sample's completion, 0 where the policy did not sample."""
        tokens = self._tokens(samples, temperature)
        logprobs_BT = torch.zeros_like(tokens.mask_BT)
        for part in self.micro_batches(samples):
            part_BT = self.reference_policy(tokens.take(part.index))
            if part.counts:
                logprobs_BT[to_device(self.device, part.index), : part_BT.shape[1]] = part_BT
        pairs = zip(samples, self.world.total(logprobs_BT).tolist(), strict=True)
        return [values[: len(sample.completion_ids)] for sample, values in pairs]

    def reference_kl(self, samples: list[Sample], temperature: float) -> list[float]:
        """Of each sample, in nats: the sum of the estimates at its sampled tokens."""
        tokens = self._tokens(samples, temperature)
        kl_B = torch.zeros(len(samples), dtype=torch.float64, device=self.device)
        for micro_batch in self.micro_batches(samples):
            part = tokens.take(micro_batch.index)
            reference_BT = self.reference_policy(part) if part.ref_logprobs_BT is None else part.ref_logprobs_BT
            kl_BT = estimate_kl(self.policy(part)[0], reference_BT, kl_estimator(self.objective.config))
            if micro_batch.counts:
                kl_B[to_device(self.device, micro_batch.index)] = torch.where(part.mask_BT > 0, kl_BT, 0.0).sum(
                    dim=1, dtype=torch.float64
                )
        kl: list[float] = self.world.total(kl_B).tolist()
        return kl

    def _tokens(self, samples: list[Sample], temperature: float) -> TokenBatch:
        return make_token_batch(TrainBatch(samples, [0.0] * len(samples), 1, 1, temperature), self.device)

    def _under(self, model: Any, tokens: TokenBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor]:
        with evaluating(model):
            return self.forward.logprobs(model, tokens, entropy=entropy)
