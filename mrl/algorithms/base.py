"""The interface of a loss: a per-token objective, and how tokens are weighted in the batch.

The two are separate so that a batch may be split into any micro-batches: the weights come from the whole batch, each
micro-batch contributes `sum(loss_BT * weight_BT)`, and the contributions add up to the loss of the batch.

Shapes: B sequences, T completion tokens (right-padded; `mask_BT` is 1 on tokens the policy sampled).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class LossTerms:
    """The inputs of every loss."""

    logprobs_BT: Tensor
    """Of the policy being trained; the gradient flows through it."""
    old_logprobs_BT: Tensor
    """Of the policy before this batch's first update."""
    advantages_BT: Tensor
    """Broadcast over the tokens of a sequence, unless they differ by token."""
    mask_BT: Tensor
    correction_BT: Tensor | None = None
    """Weight of the sampler/trainer correction (mrl.mismatch.correction), for losses that apply it themselves."""


Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class LossSettings:
    """The losses' knobs; each loss reads its own."""

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    delta: float | None = None
    level: Level = "token"
    """Whether the ratio π/π_old is a token's or a sequence's (mrl.algorithms.ratio)."""
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0


@dataclass(frozen=True)
class PolicyLoss:
    """A per-token loss before aggregation, and details for the metrics; what is None is not reported."""

    loss_BT: Tensor
    ratio_BT: Tensor | None = None
    """Detached."""
    clipped_low_BT: Tensor | None = None
    """1 where the lower clip removed the gradient."""
    clipped_high_BT: Tensor | None = None


Normalization = Literal["sequences", "tokens", "max_length", "sequence_sums"]
PerToken = Callable[[LossTerms, LossSettings], PolicyLoss]


@dataclass(frozen=True)
class Loss:
    """One member of `LOSSES`."""

    per_token: PerToken
    normalization: Normalization = "tokens"
    """sequences: mean of each rollout's mean; tokens: mean over all tokens; max_length: sum over a constant length;
    sequence_sums: mean of each rollout's sum. A rollout of several samples is one sequence."""
    options: tuple[str, ...] = ()
    """Options of `AlgorithmConfig` it reads. Setting one that it does not read is refused."""
    levels: tuple[Level, ...] = ("token",)
    """What `importance_sampling_level` may be; the first is the default."""
    corrects: bool = False
    """It applies `correction_BT` itself; otherwise the per-token loss is multiplied by it."""
    reuse: bool = True
    """It may be used for more than one update per batch (`num_iterations`)."""


def token_weights(
    mask_BT: Tensor,
    normalization: Normalization,
    *,
    max_completion_length: int,
    num_sequences: int,
    num_tokens: int,
    rollout_tokens_B: Tensor | None = None,
) -> Tensor:
    """Weight of each token in a batch's loss; B×T, zero outside the mask.

    num_sequences, num_tokens: rollouts and tokens of the whole batch before it is split, including samples that were
    left out because their loss is 0 (no advantage, or too long): they count in the averages, as in TRL.
    rollout_tokens_B: sampled tokens of each sample's rollout, where rollouts may have several; None = those in its row.
    """
    mask_BT = mask_BT.float()
    if normalization == "tokens":
        return mask_BT / max(num_tokens, 1)
    if normalization == "sequences":
        tokens_B = mask_BT.sum(dim=1) if rollout_tokens_B is None else rollout_tokens_B
        return mask_BT / tokens_B[:, None].clamp(min=1) / num_sequences
    if normalization == "sequence_sums":
        return mask_BT / num_sequences
    return mask_BT / (num_sequences * max_completion_length)
