"""From scored groups to what the actor gets."""

from __future__ import annotations

import pytest
import torch

from mrl.actor.worker import ActorWorker
from mrl.experience.batch import make_batch
from mrl.types import TrainBatch
from tests.experience.example_groups import config, groups, rollout


def test_what_is_left_out_of_the_batch_still_counts_in_the_averages() -> None:
    scored = groups()
    batch = make_batch(scored, config())
    assert [len(s.completion_ids) for s in batch.samples] == [3, 5, 8]  # b: nothing to learn; c0: too long; a2: failed
    assert batch.num_sequences == 6
    assert batch.num_tokens == 3 + 5 + 3 + 3 + 8
    assert scored[0].rollouts[2].advantage is None
    assert scored[2].rollouts[0].advantage < 0  # it counts in its group's mean
    assert batch.advantages[0] == pytest.approx(-batch.advantages[1])

    with_kl = make_batch(groups(), config(beta=0.1))
    assert len(with_kl.samples) == 5  # the KL term has a gradient where the advantage has none
    masked = make_batch(groups(), config(mask_truncated_completions=True))
    assert [len(s.completion_ids) for s in masked.samples] == [3, 5]


def test_leaving_out_samples_without_advantage_changes_no_gradient(tiny_model: str) -> None:
    rows = [rollout("x", 1.0), rollout("y", 0.0, 5), rollout("z", 1.0, 4)]
    samples = [r.samples[0] for r in rows]
    gradients = []
    for keep, advantages in (([0, 1, 2], [1.0, -1.0, 0.0]), ([0, 1], [1.0, -1.0])):
        actor = ActorWorker({"model": tiny_model, "device": "cpu"}, {}, 1, {"loss_type": "dapo"})
        actor.initialize()
        actor.train_step(TrainBatch([samples[i] for i in keep], advantages, num_sequences=3, num_tokens=12))
        gradients.append([state["exp_avg"] for state in actor.optimizer.state.values()])
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-7, rtol=1e-4)


def test_a_step_without_samples_leaves_the_weights_and_moves_the_schedule(tiny_model: str) -> None:
    actor = ActorWorker({"model": tiny_model, "device": "cpu"}, {"lr_scheduler_type": "linear"}, 4)
    actor.initialize()
    before = {name: p.clone() for name, p in actor.model.state_dict().items()}
    metrics = actor.train_step(TrainBatch([], [], num_sequences=8, num_tokens=20))
    assert all(torch.equal(before[name], p) for name, p in actor.model.state_dict().items())
    assert metrics["train/learning_rate"] == pytest.approx(5e-6 * 3 / 4)
    assert metrics["train/tokens"] == 0
