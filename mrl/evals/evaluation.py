"""How good a policy is on a set of tasks: mean reward, pass@1, pass@k, each with its uncertainty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from mrl.backends import Backend
from mrl.config import OrchestratorConfig
from mrl.errors import DataError, EngineError, TrainingError
from mrl.evals.stats import Attempts, Interval, mean_reward, pass_rate
from mrl.loop.collector import Collector, Logged
from mrl.loop.policy_server import PolicyServer
from mrl.loop.preflight import check_engine, check_names, prepare_evaluation, sampling_params
from mrl.loop.resources import check_resources, rollout_resources
from mrl.loop.reward_trial import try_rewards
from mrl.loop.spawning import backend_of, spawn_rewards, spawn_rollout
from mrl.models import context_length, load_config, load_processor, load_tokenizer
from mrl.rewards.combine import held_out, mean_metrics
from mrl.rollouts.prompts import PromptEncoder
from mrl.rollouts.runner import close_source, start_source
from mrl.system.gather import all_of
from mrl.system.threads import in_thread
from mrl.types import GenerateRequest, Group, derive_seed
from mrl.workers.pool import RolloutPool
from mrl.workers.scoring import TrainerState

TASKS_AT_ONCE = 1024
"""Tasks attempted at a time; the next ones start when all of them have ended."""


@dataclass
class EvalReport:
    """What an evaluation found."""

    model: str
    dataset: str
    tasks: int
    taken: str
    """How many of how many there are: `5 of 128`, or `128`; `the first 5` of a stream, which nobody counted."""
    samples_per_task: int
    unscored: int
    """Rollouts that could not be scored. They are in no mean; intervals reach from all of them failing to all of them
    passing (`mrl.evals.stats.pass_rate`)."""
    unscored_tasks: int
    """Tasks none of whose rollouts could be scored."""
    unscored_because: str | None
    """What the first of them says."""
    confidence: float
    mean_reward: Interval
    pass_at: dict[int, Interval]
    """k → pass@k."""
    by: dict[str, Interval] = field(default_factory=dict)
    """pass@1 for each value of a column."""
    completion_length: float = 0.0
    logged: dict[str, float] = field(default_factory=dict)
    """What rewards logged under `reward/`, such as a judge's tokens."""
    groups: list[Group] = field(default_factory=list)


async def evaluate(
    config: OrchestratorConfig,
    *,
    samples_per_task: int = 1,
    by: str | None = None,
    confidence: float = 0.95,
    progress: Callable[[int, int], None] = lambda done, total: None,
    note: Callable[[str], None] = lambda message: None,
) -> EvalReport:
    """Attempt every task of the configured dataset. Raises MRLError.

    progress: gets tasks done and their number. note: gets what a user should know before it starts.
    """
    prepared = await in_thread(prepare_evaluation, config, by, samples_per_task)
    for notice in await try_rewards(config, prepared.tasks, 0):
        note(notice)
    server, backend = PolicyServer(config), backend_of(config)
    try:
        await start_source(prepared.source, backend, note)
        policy = await open_policy(backend, config, prepared.max_model_len)
        rewards = await spawn_rewards(backend, config, note)
        collector = Collector.of(config, prepared, policy, rewards, samples_per_task)
        seed, state, tasks = derive_seed(config.training.seed, "eval"), TrainerState(0, 0, None), prepared.tasks
        groups: list[Group] = []
        logged: Logged = []
        ended = 0

        def finished(group: Group) -> None:
            nonlocal ended
            ended += 1
            progress(ended, len(tasks))

        async with server.running(policy, prepared.setup, prepared.source):
            for start in range(0, len(tasks), TASKS_AT_ONCE):
                batch = tasks[start : start + TASKS_AT_ONCE]
                done = await collector.collect(batch, samples_per_task, seed=seed, state=state, finished=finished)
                groups += done.groups
                logged += done.logged
    finally:
        for problem in await close_source(prepared.source):
            note(problem)
        await backend.close()
        server.close()
    report = summarize(config, groups, samples_per_task, by, confidence, prepared.counts.tasks)
    report.logged = held_out(mean_metrics(logged))
    return report


