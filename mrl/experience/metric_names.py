"""Which metrics a run can record, as far as that is known before it begins (docs/metrics.md says what they are)."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError
from mrl.rewards.base import Reward
from mrl.types import TURN_COUNTS

SHOWN = 3
"""How many of the nearest names an error lists."""


def metric_names(
    config: OrchestratorConfig, rewards: Sequence[Reward], *, evaluates: bool, of_source: Collection[str] = ()
) -> set[str]:
    """Every name that a run of these options can have, but for what `loggers` log.

    evaluates: there are held-out tasks. of_source: what the rollout source counts itself, without `rollout/`. What
    depends on the loss (`train/ratio` …) counts as if every loss had it: other packages add losses, and only they know.
    """
    algorithm, overlap = config.algorithm, config.overlap
    names = rollout_names(rewards) | {"rollout/epoch", "rollout/tokens", "rollout/tokens_per_second"}
    names |= {"rollout/prefill_tokens", "rollout/prefill_saved_fraction"}
    names |= _trained_names(config)
    names |= {"sync/policy_version", "sync/bytes", "sync/replaced_workers"}
    names |= {f"time/{part}" for part in ("wait", "generate", "reward", "reference", "train", "sync", "step")}
    terms = {
        "overlong": algorithm.soft_punish_cache,
        "length": algorithm.length_penalty,
        "kl": algorithm.beta and algorithm.kl_in == "reward",
    }
    shaped = {f"reward/{term}_shaping" for term, used in terms.items() if used}
    names |= shaped | ({"reward/shaped_mean"} if shaped else set())
    if algorithm.zero_variance_groups != "keep":
        names |= {"rollout/groups", "rollout/groups_dropped"}
    if algorithm.zero_variance_groups == "resample":
        names |= {"rollout/resamples"}
    if overlap.async_mode != "off" or overlap.by_group:
        names |= {"rollout/staleness_mean", "rollout/staleness_max", "rollout/in_flight_groups"}
        names |= {f"rollout/{what}_groups" for what in ("dropped", "unused", "stopped")}
    names |= held_out_names(rewards) if evaluates else set()
    if config.rollout.source != "single_turn":
        places = ("rollout", "eval") if evaluates else ("rollout",)
        names |= {f"{where}/{name}" for where in places for name in TURN_COUNTS}
    names |= {f"rollout/{name}" for name in of_source}
    if config.rollout.environment_factory is not None:  # rewards under the classes' names
        names |= {"reward/", "eval/"} if evaluates else {"reward/"}
    return names


def rollout_names(rewards: Sequence[Reward], prefix: str = "reward") -> set[str]:
    """Of rollouts that were scored. prefix: as `mrl.experience.metrics.rollout_metrics` takes it."""
    where = "rollout" if prefix == "reward" else prefix
    names = {f"{prefix}/{what}" for what in ("mean", "std", "pass_rate", "zero_variance_groups")}
    names |= {f"{prefix}/{reward.name}/{what}" for reward in rewards for what in ("mean", "std")}
    lengths = ("completion_length_mean", "completion_length_max", "truncated_fraction", "overlong")
    names |= {f"{where}/{what}" for what in ("failed_fraction", *lengths)}
    logged = {name for reward in rewards for name in getattr(reward, "logged", None) or ()}
    if prefix == "reward":
        return names | logged
    return names | {f"{prefix}/{name.removeprefix('reward/')}" for name in logged if name.startswith("reward/")}


def held_out_names(rewards: Sequence[Reward]) -> set[str]:
    """Of an evaluation's rollouts."""
    return rollout_names(rewards, "eval") | {"time/eval"}


def loggers(rewards: Iterable[Reward]) -> list[str]:
    """The rewards that may log metrics of any name: functions that can reach `log_metric`, and other packages'."""
    return [reward.name for reward in rewards if getattr(reward, "logged", None) is None]


def check_best_metric(
    wanted: str | None, names: Collection[str], loggers: Sequence[str], *, evaluates: bool
) -> list[str]:
    """Raise ConfigError when `best_metric` (`wanted`) names what no step of the run can have.

    names: what it can have; one that ends in `/` stands for all below it. loggers: who may log further ones: then a
    name that is not known is only doubtful, and a notice is returned. evaluates: there are held-out tasks.
    """
    if wanted is None:
        return []
    name = wanted.removeprefix("-")
    if name in names or any(open_end.endswith("/") and name.startswith(open_end) for open_end in names):
        return []
    if name.startswith("eval/") and not evaluates:
        raise ConfigError(
            f"best_metric: {wanted} is measured on held-out tasks, and there are none; set eval_split or eval_dataset, "
            "or use a metric of the training tasks, e.g. reward/mean"
        )
    near = " and ".join(_nearest(name, names))
    if loggers:
        return [
            f"best_metric: {name!r} is no metric of mrl's (the nearest: {near}), so {' or '.join(loggers)} has to log "
            "it with log_metric."
        ]
    raise ConfigError(
        f"best_metric: with these options no step has a metric {name!r}; the nearest: {near} (docs/metrics.md lists "
        "them all, and says when each is measured)"
    )


def _nearest(name: str, names: Collection[str]) -> list[str]:
    """By the whole name or, for `loss`, by its last part."""
    close = difflib.get_close_matches(name, names, n=SHOWN)
    ends = difflib.get_close_matches(name, {known.rpartition("/")[2] for known in names}, n=1, cutoff=0.8)
    return close or sorted(known for known in names if known.rpartition("/")[2] in ends)[:SHOWN] or ["reward/mean"]


def _trained_names(config: OrchestratorConfig) -> set[str]:
    """Of the update (`mrl.actor.step_metrics`)."""
    algorithm = config.algorithm
    names = {"loss", "grad_norm", "updates_skipped", "tokens", "learning_rate", "entropy", "importance_weight"}
    names |= {"ratio", "ratio_max", "clipped_low_fraction", "clipped_high_fraction", "effective_sample_fraction"}
    names |= {"logprob_gap", "logprob_gap_max", "logprob_gap_unexplained", "sampler_kl"}
    if algorithm.importance_sampling != "none":
        names |= {"importance_dropped_fraction"}
    if algorithm.importance_sampling.endswith("masked"):
        names |= {"importance_masked_fraction"}
    if algorithm.top_entropy_quantile < 1:
        names |= {"top_entropy_fraction"}
    if algorithm.beta and algorithm.kl_in == "loss":
        names |= {"kl"}
    return {f"train/{name}" for name in names}
