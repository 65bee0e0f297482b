"""What a rollout processor is: rows in, and for each a task that ends with what came of it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from mrl.errors import ConfigError
from mrl.evaltests.carried import MADE, as_messages, row_of_task, tasks_of
from mrl.evaltests.messages import Message
from mrl.evaltests.rows import EvaluationRow, Usage, content_id, new_id
from mrl.evaltests.status import Status
from mrl.rollouts import MessagePolicy, PolicyClient, SourceSetup, TurnLimits
from mrl.rollouts.endpoint import Endpoint, endpoint_setup
from mrl.types import Rollout, SamplingParams, Task, derive_seed

MAX_TOKENS = 1024
"""Of an answer, unless completion_params say otherwise."""


class Attempts(Protocol):
    """What attempts tasks: a rollout source, once it is made."""

    async def run(self, task: Task, attempt: int, policy: Any, seed: int) -> Rollout:
        """One attempt, with a policy that is asked with tokens or with messages."""
        ...


class NoLog:
    """Takes the rows that a processor logs midway, and keeps none: a run's record has them when they have ended."""

    def log(self, row: Any) -> None:
        """Nothing."""


@dataclass
class RolloutProcessorConfig:
    """What a processor works with."""

    completion_params: dict[str, Any] = field(default_factory=dict)
    mcp_config_path: str = ""
    semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(96))
    """Rollouts under way at a time."""
    server_script_path: str | None = None
    steps: int = 30
    """Turns of a rollout at most."""
    logger: Any = field(default_factory=lambda: NoLog())
    kwargs: dict[str, Any] = field(default_factory=dict)
    exception_handler_config: Any = None
    post_processor: Any = None
    policy: PolicyClient | MessagePolicy | None = None
    """Who answers; None = the endpoint that completion_params name."""
    setup: SourceSetup | None = None
    """The policy's tokenizer and limits; None with an endpoint."""
    seed: int = 0


class RolloutProcessor(ABC):
    """Makes rollouts of rows. Subclass it for one of your own; those in this package also say how to train."""

    def setup(self) -> None:  # noqa: B027 - nothing to do for most of them
        """Called once before the first rows."""

    @abstractmethod
    def __call__(self, rows: list[EvaluationRow], config: RolloutProcessorConfig) -> list[asyncio.Task[EvaluationRow]]:
        """A task for each row, in their order; `config.semaphore` bounds how many are under way."""

    async def acleanup(self) -> None:  # noqa: B027
        """Called once after the last rows."""

    def cleanup(self) -> None:  # noqa: B027
        """The same, where nobody can wait."""


class SourceProcessor(RolloutProcessor):
    """A processor whose rollouts a rollout source makes: with an endpoint to evaluate it, with the tokens of a policy
    to evaluate or train that."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    @abstractmethod
    def source(self, setup: SourceSetup, config: RolloutProcessorConfig) -> Attempts:
        """What attempts rows as tasks. Raises ConfigError."""

    def task(self, row: EvaluationRow, task: Task) -> Task:
        """The row's task as the source takes it: its messages, and no columns."""
        return Task(task.id, [message.plain() for message in row.messages], {})

    def policy(self, config: RolloutProcessorConfig) -> PolicyClient | MessagePolicy:
        """Who answers. Raises ConfigError where nothing says so."""
        return config.policy if config.policy is not None else Endpoint.of(config.completion_params)

    def __call__(self, rows: list[EvaluationRow], config: RolloutProcessorConfig) -> list[asyncio.Task[EvaluationRow]]:
        policy = self.policy(config)
        setup = config.setup or endpoint_setup(
            sampling_of(config.completion_params), limits_of(config.completion_params, config.steps)
        )
        if isinstance(policy, MessagePolicy) == (config.setup is not None):
            raise ConfigError("a policy's tokens go with its setup, and an endpoint has none: give both, or neither")
        source = self.source(setup, config)
        self._open += [one for one in (source, policy if config.policy is None else None) if hasattr(one, "close")]
        for row in rows:
            row.input_metadata.row_id = row.input_metadata.row_id or content_id(row)
        tasks = tasks_of(rows)
        inner = [self.task(row, task) for row, task in zip(rows, tasks, strict=True)]
        if check := getattr(source, "check_tasks", None):
            check(inner)

        async def attempt(row: EvaluationRow, task: Task) -> EvaluationRow:
            async with config.semaphore:
                start = perf_counter()
                name = row.execution_metadata.rollout_id or new_id()
                seed = derive_seed(config.seed, name)
                rollout = await source.run(task, 0, policy, seed)
                rollout.seconds["generate"] = perf_counter() - start
                row.input_metadata.completion_params = row.input_metadata.completion_params or config.completion_params
                done = filled(row, rollout)
                if config.post_processor is not None:  # which raises for what is not good enough
                    config.post_processor.process(done)
                return done

        return [asyncio.create_task(attempt(row, task)) for row, task in zip(rows, inner, strict=True)]

    async def acleanup(self) -> None:
        """End environments, sessions and connections."""
        opened, self._open = self._open, []
        for one in opened:
            await one.close()


