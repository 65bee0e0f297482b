"""`own`: rollouts bring their reward, from an environment or whoever made them, and nothing is added to it."""

from __future__ import annotations

from typing import Any

from mrl.rewards.base import RewardRequest, Scores


class OwnReward:
    """Scores nothing: a rollout that arrives without any reward has failed."""

    name = "own"
    bounded = True
    independent = True
    logged = ()

    async def score(self, requests: list[RewardRequest], *, trainer_state: Any) -> Scores:
        """A rollout that arrived with a whole reward does not come here, one with parts of it may."""
        without = [row for row, request in enumerate(requests) if all(v is None for v in request.own.values())]
        return Scores([None] * len(requests), dict.fromkeys(without, "the rollout source gave it no reward"))
