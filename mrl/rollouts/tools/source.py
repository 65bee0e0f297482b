"""`tools`: the policy calls functions, or methods of an environment, and sees what they return (TRL 1.16's contract).

A turn's calls are carried out and their results are the next messages, in the order of the calls; asynchronous ones run
at the same time. A call that raises, or of a tool there is not, is answered with the error. A turn without a call that
can be read is the last one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any, Self

from mrl.data.images import is_image, opened
from mrl.data.tasks import NO_PROMPT
from mrl.errors import ConfigError, DataError, EnvError
from mrl.rollouts.base import PolicyClient, SourceSetup
from mrl.rollouts.chat import AssistantTurn, ToolCall, ToolSpec
from mrl.rollouts.multi_turn import Step, play
from mrl.rollouts.tools.content import Content, as_content, joined
from mrl.rollouts.tools.environments import Environment, Environments, OwnThread, factory_of
from mrl.rollouts.tools.functions import (
    CHARACTERS_PER_TOKEN,
    MOST_OF_ERROR,
    Tool,
    as_text,
    copied,
    described,
    distinct,
    encodable,
    found,
)
from mrl.rollouts.tools.mcp_servers import PREFIX, MCPServer, Session, Sessions
from mrl.types import Message, Rollout, Task


class ToolSource:
    """Attempts with tools, and an environment where there is one."""

    keeps_time = True

    def __init__(self, setup: SourceSetup, tools: dict[str, Tool], environments: Environments | None) -> None:
        self.setup, self.tools, self.environments = setup, tools, environments
        self.chat = setup.chat()
        self._shared_sessions: dict[int, Session] = {}
        self._kept: dict[int, tuple[str | None, Environment, bool]] | None = None
        """By `id` of the rollout; None = nobody looks at them."""
        offered = [tools] + [one.tools for free in environments.free.values() for one in free] if environments else []
        if any(offered or [tools]) and not self.chat.takes_tools:
            raise ConfigError(
                "tools: this model's chat template writes no calls of tools, or in a way that cannot be read back; use "
                "a model whose template does"
            )

    @classmethod
    def create(cls, setup: SourceSetup, *, tools: Any = None, environment_factory: Any = None) -> Self:
        if tools is None and environment_factory is None:
            raise ConfigError("rollout_source: tools needs tools or environment_factory")
        given = [] if tools is None else list(tools) if isinstance(tools, list | tuple) else [tools]
        made = [tool for one in given for tool in _tools(one)]
        environments = None if environment_factory is None else Environments(environment_factory, made)
        return cls(setup, distinct(made, "tools"), environments)

    @classmethod
    def scores(cls, *, tools: Any = None, environment_factory: Any = None) -> bool:
        """Whether environments give rewards themselves, so that no function is needed."""
        if environment_factory is None:
            return False
        made = environment_factory if isinstance(environment_factory, dict) else {None: environment_factory}
        kinds = [factory_of(one) for one in made.values()]
        own = ("get_reward", "step_reward")
        return all(not inspect.isclass(kind) or any(hasattr(kind, name) for name in own) for kind in kinds)

    def gives_rewards(self) -> bool:
        """Whether every environment does, as far as an instance of each shows."""
        return self.environments is not None and self.environments.scores()

    def check_tasks(self, tasks: list[Task]) -> None:
        """Raise ConfigError for a task whose environment there is not, DataError for one that lacks a column that its
        `reset` needs."""
        for task in tasks if self.environments is not None else []:
            assert self.environments is not None
            reset = self.environments.free[self.environments.key_of(task.columns)][0].instance.reset
            try:
                inspect.signature(reset).bind(**accepted(reset, self._columns(task)))
            except TypeError as error:
                raise DataError(f"task {task.id!r}: {described(reset)} {error} among the dataset's columns") from None

    async def run(self, task: Task, attempt: int, policy: PolicyClient, seed: int) -> Rollout:
        """One attempt."""
        most = CHARACTERS_PER_TOKEN * policy.max_model_len
        sessions = Sessions(self._shared_sessions)
        if self.environments is None:
            thread = OwnThread("mrl-tools")
            try:
                environment = Environment(None, thread, self.tools)
                episode = ToolEpisode(self.setup, task, environment, sessions.bound(self.tools), None, most)
                return await play(episode, self.chat, self.setup, task, attempt, policy, seed)
            finally:
                thread.end()
                await sessions.close()
        key = self.environments.key_of(task.columns)
        environment = await self.environments.take(key)
        usable = kept = False
        try:
            tools = sessions.bound(environment.tools)
            episode = ToolEpisode(self.setup, task, environment, tools, self._columns(task), most)
            rollout = await play(episode, self.chat, self.setup, task, attempt, policy, seed)
            usable = rollout.limit not in ("step_timeout", "rollout_timeout")
            if self._kept is not None:
                self._kept[id(rollout)], kept = (key, environment, usable), True
            return rollout
        finally:
            if not kept:
                self.environments.give_back(key, environment, usable=usable)
            await sessions.close()

    def keep_environments(self, at_most: int | None) -> tuple[Callable[[Rollout], Any], Callable[[Rollout], None]]:
        """From now on an environment serves no other attempt until its rollout was scored, so that reward functions may
        look at it. Returns what gives the instance of a rollout, and what is to be told that it was scored.

        at_most: instances, as for a list of servers that has an end. Attempts wait for one then, so that all attempts
        at a task have to have one at a time. None = as many as are needed.
        """
        kept: dict[int, tuple[str | None, Environment, bool]] = {}
        self._kept = kept
        if self.environments is not None:
            self.environments.at_most = at_most

        def environment_of(rollout: Rollout) -> Any:
            held = kept.get(id(rollout))
            return None if held is None else held[1].instance

        def scored(rollout: Rollout) -> None:
            held = kept.pop(id(rollout), None)
            if held is not None and self.environments is not None:
                self.environments.give_back(held[0], held[1], usable=held[2])

        return environment_of, scored

    async def close(self) -> list[str]:
        """Close environments, and sessions that attempts share."""
        await asyncio.gather(*(session.close() for session in self._shared_sessions.values()))
        return [] if self.environments is None else await self.environments.close()

    def _columns(self, task: Task) -> dict[str, Any]:
        """What `reset` gets: the whole row, but for the column that selects the environment."""
        by_column = self.environments is not None and self.environments.by_column
        hidden = {"environment"} if by_column else set()
        prompt = {} if task.prompt == NO_PROMPT else {"prompt": task.prompt}
        return prompt | {name: value for name, value in task.columns.items() if name not in hidden}


class ToolEpisode:
    """One attempt. columns: for `reset`; None = there is no environment. most: characters it may be told at once."""

    def __init__(
        self,
        setup: SourceSetup,
        task: Task,
        environment: Environment,
        tools: dict[str, Tool],
        columns: dict[str, Any] | None,
        most: int,
    ) -> None:
        self.setup, self.task, self.environment, self.columns, self.most = setup, task, environment, columns, most
        self.by_name = tools
        self.tools: list[ToolSpec] = [tool.spec for tool in tools.values()]
        self.counts: dict[str, float] = {"tool_calls": 0.0, "tool_errors": 0.0, "malformed_calls": 0.0}
        self.steps = 0

    async def begin(self) -> list[Message]:
        """The task's prompt; what `reset` returns is added to its last message."""
        messages = [dict(message) for message in self.setup.encoder.messages(self.task.prompt)]
        if self.columns is None:
            return messages
        reset = self.environment.instance.reset
        observation = await self.environment.call(reset, **opened(copied(accepted(reset, self.columns))))
        if observation is None:
            if self.task.prompt == NO_PROMPT:
                raise EnvError(f"{described(reset)} returned None, and task {self.task.id!r} has no prompt either")
            return messages
        if not isinstance(observation, str | list) and not is_image(observation):
            raise EnvError(
                f"{described(reset)} returned {_short(observation)}, of type {type(observation).__name__}: it returns "
                "text, parts with images, or None"
            )
        last = messages[-1]
        if not isinstance(last.get("content"), str | list):
            raise DataError(
                f"task {self.task.id!r}: what reset returns is added to its last message, which has no content"
            )
        messages[-1] = {**last, "content": joined(last["content"], self._content(observation, reset))}
        return messages

    async def step(self, turn: AssistantTurn) -> Step:
        """What the turn's calls return, and what they earned where the environment says so."""
        self.counts["tool_calls"] += len(turn.tool_calls)
        self.counts["malformed_calls"] += len(turn.malformed)
        self.steps += 1
        self.environment.begin_step()
        if not turn.tool_calls:
            return Step(reward=self.environment.step_reward(), done=True)
        messages = [_message(call, said) for call, said in await self._results(turn.tool_calls)]
        return Step(messages, self.environment.step_reward())

    async def rewards(self) -> dict[str, float | None]:
        """The environment's, under the name of its class; where it rewards steps and a limit ended the first, 0."""
        if self.columns is None:
            return {}
        given: dict[str, float | None] = {}
        if self.environment.rewards_steps and not self.steps:
            given["environment"] = 0.0
        if self.environment.gives_reward:
            given[self.environment.name] = await self.environment.reward()
        return given

    async def _results(self, calls: tuple[ToolCall, ...]) -> list[tuple[ToolCall, Content]]:
        """In the order of the calls. Plain functions run one after the other, since they may depend on each other's
        effects; asynchronous ones at the same time, beside them."""
        beside = {
            number: asyncio.ensure_future(self._result(call))
            for number, call in enumerate(calls)
            if (tool := self.by_name.get(call.name)) and inspect.iscoroutinefunction(tool.function)
        }
        try:
            texts = [await (beside.get(number) or self._result(call)) for number, call in enumerate(calls)]
        finally:
            for work in beside.values():
                work.cancel()
            await asyncio.gather(*beside.values(), return_exceptions=True)
        return list(zip(calls, texts, strict=True))

    async def _result(self, call: ToolCall) -> Content:
        tool = self.by_name.get(call.name)
        if tool is None:
            self.counts["tool_errors"] += 1
            return str({"error": f"Tool {call.name} not found."})
        try:
            result = await self.environment.call(tool.function, **copied(call.arguments))
        except EnvError:  # what the tool needs is gone, which is no answer
            raise
        except (Exception, SystemExit) as error:  # whatever it is, the policy is told, and can do better
            self.counts["tool_errors"] += 1
            return encodable(str({"error": str(error)[:MOST_OF_ERROR]}))
        return self._content(result, tool.function)

    def _content(self, said: Any, who: Any) -> Content:
        images = self.setup.encoder.images is not None
        return as_content(said, who, functools.partial(as_text, most=self.most), images=images)


def _tools(given: Any) -> list[Tool]:
    """A function as a tool; or all that an MCP server has."""
    if isinstance(given, dict) or (isinstance(given, str) and given.startswith(PREFIX)):
        given = MCPServer.named(given)
    return given.tools() if isinstance(given, MCPServer) else [Tool.of(found(given, "tools"))]


def accepted(function: Any, columns: dict[str, Any]) -> dict[str, Any]:
    """The columns that it takes: all, with `**columns` among its parameters."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return columns
    return {name: value for name, value in columns.items() if name in parameters}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"


def _message(call: ToolCall, said: Content) -> Message:
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": said}
