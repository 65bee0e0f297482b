"""Trouble that does not end a run is told, rarely, and summed up."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config import OrchestratorConfig
from mrl.experience.batch import make_batch
from mrl.loop.run_watch import MOST_CAUSES, RunWatch, find_troubles
from mrl.store.run import RunStore
from mrl.types import Group, Rollout, Sample, Task


def groups(*rewards: list[float | None], reason: str = "stop", error: str = "f gave nan") -> list[Group]:
    made = []
    for index, group in enumerate(rewards):
        rollouts = []
        for attempt, reward in enumerate(group):
            sample = Sample([1], [2, 3], [-1.0] * 2, [1] * 2, 0, reason)  # type: ignore[arg-type]
            rollout = Rollout(f"{index}#{attempt}", "t", attempt, [], [sample], reward=reward, rewards={"f": reward})
            if reward is None:
                rollout.fail(error)
            rollouts.append(rollout)
        made.append(Group(Task("t", "p"), rollouts))
    return made


def watched(steps: list[list[Group]], **options: object) -> list[str]:
    """What is told about these steps."""
    said: list[str] = []
    config = OrchestratorConfig.from_flat(**({"max_tokens": 2} | options))
    watch = RunWatch(config, Path("runs/r"), said.append)
    for step, given in enumerate(steps, start=1):
        batch = make_batch(given, config)
        if not batch.num_tokens:
            watch.no_update(step, given, batch)
        watch.look(step, given)
    return said


def test_failures_are_told_once_by_cause_and_again_when_they_have_doubled() -> None:
    said = watched([groups([1.0, 0.0, None, None]) for _ in range(20)])
    assert said[0] == "step 1: 2 of 4 rollouts could not be scored and are left out: f gave nan"
    assert said[1] == "step 2: 2 of 4 rollouts could not be scored and are left out (4 so far): f gave nan"
    assert [line.split(":")[0] for line in said] == ["step 1", "step 2", "step 4", "step 8", "step 16"]
    rows = [groups([1.0, 0.0, None], error=f"f raised KeyError: 'row {row}'") for row in range(3)]
    assert len(watched(rows)) == 2
    texts = [groups([1.0, 0.0, None], error="never the same: " + "x" * length) for length in range(40)]
    assert len(watched(texts)) == MOST_CAUSES + 6  # the others together, at 1, 2, 4, 8, 16, 32


def test_a_step_without_any_score_blames_the_reward_and_not_the_groups() -> None:
    said = watched([groups([None, None], [None, None], error="f raised KeyError: 'gold'")])
    assert said == [
        "step 1: none of the 4 rollouts could be scored, so that nothing is learned: f raised KeyError: 'gold'"
    ]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (([0.0, 0.0], [0.0, 0.0]), "every reward was 0 in the last 5 steps: nothing can be learned"),
        (([1.0, 1.0], [1.0, 1.0]), "every reward was 1 in the last 5 steps: there is nothing left to learn"),
        (([0.0, 0.0], [1.0, 1.0]), "in the last 5 steps all rewards of a group were equal"),
    ],
)
def test_rewards_that_teach_nothing_are_told_after_five_steps(rewards: tuple[list[float], ...], expected: str) -> None:
    said = watched([groups(*rewards) for _ in range(39)])
    assert [line.split(":")[0] for line in said] == ["step 5", "step 10", "step 20"]
    assert expected in said[0]
    broken_off = [groups(*rewards)] * 4 + [groups([0.0, 1.0])] + [groups(*rewards)] * 4
    assert watched(broken_off) == []


def test_groups_that_agree_still_teach_where_the_baseline_is_the_batch() -> None:
    steps = [groups([0.0, 0.0], [1.0, 1.0]) for _ in range(6)]
    assert watched(steps, advantage_type="reinforce_pp") == []


def test_where_groups_that_agree_are_dropped_the_missing_updates_are_told() -> None:
    said = watched([groups([0.0, 0.0]) for _ in range(7)], zero_variance_groups="drop")
    assert said[0].startswith("step 1: no update, no group of rollouts differed in reward (see")
    assert said[0].endswith(": every reward was 0")
    assert said[1].startswith("step 2: no update (2 steps so far)")
    assert len(said) == 3


def test_cut_completions_are_told_with_the_limit() -> None:
    said = watched([groups([0.0, 1.0], reason="length")])
    assert said == ["step 1: 2 of 2 completions were cut after 2 tokens (max_tokens) and scored as they were"]
    assert "max_model_len" in watched([groups([0.0, 1.0], reason="length")], max_tokens=9)[0]


def test_attempts_until_max_turns_are_told_once_and_other_limits_again() -> None:
    def cut(*limits: str) -> list[Group]:
        made = groups([float(number) for number in range(len(limits))])
        for rollout, limit in zip(made[0].rollouts, limits, strict=True):
            rollout.limit = limit
        return made

    said = watched([cut("max_turns", "max_turns", "max_rollout_tokens") for _ in range(20)])
    assert said == [
        "step 1: 3 of 3 completions were cut at max_turns (2), max_rollout_tokens (1) and scored as they were"
    ]
    said = watched([cut("max_turns", "rollout_timeout") for _ in range(8)])
    assert [line.split(":")[0] for line in said] == ["step 1", "step 2", "step 4", "step 8"]
    both = watched([cut("max_turns", "max_turns"), cut("step_timeout", "step_timeout")])
    assert [line.split(":")[0] for line in both] == ["step 1", "step 2"]


@pytest.mark.parametrize(
    ("limits", "said"),
    [(("max_turns", "max_turns", "step_timeout"), "max_turns or step_timeout"), (("", ""), "the token limit")],
)
def test_a_whole_run_names_the_limits_that_cut_it(limits: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (made,) = groups([1.0] * len(limits), reason="length")
    for rollout, limit in zip(made.rollouts, limits, strict=True):
        rollout.limit = limit
    store = RunStore(tmp_path / "r", OrchestratorConfig())
    store.write_step(1, {"reward/mean": 1.0}, [made])
    store.close()
    assert find_troubles(tmp_path / "r")[0] == f"{len(limits)} of {len(limits)} completions were cut at {said}"
