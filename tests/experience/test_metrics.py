"""A step's rollouts as numbers."""

from __future__ import annotations

import pytest

from mrl.experience.metrics import rollout_metrics
from tests.experience.example_groups import config, groups


def test_metrics_of_a_step() -> None:
    metrics = rollout_metrics(groups(), config())
    assert metrics["rollout/failed_fraction"] == pytest.approx(1 / 7)
    assert metrics["reward/mean"] == pytest.approx(4 / 6)
    assert metrics["reward/pass_rate"] == pytest.approx(4 / 6)
    assert metrics["reward/f/mean"] == pytest.approx(4 / 6)
    assert metrics["reward/zero_variance_groups"] == pytest.approx(1 / 3)
    assert metrics["rollout/truncated_fraction"] == pytest.approx(2 / 7)
    assert metrics["rollout/overlong"] == 1
    assert metrics["rollout/completion_length_max"] == 12
    assert "eval/mean" in rollout_metrics(groups(), config(), prefix="eval")