def summarize(
    config: OrchestratorConfig,
    groups: list[Group],
    samples_per_task: int,
    by: str | None,
    confidence: float,
    taken: str | None = None,
) -> EvalReport:
    """The numbers of scored groups. taken: how many of how many tasks, None = all.

    Raises TrainingError when no rollout could be scored.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = {group.task.id: [rollout.reward for rollout in group.rollouts] for group in groups}
    tasks = list(rewards.values())
    reward, unscored = mean_reward(tasks, confidence), [rollout for rollout in rollouts if rollout.reward is None]
    if reward is None:
        raise TrainingError(f"no rollout could be scored; the first says: {rollouts[0].error}")

    ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < samples_per_task] + [samples_per_task]
    by_value: dict[str, list[Attempts]] = defaultdict(list)
    if by is not None:
        for group in groups:
            by_value[str(group.task.columns[by])].append(rewards[group.task.id])
    return EvalReport(
        model=config.model.model,
        dataset=f"{config.data.dataset_name}:{config.data.dataset_split}",
        tasks=len(groups),
        taken=taken or str(len(groups)),
        samples_per_task=samples_per_task,
        unscored=len(unscored),
        unscored_tasks=sum(all(reward is None for reward in attempts) for attempts in tasks),
        unscored_because=unscored[0].error if unscored else None,
        confidence=confidence,
        mean_reward=reward,
        pass_at={k: rate for k in ks if (rate := pass_rate(tasks, k, confidence)) is not None},
        by={
            value: rate
            for value, tasks in sorted(by_value.items())
            if (rate := pass_rate(tasks, 1, confidence)) is not None
        },
        completion_length=fmean(rollout.num_tokens for rollout in rollouts),
        groups=groups,
    )


async def sample(config: OrchestratorConfig, prompt: str, count: int) -> list[dict[str, Any]]:
    """`count` completions of one prompt, with their tokens' logprobs. Raises MRLError."""
    check_names(config)
    check_resources(config, rollout_resources(config))
    check_engine(config)
    tokenizer = await in_thread(load_tokenizer, config.model)
    processor = await in_thread(load_processor, config.model)
    encoder = PromptEncoder.of(tokenizer, config.data, processor)
    prompt_ids = tuple(encoder.encode(prompt))
    limit = context_length(await in_thread(load_config, config.model), config.model.max_model_len)
    if len(prompt_ids) >= limit:
        raise DataError(
            f"the prompt has {len(prompt_ids)} tokens and at most {limit - 1} fit; shorten it, or raise max_model_len "
            "if the model takes more"
        )
    backend = backend_of(config)
    try:
        policy = await open_policy(backend, config, limit)
        params = sampling_params(config)
        requests = [
            GenerateRequest(str(k), prompt_ids, params, derive_seed(config.training.seed, "sample", k))
            for k in range(count)
        ]
        completions = await all_of([policy.generate(request) for request in requests])
        if (refused := next((c for c in completions if c.error is not None), None)) is not None:
            raise EngineError(refused.error)
    finally:
        await backend.close()
    return [
        {
            "text": tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            "finish_reason": completion.finish_reason,
            "tokens": len(completion.token_ids),
            "logprob": sum(completion.logprobs),
            "token_ids": completion.token_ids,
        }
        for completion in completions
    ]


async def open_policy(backend: Backend, config: OrchestratorConfig, max_model_len: int) -> RolloutPool:
    """The configured model as somebody to ask; it ends with the backend."""
    worker = await spawn_rollout(backend, config, max_model_len, 0, alone=True)
    await worker.call("load")
    policy = RolloutPool([worker], max_model_len)
    await policy.ask_capacity()
    return policy
