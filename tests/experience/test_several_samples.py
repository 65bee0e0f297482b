"""Rollouts of several turns and samples: what counts are sampled tokens, and a rollout is one rollout."""

from __future__ import annotations

import pytest
import torch

from mrl.actor.objective import Objective
from mrl.errors import TrainingError
from mrl.experience.batch import make_batch
from mrl.experience.failures import check_step_rewards
from mrl.experience.groups import has_signal, kept_groups, reads_of
from mrl.experience.metrics import rollout_metrics
from mrl.experience.shaping import OVERLONG, shape
from mrl.loop.task_batch import staleness
from mrl.modeling.token_batch import make_token_batch
from mrl.types import Group, Rollout, Sample, Task
from tests.experience.example_groups import config

CPU = torch.device("cpu")


def sample(mask: list[int], version: int | list[int] = 0, reason: str = "stop") -> Sample:
    return Sample([1, 2], list(range(10, 10 + len(mask))), [-1.0] * len(mask), mask, version, reason)


def rollout(reward: float, *masks: list[int], steps: tuple[float, ...] = (), reason: str = "stop") -> Rollout:
    samples = [sample(mask) for mask in masks]
    samples[-1].finish_reason = reason
    return Rollout("r", "t", 0, [], samples, reward=reward, rewards={"f": reward}, step_rewards=list(steps))


def group(*rollouts: Rollout) -> Group:
    return Group(Task("t", "p"), list(rollouts))


def weights_of(groups: list[Group], loss_type: str) -> list[list[float]]:
    """Of each token of the batch's samples."""
    settings = config(loss_type=loss_type)
    batch = make_batch(groups, settings)
    tokens = make_token_batch(batch, CPU)
    Objective(settings.algorithm).prepare(tokens, batch)
    rows = zip(tokens.weights_BT.tolist(), batch.samples, strict=True)
    return [row[: len(sample.mask)] for row, sample in rows]


TWO = [1, 1, 0, 0, 0]
FOUR = [1, 0, 0, 1, 1, 1]
THREE = [1, 1, 1]


@pytest.mark.parametrize(
    ("loss_type", "several", "one"),
    [
        ("grpo", 1 / 6 / 2, 1 / 3 / 2),  # the mean of each rollout's mean: 6 and 3 sampled tokens, 2 rollouts
        ("gspo", 1 / 6 / 2, 1 / 3 / 2),
        ("dapo", 1 / 9, 1 / 9),
        ("dr_grpo", 1 / (2 * 8), 1 / (2 * 8)),  # max_completion_length is 8
        ("reinforce", 1 / 2, 1 / 2),
        ("luspo", 1 / 2, 1 / 2),
    ],
)
def test_a_rollout_of_several_samples_weighs_as_one(loss_type: str, several: float, one: float) -> None:
    weights = weights_of([group(rollout(1.0, TWO, FOUR), rollout(0.0, THREE))], loss_type)
    expected = [[weight * on for on in mask] for mask, weight in ((TWO, several), (FOUR, several), (THREE, one))]
    for row, wanted in zip(weights, expected, strict=True):
        assert row == pytest.approx(wanted)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "gspo", "luspo", "vespo"])
def test_where_a_rollout_is_cut_into_samples_changes_no_weight(loss_type: str) -> None:
    whole = weights_of([group(rollout(1.0, [1, 1, 0, 1, 1, 1]), rollout(0.0, THREE))], loss_type)
    parts = weights_of([group(rollout(1.0, [1, 1], [1], [1, 1]), rollout(0.0, THREE))], loss_type)
    assert [w for w in whole[0] if w] == pytest.approx([w for row in parts[:-1] for w in row])
    assert whole[-1] == pytest.approx(parts[-1])


def test_advantages_are_taken_over_rollouts() -> None:
    """Three rewards, 1, 0 and 0, although the first one's rollout has three samples."""
    batch = make_batch([group(rollout(1.0, [1], [1], [1]), rollout(0.0, [1]), rollout(0.0, [1]))], config())
    assert batch.num_sequences == 3
    assert batch.num_tokens == 5
    third, std = 1 / 3, (1 / 3) ** 0.5
    expected = [(1 - third) / (std + 1e-4)] * 3 + [-third / (std + 1e-4)] * 2
    assert batch.advantages == pytest.approx(expected)


def test_lengths_are_those_of_sampled_tokens_over_the_rollout() -> None:
    long_environment = rollout(1.0, [1, 1] + [0] * 30 + [1, 1])
    two_halves = rollout(0.0, [1] * 5, [1] * 5)  # 10 of 8
    groups = [group(long_environment, two_halves)]
    batch = make_batch(groups, config())
    assert [len(s.completion_ids) for s in batch.samples] == [34]
    assert (batch.num_sequences, batch.num_tokens) == (2, 4)
    metrics = rollout_metrics(groups, config())
    assert metrics["rollout/overlong"] == 1
    assert metrics["rollout/completion_length_mean"] == 7
    assert metrics["rollout/completion_length_max"] == 10


