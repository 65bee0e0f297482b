"""Options of the algorithm: loss, advantage, KL, entropy, corrections. docs/algorithms.md has the formulas."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mrl.algorithms import ADVANTAGES, LOSSES
from mrl.config.section import Section, changed_options, refuse_changed
from mrl.errors import ConfigError
from mrl.registry import Registry

OF_LOSSES = (
    *("epsilon", "epsilon_high", "delta", "importance_sampling_level"),
    *("sapo_temperature_pos", "sapo_temperature_neg"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)
"""Options that a loss reads or does not; each says which in its `options`."""
OF_ADVANTAGES = ("scale_rewards", "normalize_advantages", "discount")
"""The same for advantages."""


class AlgorithmConfig(Section):
    """What is learned from rollouts: loss, advantage, and what keeps the policy in bounds."""

    loss_type: str = "dapo"
    """grpo, dapo, dr_grpo, bnpo, cispo, sapo, gspo, luspo, vespo or reinforce, or one registered by another package;
    docs/algorithms.md says when to use which."""
    epsilon: float = Field(0.2, gt=0)
    """Clipping: the ratio may fall to 1 - epsilon. `gspo`'s ratios lie closer to 1 (its paper: 3e-4)."""
    epsilon_high: float | None = Field(None, gt=0)
    """Clipping: the ratio may rise to 1 + epsilon_high; None = epsilon (DAPO's paper: 0.28, GSPO's: 4e-4). For `cispo`
    it is the largest ratio itself; None = 5.0 (ScaleRL)."""
    delta: float | None = Field(None, gt=1)
    """Dual clip: the largest ratio where the advantage is negative, above 1 + epsilon_high (INTELLECT-2: 4.0); None =
    no bound there."""
    importance_sampling_level: Literal["token", "sequence"] | None = None
    """Whether the ratio to the old policy is a token's, or the geometric mean over a sequence (GSPO); None = the loss's
    own: sequence for `gspo` and `luspo`, else token."""
    sapo_temperature_pos: float = Field(1.0, gt=0)
    """`sapo`: sharpness of the soft gate where the advantage is positive."""
    sapo_temperature_neg: float = Field(1.05, gt=0)
    """`sapo`: sharpness of the soft gate where the advantage is negative."""
    vespo_k_pos: float = Field(2.0, ge=0)
    """`vespo`: power of a sequence's weight where the advantage is positive: how fast small weights fall to 0."""
    vespo_lambda_pos: float = Field(3.0, ge=0)
    """`vespo`: rate of decay where the advantage is positive: how fast large weights fall to 0."""
    vespo_k_neg: float = Field(3.0, ge=0)
    """`vespo`: power where the advantage is negative."""
    vespo_lambda_neg: float = Field(2.0, ge=0)
    """`vespo`: rate of decay where the advantage is negative."""

    advantage_type: str = "group"
    """group, rloo, reinforce_pp, reinforce_pp_baseline, maxrl, gdpo, or for step rewards turn, token or process, or one
    registered by another package."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What an advantage is divided by: its group's standard deviation, the batch's, or nothing. The group's mean is
    subtracted in every case."""
    normalize_advantages: bool = False
    """`rloo`: give the batch's advantages mean 0 and standard deviation 1."""
    discount: float = Field(1.0, ge=0, le=1)
    """`turn`, `token`, `process`: what a later reward is multiplied by for each turn (`token`: token) before it."""
    zero_variance_groups: Literal["keep", "drop", "resample"] = "keep"
    """Groups whose rollouts all earned the same: count in the loss's averages, are left out, or are replaced by
    attempts at further tasks (dynamic sampling, DAPO)."""
    max_resamples: int = Field(3, ge=1)
    """`zero_variance_groups: resample`: rounds of further attempts per step; then it trains on what there is."""
    soft_punish_cache: int = Field(0, ge=0)
    """Tokens before `max_completion_length` over which a penalty rises from 0 to overlong_penalty, full beyond it
    (DAPO's soft overlong punishment: 4096 of 20480); 0 = none."""
    overlong_penalty: float = Field(1.0, gt=0)
    """Subtracted from the reward of a completion of `max_completion_length` tokens, with `soft_punish_cache`."""
    length_penalty: float = Field(0.0, ge=0)
    """Weight of a reward for being shorter than the group's others, between -0.5 and 0.5; a wrong answer earns nothing
    by it (Kimi k1.5); 0 = none."""

    beta: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the reference model (the policy before training); 0 = no reference is kept."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence counts: in each token's loss (GRPO), or summed over a rollout and subtracted from its reward
    (RLOO; costs two forward passes)."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the divergence (Schulman); None = k3 in the loss, k1 in the reward."""
    use_bias_correction_kl: bool = True
    """Multiply the loss's KL term by the ratio to the old policy, which makes its gradient that of the divergence
    (DeepSeek-V3.2); false = GRPO's own."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy per token (nats), subtracted from the loss to keep the policy exploring; 0 = none."""
    top_entropy_quantile: float = Field(1.0, ge=0, le=1)
    """Train only on this share of the step's tokens, those of largest entropy (arXiv 2506.01939: 0.2); 1 = all. Below 1
    it costs a forward pass."""

    importance_sampling: Literal["none", "truncated", "masked", "sequence_truncated", "sequence_masked"] = "truncated"
    """Correction for the difference between sampler and trainer (engine, top-p, min-p …): weigh each token, or each
    sequence, by their probability ratio, clamped to the bounds below (`truncated`) or 0 outside them (`masked`)."""
    importance_sampling_cap: float | None = Field(2.0, gt=0)
    """Upper bound of that ratio; None = none."""
    importance_sampling_floor: float | None = Field(None, gt=0)
    """Lower bound of that ratio; None = none. IcePop is `masked` from 0.5 to 5.0."""
    max_logprob_gap: float | None = Field(0.1, gt=0)
    """Largest mean difference between the sampler's and the trainer's logprobs of a step's tokens, in nats, beyond what
    top-p and its like explain, where both had the same weights (bfloat16: about 0.01). A step above it is warned of
    with its likely causes, a second one in a row stops the run; None = neither."""
    mask_truncated_completions: bool = False
    """Leave completions that hit the token limit out of the loss (they still count in their group's mean)."""
    max_completion_length: int = Field(1024, ge=1)
    """Longest completion that is trained on, in tokens. Unless `max_tokens` says otherwise, sampling stops there."""

    @field_validator("loss_type")
    @classmethod
    def _loss_is_known(cls, value: str) -> str:
        return _known(LOSSES, value)

    @field_validator("advantage_type")
    @classmethod
    def _advantage_is_known(cls, value: str) -> str:
        return _known(ADVANTAGES, value)

    @model_validator(mode="after")
    def _options_of_other_losses(self) -> Self:
        # A member is imported, and torch with it, only where an option makes it necessary.
        changed = changed_options(self, OF_LOSSES)
        if not changed:
            return self
        loss = LOSSES.get(self.loss_type)
        for name in changed:
            if name == "importance_sampling_level":
                if self.importance_sampling_level not in loss.levels:
                    raise ConfigError(
                        f"importance_sampling_level: {self.importance_sampling_level} does not go with loss_type "
                        f"{self.loss_type}, which takes {' or '.join(loss.levels)}"
                    )
            elif name not in loss.options:
                refuse_changed(self, (name,), _readers(LOSSES, name))
        if "epsilon" in loss.options and self.epsilon >= 1:
            raise ConfigError(f"epsilon: {self.epsilon} lets the ratio fall to 0; use a value below 1, e.g. 0.2")
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.delta is not None and self.delta <= 1 + high:
            raise ConfigError(
                f"delta: {self.delta} is not above 1 + epsilon_high ({1 + high}), where positive advantages are "
                "clipped; use a larger one, e.g. 4.0"
            )
        return self

    @model_validator(mode="after")
    def _options_of_other_advantages(self) -> Self:
        changed, shapes = changed_options(self, OF_ADVANTAGES), self._shapes_rewards()
        if not changed and not shapes:
            return self
        advantage = ADVANTAGES.get(self.advantage_type)
        for name in changed:
            if name not in advantage.options:
                refuse_changed(self, (name,), _readers(ADVANTAGES, name))
        if shapes and not advantage.takes_negative:
            raise ConfigError(
                f"{shapes[0]} makes rewards negative, which advantage_type {self.advantage_type} does not take: leave "
                "it out, or use another one, e.g. group"
            )
        return self

    @model_validator(mode="after")
    def _options_of_what_is_off(self) -> Self:
        if self.zero_variance_groups != "resample":
            refuse_changed(self, ("max_resamples",), "zero_variance_groups: resample")
        if self.soft_punish_cache == 0:
            refuse_changed(self, ("overlong_penalty",), "soft_punish_cache above 0")
        if self.soft_punish_cache > self.max_completion_length:
            raise ConfigError(
                f"soft_punish_cache: {self.soft_punish_cache} tokens do not fit before max_completion_length "
                f"({self.max_completion_length}); use fewer, e.g. {max(1, self.max_completion_length // 5)}"
            )
        if self.beta == 0:
            refuse_changed(self, ("kl_in", "kl_estimator", "use_bias_correction_kl"), "beta above 0")
        if self.kl_in == "reward":
            refuse_changed(self, ("use_bias_correction_kl",), "kl_in: loss")
        elif self.kl_estimator == "k1" and not self.use_bias_correction_kl:
            raise ConfigError(
                "kl_estimator: k1 in the loss without use_bias_correction_kl has a gradient whose mean is zero; use "
                "use_bias_correction_kl: true, kl_in: reward, or k2 or k3"
            )
        return self

    @model_validator(mode="after")
    def _correction(self) -> Self:
        if self.importance_sampling == "none":
            refuse_changed(
                self,
                ("importance_sampling_cap", "importance_sampling_floor"),
                "importance_sampling other than none",
            )
            return self
        cap, floor = self.importance_sampling_cap, self.importance_sampling_floor
        if cap is not None and floor is not None and floor >= cap:
            raise ConfigError(f"importance_sampling_floor: {floor} is not below importance_sampling_cap ({cap})")
        if self.importance_sampling.endswith("masked") and cap is None and floor is None:
            raise ConfigError(
                f"importance_sampling: {self.importance_sampling} masks nothing without a bound; set "
                "importance_sampling_cap or importance_sampling_floor"
            )
        if self.importance_sampling.startswith("sequence_") and LOSSES.get(self.loss_type).corrects:
            raise ConfigError(
                f"importance_sampling: {self.importance_sampling} does not go with loss_type {self.loss_type}, which "
                "weighs sequences itself; use truncated or masked"
            )
        return self

    def keeps_samples_without_advantage(self) -> bool:
        """Whether a sample whose advantage is 0 has a part in the loss: KL, entropy, or the entropies' quantile."""
        kl_in_loss = self.beta > 0 and self.kl_in == "loss"
        return kl_in_loss or self.entropy_coef != 0 or self.top_entropy_quantile < 1

    def _shapes_rewards(self) -> list[str]:
        shapes = [name for name in ("soft_punish_cache", "length_penalty") if getattr(self, name)]
        return shapes + (["kl_in: reward"] if self.beta and self.kl_in == "reward" else [])


def _known(registry: Registry[Any], name: str) -> str:
    if name not in registry.names():
        raise ValueError(f"use one of {', '.join(registry.names())}")
    return name


def _readers(registry: Registry[Any], option: str) -> str:
    """What has to be chosen for `option` to have an effect."""
    names = [name for name in registry.names() if option in registry.get(name).options]
    if len(names) == 1:
        return f"{registry.option}: {names[0]}"
    kind = "a clipped" if option in ("epsilon", "delta") else "another"
    return f"{kind} {registry.option} ({', '.join(names)})"