def made_of(rollout: Rollout) -> dict[str, Any]:
    """What a rollout brings beside its messages, for its row."""
    told = rollout.extra.get("usage") or {}
    prompt = told.get("prompt_tokens", sum(len(sample.prompt_ids) for sample in rollout.samples))
    sampled = told.get("completion_tokens", rollout.num_tokens)
    cut = bool(rollout.limit) or (bool(rollout.samples) and rollout.samples[-1].finish_reason == "length")
    calls = sum(len(message.get("tool_calls") or []) for message in rollout.messages)
    extra: dict[str, Any] = {"policy_tokens": rollout.num_tokens} if rollout.samples else {}
    if rollout.step_rewards or "environment" in rollout.rewards:
        extra["step_rewards"] = list(rollout.step_rewards)
    if rewards := {name: value for name, value in rollout.rewards.items() if value is not None}:
        extra["environment_rewards"] = rewards
    seconds = rollout.seconds.get("generate")
    return {
        "execution_metadata": {
            "rollout_id": rollout.extra.get("rollout_id") or new_id(),
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": sampled,
                "total_tokens": prompt + sampled,
            },
            "finish_reason": rollout.extra.get("finish_reason") or ("length" if cut else "stop"),
            "tool_call_count": calls,
            "extra": extra,
            "rollout_duration_seconds": seconds,
        },
        "termination_reason": "max_steps" if rollout.limit == "max_turns" else "length" if cut else "stop",
    }


def filled(row: EvaluationRow, rollout: Rollout) -> EvaluationRow:
    """The row with its rollout."""
    made = made_of(rollout)
    metadata = made["execution_metadata"]
    row.messages = [Message.of(message) for message in rollout.messages]
    own = row.execution_metadata
    own.usage = Usage(**metadata["usage"])
    own.finish_reason, own.tool_call_count = metadata["finish_reason"], metadata["tool_call_count"]
    own.rollout_duration_seconds = metadata["rollout_duration_seconds"]
    own.extra = (own.extra or {}) | metadata["extra"]
    row.rollout_status = Status.rollout_finished(made["termination_reason"])
    return row


def as_rollout(task: Task, attempt: int, name: str, row: EvaluationRow) -> Rollout:
    """A rollout without tokens, of a row that somebody else filled."""
    asked = row_of_task(task)
    before = len(asked.messages)
    messages = [message.plain() for message in row.messages]
    metadata = row.execution_metadata.model_dump(mode="json", exclude_none=True)
    return Rollout(
        name,
        task.id,
        attempt,
        messages=messages,
        samples=[],
        prompt=messages[:before] or as_messages(task.prompt),
        completion=messages[before:],
        extra={MADE: {"execution_metadata": metadata, "tools": row.tools}},
    )


def sampling_of(params: dict[str, Any], default: SamplingParams | None = None) -> SamplingParams:
    """completion_params as a distribution and limits. default: for what they do not say. Raises ConfigError."""
    base = default or SamplingParams(max_tokens=MAX_TOKENS)
    stop = params.get("stop")
    texts = base.stop if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    try:
        return SamplingParams(
            temperature=float(_given(params, "temperature", base.temperature)),
            top_p=float(_given(params, "top_p", base.top_p)),
            top_k=max(0, int(_given(params, "top_k", base.top_k))),
            min_p=float(_given(params, "min_p", base.min_p)),
            max_tokens=int(_given(params, "max_tokens", params.get("max_completion_tokens") or base.max_tokens)),
            stop=texts,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"completion_params: {error}") from None


def limits_of(params: dict[str, Any], steps: int) -> TurnLimits:
    """Turns, and tokens of each."""
    most = _given(params, "max_tokens", params.get("max_completion_tokens"))
    return TurnLimits(turns=steps, turn_tokens=None if most is None else int(most))


def _given(params: dict[str, Any], name: str, default: Any) -> Any:
    value = params.get(name)
    return default if value is None else value
