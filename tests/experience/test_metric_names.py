"""Which names a run's metrics can have, known before it begins."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError
from mrl.experience.metric_names import check_best_metric, loggers, metric_names
from mrl.rewards import resolve_rewards
from mrl.rewards.function_reward import FunctionReward
from mrl.simple.metrics import metric_names as simple_names
from mrl.simple.trainers import TRAINERS


def plain(completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]


def asks(completions: list[str], log_metric: Any) -> list[float]:
    return [0.0 for _ in completions]


def ignores_the_rest(completions: list[str], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def asks_by_name(completions: list[str], log_metric: Any = None, **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def reads_the_rest(completions: list[str], **kwargs: Any) -> list[float]:
    return [len(kwargs["prompts"]) for _ in completions]


def reads_it_within(completions: list[str], **kwargs: Any) -> list[float]:
    return [len(kwargs) for _ in completions]


def hands_it_on(completions: list[str], **kwargs: Any) -> list[float]:
    return reads_the_rest(completions, **kwargs)


class Callable:
    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [0.0 for _ in completions]


@pytest.mark.parametrize("function", [plain, ignores_the_rest, Callable()])
def test_functions_that_cannot_reach_log_metric(function: Any) -> None:
    assert FunctionReward(function).logged == ()


@pytest.mark.parametrize("function", [asks, asks_by_name, reads_the_rest, reads_it_within, hands_it_on])
def test_functions_that_may_log_anything(function: Any) -> None:
    assert FunctionReward(function).logged is None
    assert loggers([FunctionReward(function)]) == [function.__name__]


def check(name: str, rewards: Any = plain, evaluates: bool = False, **options: Any) -> list[str]:
    resolved = resolve_rewards(rewards)
    names = metric_names(OrchestratorConfig.from_flat(**options), resolved, evaluates=evaluates)
    return check_best_metric(name, names, loggers(resolved), evaluates=evaluates)


@pytest.mark.parametrize(
    ("name", "options", "near"),
    [
        ("rewrad/mean", {}, "nearest: reward/mean"),
        ("-train/los", {}, "nearest: train/loss"),
        ("loss", {}, "nearest: train/loss"),
        ("reward/plian/mean", {}, "nearest: reward/plain/mean"),
        ("eval/meen", {"evaluates": True}, "nearest: eval/mean"),
        ("eval/mean", {}, "set eval_split"),
        ("train/kl", {}, r"no step has a metric 'train/kl'.*docs/metrics.md"),
        ("rollout/resamples", {"zero_variance_groups": "drop"}, "no step has"),
        ("sandbox/passed", {}, "no step has"),
        ("something", {}, "nearest: reward/mean"),
    ],
)
def test_what_no_step_can_have_is_refused(name: str, options: dict[str, Any], near: str) -> None:
    with pytest.raises(ConfigError, match=f"^best_metric: .*{near}"):
        check(name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reward/mean", {}),
        ("-rollout/completion_length_mean", {}),
        ("reward/plain/mean", {}),
        ("sandbox/passed", {"rewards": "sandbox"}),
        ("eval/pass_rate", {"evaluates": True}),
        ("train/kl", {"beta": 0.1}),
        ("reward/kl_shaping", {"beta": 0.1, "kl_in": "reward"}),
        ("rollout/resamples", {"zero_variance_groups": "resample"}),
        ("rollout/staleness_mean", {"async_mode": "queue"}),
    ],
)
def test_what_a_step_can_have_is_taken(name: str, options: dict[str, Any]) -> None:
    assert check(name, **options) == []


def test_what_a_function_may_log_is_doubtful() -> None:
    (notice,) = check("rewrad/mean", asks)
    assert notice.startswith("best_metric: 'rewrad/mean' is no metric of mrl's (the nearest: reward/mean")
    assert "so asks has to log it with log_metric" in notice
    assert check("reward/mean", asks) == []
    with pytest.raises(ConfigError, match="set eval_split"):
        check("eval/mean", asks)


@pytest.mark.parametrize(
    ("algorithm", "name", "fits"),
    [
        ("grpo", "trl/whatever", True),
        ("grpo", "reward/mean", True),
        ("grpo", "train/logprob_gap", False),
        ("sft", "eval/mean_token_accuracy", True),
        ("sft", "reward/mean", False),
        ("sft", "train/los", False),
    ],
)
def test_names_in_simple_mode(algorithm: str, name: str, fits: bool) -> None:
    names = simple_names(TRAINERS.get(algorithm), [], evaluates=True)
    if fits:
        assert check_best_metric(name, names, [], evaluates=True) == []
    else:
        with pytest.raises(ConfigError, match="no step has a metric"):
            check_best_metric(name, names, [], evaluates=True)
