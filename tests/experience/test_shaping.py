"""Rewards are shaped in one place, for length and for leaving the reference model; the reward itself stays."""

from __future__ import annotations

import math

import pytest

from mrl.config import OrchestratorConfig
from mrl.experience.reference import add_reference_logprobs, reference_samples
from mrl.experience.shaping import KL, LENGTH, OVERLONG, shape, shaped_reward
from mrl.types import Group, Rollout, Sample, Task


def rollout(name: str, reward: float | None, length: int, samples: int = 1) -> Rollout:
    made = [Sample([1], [7] * length, [-1.0] * length, [1] * length, 0) for _ in range(samples)]
    scored = Rollout(name, "t", 0, [], made, reward=reward, rewards={"f": reward})
    if reward is None:
        scored.fail("broken")
    return scored


def groups() -> list[Group]:
    task = Task("t", "p")
    differing = Group(task, [rollout("a", 1.0, 4), rollout("b", 0.0, 8, samples=2), rollout("c", None, 6)])
    return [differing, Group(task, [rollout("d", 1.0, 5), rollout("e", 1.0, 5)])]


def config(**options: object) -> OrchestratorConfig:
    return OrchestratorConfig.from_flat(**({"max_completion_length": 8} | options))


class Asked:
    """The actor's KL: 0.5 for each sample, and what it was asked for."""

    def __init__(self, kl: float = 0.5) -> None:
        self.kl = kl
        self.samples: list[list[Sample]] = []

    async def __call__(self, samples: list[Sample]) -> list[float]:
        self.samples.append(samples)
        return [self.kl] * len(samples)


async def test_without_options_nothing_is_added_and_nobody_asked() -> None:
    made, asked = groups(), Asked()
    await shape(made, config(beta=0.1), asked)  # the divergence is in the loss
    assert not asked.samples
    assert all(not r.metrics for group in made for r in group.rollouts)


async def test_length_terms_are_noted_beside_the_reward() -> None:
    made = groups()
    await shape(made, config(soft_punish_cache=4, overlong_penalty=0.5, length_penalty=0.1), Asked())
    a, b, c = made[0].rollouts
    assert a.metrics == {OVERLONG: 0.0, LENGTH: pytest.approx(0.05)}
    assert b.metrics == {OVERLONG: -0.5, LENGTH: pytest.approx(-0.05)}, "the longest, over both its samples"
    assert c.metrics == {}
    assert (a.reward, shaped_reward(a)) == (1.0, pytest.approx(1.05))


async def test_the_divergence_is_asked_for_once_and_summed_over_a_rollouts_samples() -> None:
    made, asked = groups(), Asked()
    await shape(made, config(beta=0.1, kl_in="reward"), asked)
    assert [len(samples) for samples in asked.samples] == [1 + 2 + 1 + 1]
    assert made[0].rollouts[1].metrics[KL] == pytest.approx(-0.1)
    assert shaped_reward(made[1].rollouts[0]) == pytest.approx(0.95)
    only_differing = groups()
    await shape(only_differing, config(beta=0.1, kl_in="reward", zero_variance_groups="drop"), asked)
    assert len(asked.samples[1]) == 3
    assert KL not in only_differing[1].rollouts[0].metrics


async def test_a_divergence_that_is_not_finite_fails_the_rollout() -> None:
    made = groups()
    await shape(made, config(beta=0.1, kl_in="reward"), Asked(math.nan))
    assert {r.status for group in made for r in group.rollouts} == {"failed"}
    assert "not finite" in (made[0].rollouts[0].error or "")


class Actor:
    """Answers as the actor's handle does: every token's logprob is minus the number of its call."""

    name = "actor"

    def __init__(self) -> None:
        self.calls: list[int] = []

    async def call(self, method: str, samples: list[Sample], temperature: float) -> list[list[float]]:
        assert (method, temperature) == ("reference_logprobs", 1.0)
        self.calls.append(len(samples))
        return [[-float(len(self.calls))] * len(sample.completion_ids) for sample in samples]


async def test_reference_logprobs_are_asked_for_once_and_only_where_they_are_not_known() -> None:
    made, actor = groups(), Actor()
    await add_reference_logprobs(made, config(), actor)  # type: ignore[arg-type]
    assert actor.calls == []
    chosen = config(beta=0.1, max_completion_length=16)  # of a rollout, over both its samples
    await add_reference_logprobs(made[:1], chosen, actor)  # type: ignore[arg-type]
    await add_reference_logprobs(made, chosen, actor)  # type: ignore[arg-type]
    await add_reference_logprobs(made, chosen, actor)  # type: ignore[arg-type]
    assert actor.calls == [4, 2]
    known = [s.reference_logprobs for group in made for r in group.rollouts for s in r.samples]
    assert known == [[-1.0] * 4, [-1.0] * 8, [-1.0] * 8, [-1.0] * 6, [-2.0] * 5, [-2.0] * 5]


def test_a_divergence_in_the_reward_needs_samples_that_are_not_trained_on_too() -> None:
    too_long = [Group(Task("t", "p"), [rollout("a", 1.0, 9)])]
    assert reference_samples(too_long, config(beta=0.1)) == []
    assert len(reference_samples(too_long, config(beta=0.1, kl_in="reward"))) == 1
