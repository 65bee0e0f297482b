"""`evaluation_test`: attempts at the rows of a test, as its processor makes them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from mrl.backends import Backend
from mrl.errors import ConfigError, EngineError, EnvError
from mrl.evaltests.carried import MADE, row_of_task
from mrl.evaltests.find import find_test
from mrl.evaltests.rows import EvaluationRow, new_id
from mrl.evaltests.test import EvaluationTest
from mrl.processors.base import RolloutProcessor, RolloutProcessorConfig, SourceProcessor, as_rollout, made_of
from mrl.processors.foreign import own_processor
from mrl.processors.gateway import MODEL, Gateway
from mrl.processors.retries import tried_again
from mrl.processors.single_turn import NoOpRolloutProcessor, SingleTurnRolloutProcessor
from mrl.rollouts import MessagePolicy, PolicyClient, SourceSetup
from mrl.rollouts.runner import rollout_id
from mrl.types import Rollout, Task


class EvaluationSource:
    """What a test's processor makes of its rows. The score is the test's alone: what an environment gives is told to
    the test (`execution_metadata.extra`), and added to nothing.

    test: the function or its name. params: completion_params that the rows are attempted with.
    """

    keeps_time = True

    def __init__(
        self, setup: SourceSetup, test: EvaluationTest, params: dict[str, Any], ids: dict[str, str] | None = None
    ) -> None:
        self.setup, self.test, self.params, self.ids = setup, test, params, ids or {}
        limits = setup.limits
        if limits.turns is None:
            setup = replace(setup, limits=replace(limits, turns=test.params.steps))
        self.processor = processor_of(test)
        self.config = RolloutProcessorConfig(
            completion_params=params,
            mcp_config_path=test.params.mcp_config_path or "",
            server_script_path=test.params.server_script_path,
            semaphore=asyncio.Semaphore(test.params.max_concurrent_rollouts),
            steps=setup.limits.turns or test.params.steps,
            kwargs=dict(test.params.rollout_processor_kwargs),
            exception_handler_config=test.params.exception_handler_config,
            setup=setup,
        )
        if test.params.logger is not None:
            self.config.logger = test.params.logger
        self.inner: Any = None
        self.gateway: Gateway | None = None
        if isinstance(self.processor, SourceProcessor):
            self.inner = self.processor.source(setup, self.config)

    @classmethod
    def create(cls, setup: SourceSetup, *, test: Any = None) -> Self:
        if test is None:
            raise ConfigError("rollout_source: evaluation_test needs a test; give evaluation_test")
        found = find_test(test)
        return cls(setup, found, found.params.completion_params[0])

    @property
    def can_train(self) -> bool:
        """Whether what comes of it has tokens."""
        gives = getattr(self.processor, "gives_tokens", None)
        return self.inner is not None or (self.captures if gives is None else bool(gives))

    @property
    def captures(self) -> bool:
        """Whether the processor asks an endpoint by itself, which can be one of ours."""
        own = isinstance(self.processor, SourceProcessor | NoOpRolloutProcessor)
        return not own and not hasattr(self.processor, "gives_tokens")

    def check_tasks(self, tasks: list[Task]) -> None:
        """As the processor's own source checks them."""
        check = getattr(self.inner, "check_tasks", None)
        if check is not None:
            check([self._inner(task) for task in tasks])

    async def start(self, backend: Backend | None, note: Callable[[str], None]) -> None:
        """What the processor needs."""
        self.processor.setup()
        if (start := getattr(self.inner, "start", None)) is not None:
            await start(backend, note)

    async def close(self) -> list[str]:
        """End it."""
        problems: list[str] = []
        if (close := getattr(self.inner, "close", None)) is not None:
            problems = await close() or []
        if self.gateway is not None:
            await self.gateway.stop()
            self.gateway = None
        await self.processor.acleanup()
        self.processor.cleanup()
        return problems

    def metrics(self) -> dict[str, float]:
        """The processor's own."""
        own: Callable[[], dict[str, float]] | None = getattr(self.inner, "metrics", None)
        return own() if own is not None else {}

    metric_names = ("environment_restarts",)

    async def run(self, task: Task, attempt: int, policy: PolicyClient | MessagePolicy, seed: int) -> Rollout:
        """One attempt; where the test says so, made again after errors that may pass."""
        handler = self.config.exception_handler_config
        return await tried_again(lambda: self._once(task, attempt, policy, seed), handler)

    async def _once(self, task: Task, attempt: int, policy: PolicyClient | MessagePolicy, seed: int) -> Rollout:
        name = new_id()
        if self.inner is not None:
            rollout: Rollout = await self.inner.run(self._inner(task), attempt, policy, seed)
            rollout.task_id, rollout.extra["rollout_id"] = task.id, name
            made = made_of(rollout)
            rollout.extra = {"rollout_id": name}
            if "environment_rewards" in made["execution_metadata"]["extra"]:
                rollout.metrics["environment_reward"] = sum(v for v in rollout.rewards.values() if v is not None)
            rollout.rewards = {}
            made["tools"] = getattr(self.processor, "shown_tools", None)
        else:
            rollout, made = await self._called(task, attempt, policy, seed, name)
        made["completion_params"] = self.params
        made["execution_metadata"] |= {"rollout_id": name, **self.ids}
        rollout.extra[MADE] = made
        return rollout

    def _inner(self, task: Task) -> Task:
        assert isinstance(self.processor, SourceProcessor)
        return self.processor.task(row_of_task(task), task)

    async def _called(
        self, task: Task, attempt: int, policy: PolicyClient | MessagePolicy, seed: int, name: str
    ) -> tuple[Rollout, dict[str, Any]]:
        """By a processor that does it all itself."""
        row = row_of_task(task)
        row.execution_metadata.rollout_id = name
        for key, value in self.ids.items():
            setattr(row.execution_metadata, key, value)
        if self.captures and not isinstance(policy, MessagePolicy):
            return await self._captured(row, task, attempt, policy, seed, name)
        row.input_metadata.completion_params = self.params
        setup = None if isinstance(policy, MessagePolicy) else self.setup
        done = await self._ask(row, replace(self.config, policy=policy, seed=seed, setup=setup))
        rollout = as_rollout(task, attempt, rollout_id(task, attempt), done)
        if (samples := getattr(self.processor, "samples", None)) is not None:
            rollout.samples = samples(name)
        return rollout, rollout.extra[MADE]

    async def _captured(
        self, row: EvaluationRow, task: Task, attempt: int, policy: PolicyClient, seed: int, name: str
    ) -> tuple[Rollout, dict[str, Any]]:
        """By one that asks an endpoint: it is told an address of ours, where the policy answers."""
        if self.gateway is None:
            self.gateway = Gateway()
        await self.gateway.start()
        traced = self.gateway.open(name, policy, self.setup, seed)
        served = {
            "model": f"openai/{MODEL}",
            "base_url": f"{self.gateway.url}/rollout_id/{name}",
            "api_key": self.gateway.serving.token or "none",
        }
        params = {key: value for key, value in self.params.items() if key != "api_base"} | served
        row.input_metadata.completion_params = params
        try:
            done = await self._ask(row, replace(self.config, completion_params=params, seed=seed, setup=None))
        finally:
            self.gateway.close(name)
        if not traced.samples:
            kind = type(self.processor).__name__
            raise EnvError(f"{kind} did not ask the model at base_url of its completion_params ({served['base_url']})")
        done.input_metadata.completion_params = self.params
        rollout = as_rollout(task, attempt, rollout_id(task, attempt), done)
        rollout.samples = traced.samples
        return rollout, rollout.extra[MADE]

    async def _ask(self, row: EvaluationRow, config: RolloutProcessorConfig) -> EvaluationRow:
        """Raises EngineError for a row that comes back with an error."""
        (begun,) = self.processor(self.test.convert.to_its([row]) if self.foreign else [row], config)
        done = await begun
        filled: EvaluationRow = self.test.convert.from_its([done])[0] if self.foreign else done
        if filled.rollout_status.is_error():
            raise EngineError(filled.rollout_status.message)
        return filled

    @property
    def foreign(self) -> bool:
        """Whether the processor is one of eval_protocol's."""
        return type(self.processor).__module__.split(".")[0] == "eval_protocol" or any(
            base.__module__.split(".")[0] == "eval_protocol" for base in type(self.processor).__mro__
        )


def processor_of(test: EvaluationTest) -> Any:
    """The test's, as one of ours where there is the same; one answer to each row where it names none.

    Raises ConfigError for what is no processor.
    """
    given = test.params.rollout_processor
    if given is None:
        return SingleTurnRolloutProcessor()
    named = type(given).__name__
    if isinstance(given, SourceProcessor) and test.params.rollout_processor_kwargs:
        raise ConfigError(
            f"evaluation_test {test.name}: rollout_processor_kwargs: {named} takes its options in its constructor; "
            f"write {named}(…)"
        )
    if inspect.isclass(given):
        raise ConfigError(
            f"evaluation_test {test.name}: rollout_processor: {given.__name__} is a class; write {given.__name__}()"
        )
    if isinstance(given, RolloutProcessor):
        return given
    found = own_processor(given)
    if not callable(found):
        raise ConfigError(f"evaluation_test {test.name}: rollout_processor: {given!r:.80} is no processor")
    return found
