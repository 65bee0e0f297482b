"""`create_openenv_vllm_rollout_func`: episodes in OpenEnv environments as a `rollout_func`, token by token.

prompts ─▶ a row each ─▶ OpenEnvRolloutProcessor ─▶ conversations as token ids ─▶ prompt_ids, completion_ids, …
                                   ▲                          │
                          the trainer's policy        the test of env_path ─▶ eval_score
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from mrl.errors import ConfigError, RolloutError
from mrl.evals.bridge.policies import PolicyOf
from mrl.evaltests.carried import MADE, RESULT, tasks_of
from mrl.evaltests.find import find_test
from mrl.evaltests.loaders import row_of_messages
from mrl.evaltests.test import EvaluationTest
from mrl.processors.base import RolloutProcessorConfig, made_of, sampling_of
from mrl.processors.openenv import IMAGE, OpenEnvRolloutProcessor
from mrl.processors.source import processor_of
from mrl.rewards.base import RewardRequest
from mrl.rewards.evaluation import EvaluationReward
from mrl.rollouts import PolicyClient, SourceSetup, TurnLimits
from mrl.rollouts.prompts import PromptEncoder
from mrl.rollouts.runner import Runner
from mrl.types import Rollout, SamplingParams, Task, derive_seed

T = TypeVar("T")
TRIES = 3
"""Of an attempt that fails, in a trainer that has no failed rollouts."""


def create_openenv_vllm_rollout_func(
    env_factory: Callable[[], Any] | None,
    prompt_builder: Callable[[Any, int, list[str]], Any] | None,
    action_parser: Callable[[str], Any] | None,
    vllm_base_url: str = "http://localhost:8000",
    vllm_model: str = "Qwen/Qwen2.5-7B",
    max_steps: int = 8,
    *,
    completion_params: dict[str, Any] | None = None,
    concurrency: int | None = None,
    processor_cls: type[Any] | None = OpenEnvRolloutProcessor,
    processor_kwargs: dict[str, Any] | None = None,
    env_path: str | None = None,
    env_client_cls: type[Any] | None = None,
    tasks: list[str] | None = None,
    task_var: str | None = None,
    miniwob_url: str | None = None,
    docker_image: str = IMAGE,
    env_base_url: str | None = None,
    request_timeout_s: float = 15.0,
    default_headers: dict[str, str] | None = None,
    provider: Any | None = None,
    docker_port: int | None = None,
    env_vars: dict[str, str] | None = None,
    benchmark: str = "miniwob",
    headless: bool = True,
    viewport_width: int = 1280,
    viewport_height: int = 720,
    timeout_ms: int = 10000,
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A `rollout_func(prompts, trainer)` for `MRLTrainer` and for TRL's `GRPOTrainer` (1.10 and later).

    Each prompt is an episode of at most max_steps turns; attempts at one prompt (`num_generations` in a row) have the
    same task and seed. The trainer's own policy samples: a run's, the module that TRL trains, or TRL's vLLM server
    (vllm_base_url and vllm_model, where its arguments name none). completion_params: instead of the trainer's sampling
    options. concurrency: episodes at a time; None = all. env_path: a module with an @evaluation_test, whose processor's
    options are taken, and whose score is `eval_score`. processor_cls, processor_kwargs: another subclass of
    OpenEnvRolloutProcessor, and its arguments. The rest are those of OpenEnvRolloutProcessor.

    It returns, for each prompt, `prompt_ids`, `completion_ids` (the policy's and the environment's tokens in turn),
    `env_mask` (1 = the policy's), `logprobs`, `eval_score` (None = it could not be told; without env_path the sum of
    the step rewards), `step_rewards`, and `env_reward`, their sum. What fails three times fails that rollout in
    `MRLTrainer`, and raises RolloutError in TRL's, which knows no failed rollouts.

    Raises ConfigError for options that do not go together.
    """
    test = find_test(env_path) if env_path else None
    own: dict[str, Any] = {
        "env_factory": env_factory,
        "prompt_builder": prompt_builder,
        "action_parser": action_parser,
        "env_client_cls": env_client_cls,
        "tasks": tasks,
        "task_var": task_var,
        "miniwob_url": miniwob_url,
        "docker_image": docker_image,
        "env_base_url": env_base_url,
        "request_timeout_s": request_timeout_s,
        "default_headers": default_headers,
        "provider": provider,
        "docker_port": docker_port,
        "env_vars": env_vars,
        "benchmark": benchmark,
        "headless": headless,
        "viewport_width": viewport_width,
        "viewport_height": viewport_height,
        "timeout_ms": timeout_ms,
    }
    kind = processor_cls or OpenEnvRolloutProcessor
    if not issubclass(kind, OpenEnvRolloutProcessor):
        raise ConfigError(f"processor_cls: {kind.__name__} is no subclass of mrl.evals.OpenEnvRolloutProcessor")
    if test is not None and not processor_kwargs and env_factory is None and env_client_cls is None:
        processor = processor_of(test)
        if not isinstance(processor, OpenEnvRolloutProcessor):
            raise ConfigError(
                f"env_path: {test.name} makes its rollouts with {type(processor).__name__}, not in an OpenEnv "
                "environment; give env_factory as well"
            )
    else:
        processor = kind(**own | (processor_kwargs or {}))
    rollouts = _Rollouts(
        processor, test, PolicyOf(vllm_base_url, vllm_model), max_steps, completion_params or {}, concurrency
    )

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return rollouts(prompts, trainer)

    return rollout_func


