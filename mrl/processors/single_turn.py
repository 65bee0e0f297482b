"""One answer to each row; and none at all, for rows that have their answers."""

from __future__ import annotations

import asyncio

from mrl.evaltests.rows import EvaluationRow
from mrl.evaltests.status import Status
from mrl.processors.base import Attempts, RolloutProcessor, RolloutProcessorConfig, SourceProcessor
from mrl.rollouts import MessagePolicy, PolicyClient, SourceSetup
from mrl.rollouts.chat import AssistantTurn, ToolSpec
from mrl.rollouts.multi_turn import Step, play
from mrl.types import Message, Rollout, Task

TOOLS = "tools"


class SingleTurnRolloutProcessor(SourceProcessor):
    """The model answers each row once. A row's `tools` are shown to it; what it calls is in its answer, and is not
    carried out.

    drop_trailing_assistant_messages: rows that end with answers are asked without them.
    """

    def __init__(self, *, drop_trailing_assistant_messages: bool = True) -> None:
        super().__init__()
        self.drop_trailing_assistant_messages = drop_trailing_assistant_messages

    def source(self, setup: SourceSetup, config: RolloutProcessorConfig) -> Attempts:
        return OneAnswer(setup)

    def task(self, row: EvaluationRow, task: Task) -> Task:
        messages = [message.plain() for message in row.messages]
        while self.drop_trailing_assistant_messages and len(messages) > 1 and messages[-1]["role"] == "assistant":
            messages.pop()
        return Task(task.id, messages, {TOOLS: row.tools or []})


class OneAnswer:
    """Attempts of one turn."""

    keeps_time = True

    def __init__(self, setup: SourceSetup) -> None:
        self.setup, self.chat = setup, setup.chat()

    async def run(self, task: Task, attempt: int, policy: PolicyClient | MessagePolicy, seed: int) -> Rollout:
        return await play(_Answer(self.setup, task), self.chat, self.setup, task, attempt, policy, seed)


class _Answer:
    """A conversation that ends with the first answer."""

    def __init__(self, setup: SourceSetup, task: Task) -> None:
        self.setup, self.task = setup, task
        self.tools: list[ToolSpec] = list(task.columns.get(TOOLS) or [])
        self.counts: dict[str, float] = {}

    async def begin(self) -> list[Message]:
        return [dict(message) for message in self.setup.encoder.messages(self.task.prompt)]

    async def step(self, turn: AssistantTurn) -> Step:
        return Step(done=True)

    async def rewards(self) -> dict[str, float | None]:
        return {}


class NoOpRolloutProcessor(RolloutProcessor):
    """Rows as they are: what is to be scored is in them already."""

    def __call__(self, rows: list[EvaluationRow], config: RolloutProcessorConfig) -> list[asyncio.Task[EvaluationRow]]:
        async def unchanged(row: EvaluationRow) -> EvaluationRow:
            row.rollout_status = Status.rollout_finished()
            return row

        return [asyncio.create_task(unchanged(row)) for row in rows]
