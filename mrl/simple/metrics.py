"""The metrics of TRL's trainers under mrl's names, and which a run in simple mode can have."""

from __future__ import annotations

from collections.abc import Sequence

from mrl.experience.metric_names import held_out_names, rollout_names
from mrl.rewards.base import Reward
from mrl.simple.trainers import TrainerSpec

METRICS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "entropy": "train/entropy",
    "kl": "train/kl",
    "clip_ratio/low_mean": "train/clipped_low_fraction",
    "clip_ratio/high_mean": "train/clipped_high_fraction",
}
"""TRL's names and mrl's (docs/metrics.md) of the same quantities; others appear under `trl/`."""
RECORDED_ELSEWHERE = ("epoch", "reward", "reward_std", "frac_reward_zero_std", "step_time", "total_flos")


def metric_names(spec: TrainerSpec, rewards: Sequence[Reward], *, evaluates: bool) -> set[str]:
    """Every name that such a run can have, but for what reward functions log; `trl/` and, where the trainer learns from
    examples, `eval/` stand for whatever it reports there. evaluates: there are held-out tasks."""
    names = {*METRICS.values(), "rollout/epoch", "time/train", "time/step", "trl/"}
    if spec.online:
        names |= rollout_names(rewards) | {"rollout/tokens", "rollout/tokens_per_second"}
        names |= {"time/generate", "time/reward"}
    if not evaluates:
        return names
    return names | (held_out_names(rewards) if spec.online else {"eval/", "eval/loss", "time/eval"})