def test_a_truncated_rollout_is_left_out_whole() -> None:
    groups = [group(rollout(1.0, [1], [1], reason="length"), rollout(0.0, [1]))]
    assert len(make_batch(groups, config(mask_truncated_completions=True)).samples) == 1
    limited = rollout(1.0, [1], [1])
    limited.limit = "max_turns"
    assert limited.truncated
    assert len(make_batch([group(limited, rollout(0.0, [1]))], config(mask_truncated_completions=True)).samples) == 1


async def test_soft_overlong_punishment_looks_at_sampled_tokens() -> None:
    """Full at 8 tokens, none up to 4: 6 sampled tokens, in two samples, are half."""
    made = rollout(1.0, [1, 1, 0, 0, 0, 0, 1], [1, 1, 1])
    await shape([group(made)], config(soft_punish_cache=4), None)
    assert made.metrics[OVERLONG] == pytest.approx(-0.5)


def test_staleness_is_that_of_sampled_tokens() -> None:
    made = rollout(1.0, [1])
    made.samples = [sample([1, 0, 0, 0, 1], [3, 3, 3, 3, 5]), sample([1, 1, 0, 0], 5)]
    assert staleness([group(made)], 6) == {"rollout/staleness_mean": (3 + 1 + 1 + 1) / 4, "rollout/staleness_max": 3.0}


# --- rewards by step ------------------------------------------------------------------------------------------------

EARLY, LATE = (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)
TURNS = [1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [("rloo", [0.75, -0.75]), ("reinforce_pp_baseline", None), ("group", [0.375, -0.375]), ("maxrl", [0.6, -0.6])],
)
def test_a_discount_makes_early_rewards_worth_more(advantage: str, expected: list[float] | None) -> None:
    """Two rollouts that earned 1, at the first of three turns and at the last: 1 and 0.5² = 0.25."""
    groups = [group(rollout(1.0, TURNS, steps=EARLY), rollout(1.0, TURNS, steps=LATE))]
    more = {"scale_rewards": "none"} if advantage == "group" else {}
    batch = make_batch(groups, config(advantage_type=advantage, discount=0.5, **more))
    if expected is None:
        half = 0.375 / (0.375 * 2**0.5 + 1e-4)
        expected = [half, -half]
    assert batch.advantages == pytest.approx(expected)
    assert [r.reward for r in groups[0].rollouts] == [1.0, 1.0]


def test_a_reward_at_the_end_is_discounted_by_the_turns_before_it() -> None:
    groups = [group(rollout(1.0, [1]), rollout(1.0, [1, 0], [1]))]  # 1 and 0.5
    assert make_batch(groups, config(advantage_type="rloo", discount=0.5)).advantages == pytest.approx(
        [0.5, -0.5, -0.5]
    )


def test_a_discount_makes_a_signal_of_when() -> None:
    when = group(rollout(1.0, TURNS, steps=EARLY), rollout(1.0, TURNS, steps=LATE))
    lengths = group(rollout(1.0, [1]), rollout(1.0, TURNS))
    same = group(rollout(1.0, TURNS), rollout(1.0, TURNS))
    discounted = config(discount=0.5, zero_variance_groups="drop")
    assert kept_groups([when, lengths, same], discounted) == [when, lengths]
    assert kept_groups([when, lengths, same], config(zero_variance_groups="drop")) == []
    assert reads_of(discounted) == "steps"
    assert not has_signal(when)


def test_more_step_rewards_than_turns_are_refused_with_a_discount() -> None:
    made = rollout(1.0, [1], steps=(0.5, 0.5))
    check_step_rewards([group(made)], config(discount=0.5))
    assert made.status == "failed"
    with pytest.raises(TrainingError, match="2 step rewards for 1 turns"):
        make_batch([group(rollout(1.0, [1], steps=(0.5, 0.5)))], config(discount=0.5))


def test_turns_of_all_samples_are_counted_together() -> None:
    """`turn`: every turn's return against the same turn of the other rollout; no scaling."""
    first = rollout(3.0, [1, 1, 0, 1], [1], steps=(0.0, 1.0, 2.0))
    other = rollout(1.0, [1, 0, 1, 0, 1], steps=(0.0, 0.0, 1.0))
    batch = make_batch([group(first, other)], config(advantage_type="turn", discount=0.5, scale_rewards="none"))
    # Returns: 0 + .5 (1 + .5 * 2) = 1, 2, 2 and .25, .5, 1.
    a, b, c = (1 - 0.25) / 2, (2 - 0.5) / 2, (2 - 1) / 2
    assert batch.advantages[0] == pytest.approx([a, a, 0, b])
    assert batch.advantages[1] == pytest.approx([c])
    assert batch.advantages[2] == pytest.approx([-a, 0, -b, 0, -c])
    assert batch.rollout_tokens == [4, 4, 3]
