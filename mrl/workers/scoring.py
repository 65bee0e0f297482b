"""From rollouts to scored rollouts: what the loop and an evaluation do with reward workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from mrl.rewards.base import RewardReport, RewardRequest
from mrl.types import Group, Rollout


@dataclass
class TrainerState:
    """What reward functions get as `trainer_state`: those attributes of TRL's that mean something here."""

    global_step: int
    max_steps: int
    epoch: float | None
    """Passes over the tasks so far; None during an evaluation."""


class Scorer(Protocol):
    """Who scores: the reward workers (`mrl.workers.reward_pool`), or rewards in this process."""

    async def score(self, requests: list[RewardRequest], state: Any) -> RewardReport:
        """One result per request, in order. Raises RewardError when a reward breaks its contract."""
        ...


async def score_groups(
    rewards: Scorer,
    groups: list[Group],
    state: TrainerState,
    environment_of: Callable[[Rollout], Any] | None = None,
) -> dict[str, float]:
    """Fill in the rewards of every rollout that was generated and has none. Returns what the functions logged.

    environment_of: the object that a rollout was made with, for functions that look at `environments`, as in TRL.

    A rollout that could not be scored is marked failed, with the function and the reason. Raises RewardError when a
    function breaks its contract.
    """
    start = perf_counter()
    pending = [
        (group.task, rollout)
        for group in groups
        for rollout in group.rollouts
        if rollout.status == "ok" and rollout.reward is None
    ]
    requests = []
    for task, r in pending:
        columns = task.columns | r.extra | ({} if environment_of is None else {"environments": environment_of(r)})
        requests.append(RewardRequest(r.id, r.prompt, r.completion, r.completion_ids, columns, task.id, r.rewards))
    if not requests:
        return {}
    report = await rewards.score(requests, state)
    seconds = perf_counter() - start
    for (_, rollout), result in zip(pending, report.results, strict=True):
        rollout.rewards = result.rewards
        rollout.extra |= result.extra
        rollout.seconds["reward"] = seconds
        if result.reward is None:
            rollout.fail(result.error or "no reward function scored it")
        else:
            rollout.reward = result.reward
    return report.metrics