@dataclass
class _Episode:
    """What TRL is given of one."""

    rollout: Rollout
    score: float | None


class _Rollouts:
    """The function, and the environments that it keeps between its calls."""

    def __init__(
        self,
        processor: OpenEnvRolloutProcessor,
        test: EvaluationTest | None,
        policy_of: PolicyOf,
        max_steps: int,
        params: dict[str, Any],
        concurrency: int | None,
    ) -> None:
        self.processor, self.test, self.policy_of = processor, test, policy_of
        self.max_steps, self.params, self.concurrency = max_steps, params, concurrency
        self.reward = None if test is None else EvaluationReward(test)
        self.loop = _Loop()
        self.source: Any = None
        self.made_for: Any = None
        self.turn = 0
        """Prompts so far, for the tasks that they take in turn."""
        self.rows: dict[str, Task] = {}
        """Of the attempts under way."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ours = hasattr(trainer, "rollout_completions")
        policy = self.policy_of(trainer)
        setup = _setup(trainer, self.params, self.max_steps)
        step = int(getattr(getattr(trainer, "state", None), "global_step", 0) or 0)
        seed = derive_seed(int(getattr(trainer.args, "seed", 0) or 0), "openenv", step, self.turn)
        episodes = self.loop.run(self._episodes(prompts, policy, setup, _generations(trainer), seed, retry=not ours))
        return _returned(episodes, setup, ours=ours)

    async def _episodes(
        self, prompts: list[Any], policy: PolicyClient, setup: SourceSetup, n: int, seed: int, *, retry: bool
    ) -> list[_Episode]:
        await self._ready(setup)
        tasks = self._tasks(prompts, n, setup)
        rollouts: dict[int, Rollout] = {}
        for attempt in range(TRIES):
            left = [place for place in range(len(prompts)) if place not in rollouts]
            runner = Runner(self.source, policy, at_once=self.concurrency)
            groups = await runner.run([tasks[place] for place in left], 1, seed=derive_seed(seed, attempt))
            for place, group in zip(left, groups, strict=True):
                if group.rollouts[0].status == "ok" or attempt == TRIES - 1:
                    rollouts[place] = group.rollouts[0]
        done = [rollouts[place] for place in range(len(prompts))]
        failed = next((rollout for rollout in done if rollout.status != "ok"), None)
        if failed is not None and retry:
            raise RolloutError(f"an episode failed {TRIES} times: {failed.error}")
        scores = await self._scores(tasks, done)
        return [_Episode(rollout, score) for rollout, score in zip(done, scores, strict=True)]

    async def _ready(self, setup: SourceSetup) -> None:
        """The source, which keeps its environments; another trainer's tokenizer or limits get another one."""
        if self.source is not None and self.made_for == (setup.tokenizer, setup.sampling, setup.limits):
            return
        if self.source is not None:
            await self.source.close()
        self.source = self.processor.source(setup, RolloutProcessorConfig(steps=self.max_steps))
        self.made_for = (setup.tokenizer, setup.sampling, setup.limits)
        self.loop.at_end(self.source.close)

    def _tasks(self, prompts: list[Any], n: int, setup: SourceSetup) -> list[Task]:
        """A task for each attempt; those at one prompt differ by nothing but their name."""
        named = self.processor.options.get("tasks") or []
        made = []
        for place, prompt in enumerate(prompts):
            number = self.turn + place // n
            row = row_of_messages(setup.encoder.messages(prompt))
            row.input_metadata.row_id = f"prompt-{number}"
            (task,) = tasks_of([row])
            columns = {"seed": derive_seed("openenv", number) % 2**31}
            if named:
                columns[str(self.processor.task_var)] = named[number % len(named)]
            inner = Task(f"{task.id}/{place % n}", task.prompt, columns)
            made.append(inner)
            self.rows[inner.id] = task
        self.turn += -(-len(prompts) // n)
        return made

    async def _scores(self, tasks: list[Task], rollouts: list[Rollout]) -> list[float | None]:
        """What the test says; without one, the sum of the step rewards."""
        rows = [self.rows.pop(task.id) for task in tasks]
        if self.reward is None:
            return [None if r.status != "ok" else sum(r.step_rewards) for r in rollouts]
        scored = [place for place, rollout in enumerate(rollouts) if rollout.status == "ok"]
        requests = []
        for place in scored:
            rollout = rollouts[place]
            columns = rows[place].columns | {MADE: made_of(rollout)}
            requests.append(RewardRequest(rollout.id, rollout.prompt, rollout.completion, [], columns, rows[place].id))
        found = await self.reward.score(requests, trainer_state=None)
        by_place = dict(zip(scored, found.values, strict=True))
        for place, result in zip(scored, found.extra[RESULT], strict=True):
            rollouts[place].extra[RESULT] = result
        return [by_place.get(place) for place in range(len(rollouts))]


class _Loop:
    """An event loop on a thread of its own, which lives as long as the function does."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._closing: list[Callable[[], Coroutine[Any, Any, Any]]] = []
        threading.Thread(target=self.loop.run_forever, name="mrl-rollout-func-environments", daemon=True).start()
        weakref.finalize(self, _end, self.loop, self._closing)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """On the caller's thread, what it comes to."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def at_end(self, close: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """What is to be closed when the function is gone, or the process ends."""
        self._closing.append(close)


def _end(loop: asyncio.AbstractEventLoop, closing: list[Callable[[], Coroutine[Any, Any, Any]]]) -> None:
    for close in closing:
        try:
            asyncio.run_coroutine_threadsafe(close(), loop).result(timeout=15)
        except Exception:  # the process ends, with or without them
            continue
    loop.call_soon_threadsafe(loop.stop)


def _returned(episodes: list[_Episode], setup: SourceSetup, *, ours: bool) -> dict[str, Any]:
    """As `rollout_func` returns it. Raises RolloutError for a conversation that is no single sequence."""
    fields: dict[str, list[Any]] = {
        name: []
        for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "eval_score", "step_rewards", "env_reward")
    }
    if ours:
        fields |= {"policy_versions": [], "rollout_error": []}
    for episode in episodes:
        rollout = episode.rollout
        if len(rollout.samples) > 1:
            raise RolloutError(
                "this model's chat template writes earlier turns differently once there are more, so an episode is no "
                "single token sequence, which is all that a rollout_func can return; train with MRLTrainer("
                "evaluation_test=…), or turn thinking off"
            )
        sample = rollout.samples[0] if rollout.samples and rollout.status == "ok" else None
        fields["prompt_ids"].append(list(sample.prompt_ids) if sample else [])
        fields["completion_ids"].append(list(sample.completion_ids) if sample else [])
        fields["logprobs"].append(list(sample.logprobs) if sample else [])
        fields["env_mask"].append(list(sample.mask) if sample else [])
        fields["eval_score"].append(episode.score)
        fields["step_rewards"].append(list(rollout.step_rewards))
        fields["env_reward"].append(sum(rollout.step_rewards))
        if ours:
            version = sample.policy_version if sample else 0
            count = len(sample.completion_ids) if sample else 0
            fields["policy_versions"].append(version if isinstance(version, list) else [version] * count)
            fields["rollout_error"].append(rollout.error)
    return fields


def _setup(trainer: Any, params: dict[str, Any], max_steps: int) -> SourceSetup:
    """The trainer's tokenizer and sampling options."""
    args, tokenizer = trainer.args, getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    longest = int(getattr(args, "max_completion_length", None) or SamplingParams().max_tokens)
    run = {name: getattr(args, name, None) for name in ("temperature", "top_p", "top_k", "min_p")}
    stop = tuple((getattr(args, "generation_kwargs", None) or {}).get("stop") or ())
    base = sampling_of(run, SamplingParams(max_tokens=longest, stop=stop))
    sampling = sampling_of(params, base)
    limits = TurnLimits(turns=max_steps, turn_tokens=sampling.max_tokens, rollout_tokens=longest)
    encoder = PromptEncoder(tokenizer, template_kwargs=getattr(args, "chat_template_kwargs", None))
    return SourceSetup(tokenizer, encoder, sampling, limits)


def _generations(trainer: Any) -> int:
    """Attempts at a prompt, which come one after the other."""
    evaluates = getattr(trainer, "model", None) is not None and not getattr(trainer.model, "training", True)
    name = "num_generations_eval" if evaluates else "num_generations"
    return int(getattr(trainer, name, None) or getattr(trainer.args, "num_generations", 1) or 1)
