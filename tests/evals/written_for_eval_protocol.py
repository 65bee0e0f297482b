"""Tests as they are written for eval_protocol, without a word of mrl. Read by test_eval_protocol.py."""

import asyncio
import os

import litellm
from eval_protocol.models import EvaluateResult, EvaluationRow, InputMetadata, Message, MetricResult
from eval_protocol.pytest import (
    NoOpRolloutProcessor,
    RemoteRolloutProcessor,
    RolloutProcessor,
    SingleTurnRolloutProcessor,
    evaluation_test,
)
from eval_protocol.pytest.types import RolloutProcessorConfig

ROWS = [
    EvaluationRow(messages=[Message(role="user", content=f"say {n}")], input_metadata=InputMetadata(row_id=f"row-{n}"))
    for n in range(3)
]


def scored(row: EvaluationRow) -> EvaluationRow:
    text = row.last_assistant_message().content or ""
    row.evaluation_result = EvaluateResult(
        score=len(set(text)) / 20, reason="letters", metrics={"length": MetricResult(score=len(text), reason="all")}
    )
    return row


@evaluation_test(
    input_rows=[ROWS],
    completion_params=[{"model": "openai/m", "temperature": 0.5}],
    rollout_processor=SingleTurnRolloutProcessor(),
    passed_threshold=0.01,
)
def test_single(row: EvaluationRow) -> EvaluationRow:
    return scored(row)


@evaluation_test(input_rows=[ROWS], completion_params=[{"model": "openai/m"}], mode="groupwise")
async def test_group(rows: list[EvaluationRow]) -> list[EvaluationRow]:
    best = max(len(set(row.messages[-1].content)) for row in rows)
    for row in rows:
        row.evaluation_result = EvaluateResult(score=len(set(row.messages[-1].content)) / max(best, 1))
    return rows


class OwnProcessor(RolloutProcessor):
    """Asks through LiteLLM by itself."""

    def __call__(self, rows: list[EvaluationRow], config: RolloutProcessorConfig) -> list[asyncio.Task]:
        async def attempt(row: EvaluationRow) -> EvaluationRow:
            messages = [message.dump_mdoel_for_chat_completion_request() for message in row.messages]
            answer = await litellm.acompletion(messages=messages, **config.completion_params)
            row.messages.append(Message(role="assistant", content=answer.choices[0].message.content or ""))
            return row

        return [asyncio.create_task(attempt(row)) for row in rows]


@evaluation_test(input_rows=[ROWS], completion_params=[{"model": "openai/m"}], rollout_processor=OwnProcessor())
def test_own(row: EvaluationRow) -> EvaluationRow:
    return scored(row)


@evaluation_test(
    input_rows=[ROWS],
    completion_params=[{"model": "openai/m"}],
    rollout_processor=RemoteRolloutProcessor(
        remote_base_url=os.environ.get("SERVICE", "http://127.0.0.1:1"), poll_interval=0.02
    ),
)
def test_remote(row: EvaluationRow) -> EvaluationRow:
    return scored(row)


if os.environ.get("ROWS_OF_MRL"):

    @evaluation_test(
        input_dataset=[os.environ["ROWS_OF_MRL"]], rollout_processor=NoOpRolloutProcessor(), passed_threshold=0.01
    )
    def test_read(row: EvaluationRow) -> EvaluationRow:
        assert row.execution_metadata.usage.total_tokens == 10
        return scored(row)
