"""Three groups: one that differs in reward, one that does not, and one whose completions were cut."""

from __future__ import annotations

from mrl.config import OrchestratorConfig
from mrl.types import Group, Rollout, Sample, Task


def rollout(name: str, reward: float | None, length: int = 3, reason: str = "stop") -> Rollout:
    sample = Sample([1, 2], list(range(10, 10 + length)), [-1.0] * length, [1] * length, 0, reason)
    made = Rollout(name, "t", 0, [], [sample], reward=reward, rewards={"f": reward})
    if reward is None:
        made.fail("broken")
    return made


def config(**options: object) -> OrchestratorConfig:
    return OrchestratorConfig.from_flat(**({"max_completion_length": 8, "max_tokens": 20} | options))


def groups() -> list[Group]:
    task = Task("t", "p")
    return [
        Group(task, [rollout("a0", 1.0), rollout("a1", 0.0, 5), rollout("a2", None)]),
        Group(task, [rollout("b0", 1.0), rollout("b1", 1.0)]),
        Group(task, [rollout("c0", 0.0, 12, "length"), rollout("c1", 1.0, 8, "length")]),
    ]
