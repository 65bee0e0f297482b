"""What a step minimises: policy loss with importance weights, KL and entropy terms, over any micro-batch split."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.actor.step_metrics import StepMetrics
from mrl.algorithms import LOSSES
from mrl.algorithms.base import LossSettings, LossTerms, token_weights
from mrl.algorithms.entropy import top_entropy_mask
from mrl.algorithms.kl import KLEstimator, estimate_kl
from mrl.algorithms.ratio import importance_ratio
from mrl.config import AlgorithmConfig
from mrl.mismatch import importance_weights, log_importance, unexplained_gap, weighed_once
from mrl.modeling.token_batch import TokenBatch
from mrl.system.transfers import to_device
from mrl.types import TrainBatch

CISPO_LARGEST_RATIO = 5.0
"""ScaleRL's (arXiv 2510.13786)."""


class Objective:
    """The loss of a batch as a weighted sum over its tokens.

        L = Σ weight (correction · loss + β · KL) - entropy_coef · mean entropy

    `prepare` fixes the weights, and which tokens count, for the whole batch. So the micro-batch losses that `part_loss`
    returns add up to L whatever the split.
    """

    def __init__(self, config: AlgorithmConfig, num_iterations: int = 1) -> None:
        self.config = config
        self.num_iterations = num_iterations
        self.loss = LOSSES.get(config.loss_type)
        self.settings = loss_settings(config)

    @property
    def kl_in_loss(self) -> bool:
        """Whether `part_loss` needs `ref_logprobs_BT`."""
        return self.config.beta > 0 and self.config.kl_in == "loss"

    @property
    def needs_entropies(self) -> bool:
        """Whether `prepare` needs the entropies of the whole batch."""
        return self.config.top_entropy_quantile < 1

    @property
    def entropy_grad(self) -> bool:
        """Whether `part_loss` needs an entropy with gradient."""
        return self.config.entropy_coef != 0

    def prepare(self, tokens: TokenBatch, batch: TrainBatch, entropy_BT: Tensor | None = None) -> None:
        """Set the weights of the batch's tokens. entropy_BT: of the policy before the step, where `needs_entropies`."""
        tokens.weights_BT = token_weights(
            tokens.mask_BT,
            self.loss.normalization,
            max_completion_length=self.config.max_completion_length,
            num_sequences=batch.num_sequences,
            num_tokens=batch.num_tokens,
            rollout_tokens_B=None
            if batch.rollout_tokens is None
            else to_device(tokens.mask_BT.device, batch.rollout_tokens, torch.float32),
        )
        tokens.kept_BT = tokens.mask_BT
        if self.needs_entropies:
            assert entropy_BT is not None
            tokens.kept_BT = top_entropy_mask(entropy_BT, tokens.mask_BT, self.config.top_entropy_quantile).float()
        if self.entropy_grad:
            tokens.entropy_weights_BT = self.config.entropy_coef * tokens.kept_BT / tokens.kept_BT.sum().clamp(min=1)

    def part_loss(self, part: TokenBatch, logprobs_BT: Tensor, entropy_BT: Tensor, metrics: StepMetrics) -> Tensor:
        """A micro-batch's share of the batch's loss, a scalar. logprobs_BT, entropy_BT: of the policy being trained."""
        detached_BT = logprobs_BT.detach()
        trainer_BT = detached_BT if part.old_logprobs_BT is None else part.old_logprobs_BT
        # With one update per batch the old policy is this one: the ratio is 1, also where dropout differs.
        old_BT = detached_BT if self.num_iterations == 1 else trainer_BT
        correction_BT = importance_weights(
            trainer_BT,
            part.sampler_logprobs_BT,
            part.mask_BT,
            self.config.importance_sampling,
            self.config.importance_sampling_cap,
            self.config.importance_sampling_floor,
        )
        terms = LossTerms(logprobs_BT, old_BT, part.advantages_BT, part.mask_BT, correction_BT)
        policy = self.loss.per_token(terms, self.settings)
        loss_BT = policy.loss_BT if self.loss.corrects else policy.loss_BT * correction_BT
        values = {
            "entropy": entropy_BT.detach(),
            "ratio": policy.ratio_BT,
            "clipped_low_fraction": policy.clipped_low_BT,
            "clipped_high_fraction": policy.clipped_high_BT,
            "importance_weight": correction_BT,
            "logprob_gap": (trainer_BT - part.sampler_logprobs_BT).abs(),
            "sampler_kl": part.sampler_logprobs_BT - trainer_BT,
        }
        self._compare_with_sampler(part, trainer_BT, correction_BT, metrics)
        if self.config.importance_sampling.endswith("masked"):
            values["importance_masked_fraction"] = correction_BT == 0
        assert part.kept_BT is not None  # set by `prepare`
        if self.needs_entropies:
            loss_BT = torch.where(part.kept_BT > 0, loss_BT, 0.0)
            values["top_entropy_fraction"] = part.kept_BT
        if self.kl_in_loss:
            assert part.ref_logprobs_BT is not None
            kl_BT = estimate_kl(logprobs_BT, part.ref_logprobs_BT, kl_estimator(self.config))
            values["kl"] = kl_BT.detach()
            if self.config.use_bias_correction_kl:
                kl_BT = kl_BT * importance_ratio(terms, self.settings.level)
            loss_BT = loss_BT + self.config.beta * kl_BT
        metrics.tokens(part.mask_BT, **{name: value for name, value in values.items() if value is not None})
        # Multiplying by the weights is not enough: padding may hold anything, and 0 x inf is NaN.
        loss = torch.where(part.weights_BT > 0, loss_BT, 0.0).mul(part.weights_BT).sum()
        if part.entropy_weights_BT is not None:
            loss = loss - torch.where(part.kept_BT > 0, entropy_BT, 0.0).mul(part.entropy_weights_BT).sum()
        return loss

    def _compare_with_sampler(
        self, part: TokenBatch, trainer_BT: Tensor, correction_BT: Tensor, metrics: StepMetrics
    ) -> None:
        """Record the importance weights' statistics and the unexplained part of the logprob gap."""
        correction = self.config.importance_sampling
        log_weights_BT = log_importance(trainer_BT, part.sampler_logprobs_BT, part.mask_BT, correction)
        once_BT = weighed_once(part.mask_BT, correction)
        metrics.importance(log_weights_BT, None if correction == "none" else correction_BT, once_BT)
        if part.compared_BT is not None:
            gap_BT = unexplained_gap(trainer_BT, part.sampler_logprobs_BT, part.sampling_filter.largest_gain)
            metrics.unexplained(gap_BT, part.compared_BT)


def loss_settings(config: AlgorithmConfig) -> LossSettings:
    """The configured loss's settings."""
    default_high = CISPO_LARGEST_RATIO if config.loss_type == "cispo" else config.epsilon
    return LossSettings(
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon_high if config.epsilon_high is not None else default_high,
        sapo_temperature_pos=config.sapo_temperature_pos,
        sapo_temperature_neg=config.sapo_temperature_neg,
        delta=config.delta,
        level=config.importance_sampling_level or LOSSES.get(config.loss_type).levels[0],
        vespo_k_pos=config.vespo_k_pos,
        vespo_lambda_pos=config.vespo_lambda_pos,
        vespo_k_neg=config.vespo_k_neg,
        vespo_lambda_neg=config.vespo_lambda_neg,
    )


def kl_estimator(config: AlgorithmConfig) -> KLEstimator:
    """The configured estimator; by default k3 for a KL term in the loss, k1 for one in the reward."""
    return config.kl_estimator or ("k3" if config.kl_in == "loss" else "k1")
