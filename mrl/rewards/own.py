"""`own`: rollouts bring their reward, from an environment or whoever made them."""

from __future__ import annotations

from typing import Any

from mrl.rewards.base import RewardRequest, Scores


class OwnReward:
    """Scores nothing: a rollout that arrives with a reward is not asked about, and one without has failed."""

    name = "own"
    bounded = True
    independent = True
    logged = ()

    async def score(self, requests: list[RewardRequest], *, trainer_state: Any) -> Scores:
        """Every rollout that comes here lacks a reward."""
        return Scores.failed(len(requests), "the rollout source gave it no reward")
