"""Rewards that rollouts bring, beside those of functions."""

from __future__ import annotations

import pytest

from mrl.rewards import resolve_rewards
from mrl.rewards.base import RewardRequest, RewardResult
from mrl.rewards.combine import score_rows
from mrl.types import Group, Rollout, Sample, Task
from mrl.workers.scoring import TrainerState, score_groups


def half(completions: list[str], **_: object) -> list[float | None]:
    return [None if text == "none" else 0.5 for text in completions]


def one(completions: list[str], **_: object) -> list[float]:
    return [1.0] * len(completions)


async def scored(funcs: object, own: dict[str, float | None], weights: list[float] | None = None,
                 completion: str = "x") -> RewardResult:  # fmt: skip
    request = RewardRequest("r", "p", completion, [1], own=own)
    return (await score_rows(resolve_rewards(funcs, weights), [request], weights=weights)).results[0]


@pytest.mark.parametrize(
    ("funcs", "weights", "own", "expected"),
    [
        (half, None, {"Game": 2.0}, 2.5),
        ([half, one], None, {"Game": 2.0}, 2.75),  # the functions' mean, and the game's
        ([half, one], [2.0, 3.0], {"Game": 2.0}, 6.0),
        ("own", None, {"Game": 2.0, "steps": 1.0}, 3.0),
        (half, None, {"Game": None}, 0.5),
        ("own", None, {"Game": None, "steps": 0.0}, 0.0),
    ],
)
async def test_what_a_rollout_brings_is_added(funcs: object, weights: object, own: object, expected: float) -> None:
    result = await scored(funcs, own, weights)  # type: ignore[arg-type]
    assert result.reward == pytest.approx(expected)
    assert result.rewards.items() >= own.items()  # type: ignore[attr-defined]


async def test_a_function_that_does_not_apply_leaves_the_rest() -> None:
    result = await scored(half, {"Game": 2.0}, completion="none")
    assert (result.reward, result.rewards) == (2.0, {"half": None, "Game": 2.0})


async def test_a_rollout_that_brings_nothing_has_failed() -> None:
    for own in ({}, {"Game": None}):
        result = await scored("own", own)
        assert (result.reward, result.error) == (None, "the rollout source gave it no reward")


async def test_whole_rewards_are_left_alone_and_parts_are_joined() -> None:
    def rollout(reward: float | None, **rewards: float) -> Rollout:
        return Rollout(
            "r", "t", 0, [], [Sample([1], [2], [0.0], [1], 0)], completion="x", reward=reward, rewards=rewards
        )

    class Pool:
        async def score(self, requests: list[RewardRequest], state: object) -> object:
            return await score_rows(resolve_rewards(half), requests)

    group = Group(Task("t", "p"), [rollout(7.0), rollout(None, Game=2.0), rollout(None)])
    await score_groups(Pool(), [group], TrainerState(0, 0, None))  # type: ignore[arg-type]
    assert [r.reward for r in group.rollouts] == [7.0, 2.5, 0.5]
    assert [list(r.rewards) for r in group.rollouts] == [[], ["half", "Game"], ["half"]]
