"""Reward functions tried before anything is loaded: does one that takes text get messages, or the other way round?

The completions of a text prompt are text, those of a conversation are lists of messages (TRL's contract), and most
functions take only one of the two. The wrong one may raise at every completion, or count messages for letters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mrl.config import OrchestratorConfig
from mrl.errors import RewardError
from mrl.loop.preflight import reward_worker_args
from mrl.loop.resume import random_state, set_random_state
from mrl.rewards.base import RewardRequest, Scores
from mrl.rewards.function_reward import FunctionReward
from mrl.types import Message, Prompt, Task
from mrl.workers.reward import RewardWorker
from mrl.workers.scoring import TrainerState

ANSWERS = ("The answer is 4.", "x = 1\nprint(f'{x:.2f}')  # <answer>\\boxed{a}</answer>")
"""Made-up completions: words, digits, code and what answers are marked with."""
TRIAL_SECONDS = 5.0
"""A function that takes longer is not judged: a run should not wait for it before it has begun."""


async def try_rewards(
    config: OrchestratorConfig,
    tasks: list[Task],
    steps: int,
    *,
    loop: bool = True,
    tell: Callable[[list[str]], None] = lambda names: None,
) -> list[str]:
    """Calls each reward function once with made-up completions of the first text prompt and of the first conversation,
    and asks what else can be tried, such as a judge, about one made-up completion.

    Nothing where `reward_trial` is off: what a function writes, counts or pays for, these calls do too.
    steps: of the run, for `trainer_state`. loop: whether the functions will run on this event loop; if not,
    asynchronous ones are skipped: they may stay bound to the loop they were first called on. tell: gets the functions'
    names before they are called. Returns notices on functions that seem to misread their completions. Raises
    RewardError for one that fails, and would not with completions of the other kind; one that fails with both may only
    refuse made-up completions, and one that takes more than five seconds is not judged. Python's and numpy's random
    numbers go on as if nothing had been drawn.
    """
    if not config.reward.reward_trial:
        return []
    worker = RewardWorker(**reward_worker_args(config.reward))
    rewards = [r for r in worker.rewards if isinstance(r, FunctionReward) and (loop or not r.asynchronous)]
    others = [reward for reward in worker.rewards if hasattr(reward, "try_once")]
    if rewards or others:
        tell([reward.name for reward in [*rewards, *others]])
    before, notices = random_state(), []
    for reward in rewards:
        for kind in (str, list):
            task = next((task for task in tasks if isinstance(task.prompt, kind)), None)
            if task is None:
                continue
            notice = await _try_one(reward, task, TrainerState(0, steps, 0.0), before)
            notices += [notice] if notice else []
    set_random_state(before)
    try:
        for other in others:
            notices += await other.try_once(tasks[0])
    finally:
        if others:
            await worker.close()
    return notices


async def _try_one(reward: FunctionReward, task: Task, state: TrainerState, randomness: dict[str, Any]) -> str | None:
    async def ask(requests: list[RewardRequest]) -> Scores | None:
        set_random_state(randomness)
        try:
            async with asyncio.timeout(TRIAL_SECONDS):
                return await reward.score(requests, trainer_state=state)
        except (RewardError, TimeoutError):  # it breaks its contract: the run will say so with what shows it
            return None

    requests = [
        RewardRequest(f"{task.id}/trial", task.prompt, _as(task.prompt, answer), [0], task.columns)
        for answer in ANSWERS
    ]
    others = [replace(r, prompt=_other(r.prompt), completion=_other(r.completion)) for r in requests]
    scores = await ask(requests)
    if scores is None:
        return None
    messages = not isinstance(task.prompt, str)
    if _failed(scores):
        by_other = await ask(others)
        if by_other is None or _failed(by_other):
            return None
        raise RewardError(
            f"reward_funcs: {scores.errors[0]}. {_ADVICE[messages].format(task=task.id)}; given the other kind it works"
        )
    if messages:
        by_other = await ask(others)
        if by_other is not None and not _failed(by_other) and by_other.values != scores.values:
            return (
                f"reward_funcs: {reward.name} gives {_shown(scores)} for completions as messages and "
                f"{_shown(by_other)} for the same ones as text. {_ADVICE[True].format(task=task.id)}."
            )
    return None


_ADVICE = {
    True: "Prompts like task {task!r}'s are messages, so are their completions: read completion[-1]['content']",
    False: "Prompts like task {task!r}'s are text, so are their completions: read the completion itself",
}


def _as(prompt: Prompt, answer: str) -> str | list[Message]:
    return answer if isinstance(prompt, str) else [{"role": "assistant", "content": answer}]


def _other(said: str | list[Message]) -> str | list[Message]:
    """Text as a message, messages as the text of the last one."""
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    return str(said[-1].get("content") or "")


def _failed(scores: Scores) -> bool:
    return len(scores.errors) == len(scores.values)


def _shown(scores: Scores) -> str:
    return " and ".join("none" if value is None else f"{value:g}" for value in scores.values)
