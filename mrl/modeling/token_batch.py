"""A train batch as tensors: right-padded rows that can be cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.sampling_estimates import SamplingFilter
from mrl.system.transfers import to_device
from mrl.types import Sample, TrainBatch

NO_FILTER = SamplingFilter()


@dataclass
class TokenBatch:
    """A train batch, or a micro-batch of it, as tensors: B rows of L tokens, at most T of them completion tokens."""

    samples: list[Sample]
    ids_BL: Tensor
    completion_BT: Tensor
    mask_BT: Tensor
    advantages_BT: Tensor
    sampler_logprobs_BT: Tensor
    temperature: float
    weights_BT: Tensor
    old_logprobs_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    new_logprobs_BT: Tensor | None = None
    """From the latest training forward pass, detached."""
    kept_BT: Tensor | None = None
    """1 on the tokens whose policy loss counts: all of `mask_BT`, or some of them."""
    entropy_weights_BT: Tensor | None = None
    compared_BT: Tensor | None = None
    """True where the trainer's logprob is compared with the sampler's: tokens of one policy version. None = nowhere."""
    sampling_filter: SamplingFilter = NO_FILTER
    """The configured one."""
    layout: Any = None
    """Cached by the first forward pass (mrl.modeling.forward.Layout) for the next ones."""

    def take(self, index: list[int]) -> TokenBatch:
        """The rows with these indices, trimmed to the longest of them."""
        index_B = to_device(self.mask_BT.device, index)
        samples = [self.samples[i] for i in index]
        longest = max(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
        completion = max(len(s.completion_ids) for s in samples)
        trimmed = {
            name: value[index_B] if value.dim() == 1 else value[index_B, : longest if name == "ids_BL" else completion]
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, samples=samples, layout=None, **trimmed)  # type: ignore[arg-type]

    def silent(self) -> TokenBatch:
        """The same rows, of which no token counts: they are computed because another rank computes others."""
        nothing = {
            name: torch.zeros_like(value)
            for name in ("mask_BT", "weights_BT", "kept_BT", "entropy_weights_BT", "compared_BT")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **nothing)  # type: ignore[arg-type]


def make_token_batch(batch: TrainBatch, device: torch.device, version: int | None = None) -> TokenBatch:
    """version: the policy version whose tokens are compared with the sampler; None = compare none."""
    samples = batch.samples
    longest = max(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
    completion = max(len(s.completion_ids) for s in samples)

    def table(values: list[list[Any]], width: int, dtype: torch.dtype) -> Tensor:
        filled = torch.zeros(len(values), width, dtype=dtype)
        for row, value in enumerate(values):
            filled[row, : len(value)] = torch.tensor(value, dtype=dtype)
        return to_device(device, filled)

    mask_BT = table([s.mask for s in samples], completion, torch.float32)
    compared_BT = None
    if version is not None:
        compared_BT = table([_is_version(s, version) for s in samples], completion, torch.bool) & mask_BT.bool()
    reference = [s.reference_logprobs for s in samples]
    return TokenBatch(
        samples=samples,
        ids_BL=table([s.prompt_ids + s.completion_ids for s in samples], longest, torch.long),
        completion_BT=table([s.completion_ids for s in samples], completion, torch.long),
        mask_BT=mask_BT,
        advantages_BT=_advantages(batch, table, mask_BT),
        sampler_logprobs_BT=table([s.logprobs for s in samples], completion, torch.float32),
        temperature=batch.temperature,
        weights_BT=torch.empty_like(mask_BT),
        compared_BT=compared_BT,
        sampling_filter=SamplingFilter(batch.top_p, batch.top_k, batch.min_p),
        ref_logprobs_BT=None
        if any(values is None for values in reference)
        else table([values or [] for values in reference], completion, torch.float32),
    )


def versions_of(sample: Sample) -> set[int]:
    """Policy versions that sampled its tokens."""
    given = sample.policy_version
    return {given} if isinstance(given, int) else set(given)


def _is_version(sample: Sample, version: int) -> list[bool]:
    given = sample.policy_version
    return [given == version] * len(sample.completion_ids) if isinstance(given, int) else [v == version for v in given]


def _advantages(batch: TrainBatch, table: Callable[..., Tensor], mask_BT: Tensor) -> Tensor:
    if not any(isinstance(advantage, list) for advantage in batch.advantages):
        by_sample_B = to_device(mask_BT.device, batch.advantages, torch.float32)
        return by_sample_B[:, None].expand_as(mask_BT)
    by_token = [
        advantage if isinstance(advantage, list) else [advantage] * len(sample.completion_ids)
        for advantage, sample in zip(batch.advantages, batch.samples, strict=True)
    ]
    return table(by_token, mask_BT.shape[1], torch.float32)
