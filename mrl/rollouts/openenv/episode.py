"""One attempt in an environment, as the driver of several turns plays it."""

from __future__ import annotations

from typing import Any

from mrl.errors import DataError, EnvError
from mrl.rollouts.base import SourceSetup
from mrl.rollouts.chat import AssistantTurn, ToolSpec
from mrl.rollouts.multi_turn import Step
from mrl.rollouts.openenv.mcp import call_action, result_text
from mrl.rollouts.openenv.results import Result
from mrl.rollouts.openenv.sessions import Session
from mrl.rollouts.openenv.texts import ActionParser, PromptBuilder, shown
from mrl.types import Message, Task


class OpenEnvEpisode:
    """Observations become messages, and the policy's text an action; or its calls are calls of the environment's tools.

    session: reset already. first: what came of that. tools: what the environment offers; none = actions are text.
    """

    def __init__(
        self,
        setup: SourceSetup,
        task: Task,
        session: Session,
        first: Result,
        builder: PromptBuilder,
        parser: ActionParser,
        tools: list[ToolSpec],
    ) -> None:
        self.setup, self.task, self.session, self.first = setup, task, session, first
        self.builder, self.parser, self.tools = builder, parser, tools
        self.history: list[str] = []
        self.steps, self.reward = 0, 0.0
        self.parts: dict[str, float] = {}
        """Of the reward so far, by name."""
        self.counts: dict[str, float] = {"malformed_calls": 0.0}
        if tools:
            self.counts |= {"tool_calls": 0.0, "tool_errors": 0.0}

    async def begin(self) -> list[Message]:
        """The row's prompt; what is seen of the first observation is added to its last message."""
        if self.first.done:
            raise EnvError(f"task {self.task.id!r}: the environment is done when it was reset, before any turn")
        messages = [dict(message) for message in self.setup.encoder.messages(self.task.prompt)]
        if self.tools and self.builder.function is None:
            return messages  # its tools are all there is to see
        first, *rest = await self.builder(self.first.observation, 1, self.history)
        last = messages[-1]
        if first["role"] != last["role"]:
            return [*messages, first, *rest]
        if not isinstance(last.get("content"), str):
            raise DataError(f"task {self.task.id!r}: the observation is added to its last message, which has no text")
        messages[-1] = {**last, "content": f"{last['content']}\n\n{first['content']}"}
        return [*messages, *rest]

    async def step(self, turn: AssistantTurn) -> Step:
        """What comes of the turn's action, or of its calls."""
        if self.tools:
            return await self._call_tools(turn)
        action = await self.parser(turn.content)
        if action is None:
            self.counts["malformed_calls"] += 1
            return Step(done=True)
        result = await self._step(action)
        self.history.append(f"Step {len(self.history) + 1}: {shown(action)} -> reward {result.reward or 0.0:+.2f}")
        if result.done:
            return Step(reward=result.reward, done=True)
        return Step(await self.builder(result.observation, len(self.history) + 1, self.history), result.reward)

    async def rewards(self) -> dict[str, float | None]:
        """Those of the steps; where these name parts, each of them and the rest. Without a step it is nothing."""
        if not self.steps:
            return {"environment": 0.0}
        rest = self.reward - sum(self.parts.values())
        return {"environment": rest, **self.parts} if self.parts else {}

    async def _step(self, action: Any) -> Result:
        result = await self.session.step(action)
        self.steps += 1
        self.reward += result.reward or 0.0
        for name, value in result.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value
        return result

    async def _call_tools(self, turn: AssistantTurn) -> Step:
        self.counts["tool_calls"] += len(turn.tool_calls)
        self.counts["malformed_calls"] += len(turn.malformed)
        step = Step(done=not turn.tool_calls)
        for call in turn.tool_calls:
            result = await self._step(call_action(call))
            text, failed = result_text(result.observation)
            self.counts["tool_errors"] += failed
            step.messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text})
            if result.reward is not None:
                step.reward = (step.reward or 0.0) + result.reward
            if result.done:
                step.done = True
                break
        return step


def reset_arguments(task: Task, seed: int, extra: dict[str, Any]) -> dict[str, Any]:
    """What `reset` gets: the row's columns but the prompt, a seed that is the same for all attempts at the row (unless
    it has a column `seed`), and `extra`."""
    return {"seed": seed} | task.columns | extra
