"""With the real eval_protocol (`make eval-protocol`): its JSON both ways, and tests that were written for it."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mrl.evals import (
    EvalMetadata,
    EvaluateResult,
    EvaluationRow,
    EvaluationThreshold,
    InputMetadata,
    Message,
    MetricResult,
    OpenEnvRolloutProcessor,
    RemoteRolloutProcessor,
    RolloutProcessor,
    RolloutProcessorConfig,
    Status,
    StepOutput,
    create_openenv_vllm_rollout_func,
    evaluation_test,
    run_test,
)
from mrl.evaltests.find import find_test, find_tests
from mrl.evaltests.parameters import Parameters
from mrl.evaltests.rows import ExecutionMetadata, Usage
from mrl.evaltests.status import Code
from mrl.processors.source import processor_of
from mrl.store.run import read_rows
from tests.evals.chat_server import ChatServer
from tests.processors.service import Service
from tests.small_runs import options

pytestmark = [
    pytest.mark.eval_protocol,
    pytest.mark.skipif(find_spec("eval_protocol") is None, reason="the package whose tests these are"),
    pytest.mark.filterwarnings("ignore"),
]
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or importing it asks the network
HERE = Path(__file__).parent
WRITTEN = HERE / "written_for_eval_protocol.py"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EP_DISABLE_AUTO_BROWSER", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def whole_row() -> EvaluationRow:
    """A row with something in every field."""
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "ü"}'}}
    parts = [
        {"type": "text", "text": "what is"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    ]
    result = EvaluateResult(
        score=0.25,
        reason="so",
        metrics={"m": MetricResult(score=1.5, reason="r", data={"k": [1]}, is_score_valid=False)},
        step_outputs=[StepOutput(step_index=0, base_reward=0.5, terminated=True, metrics={"x": 1}, reason="s")],
        error="e",
        trajectory_info={"steps": 2},
        final_control_plane_info={"done": True},
        agg_score=0.5,
        standard_error=0.1,
    )
    return EvaluationRow(
        messages=[
            Message(role="system", content="s"),
            Message(role="user", content=parts, name="n", weight=0),
            Message(role="assistant", content=None, tool_calls=[call], reasoning_content="hm", logprobs={"a": 1}),
            Message(role="tool", content="r", tool_call_id="c1", control_plane_step={"reward": 1.0}),
        ],
        tools=[{"type": "function", "function": {"name": "search", "parameters": {}}}],
        input_metadata=InputMetadata(
            row_id="r", completion_params={"model": "m"}, dataset_info={"a": 1}, session_data={"mode": "all"}, more="x"
        ),
        rollout_status=Status.rollout_finished("max_steps"),
        ground_truth={"answer": [1, "two"]},
        evaluation_result=result,
        execution_metadata=ExecutionMetadata(
            run_id="run", usage=Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3), extra={"steps": [0.5]},
            finish_reason="stop", tool_call_count=1, rollout_duration_seconds=0.5, eval_duration_seconds=0.25,
        ),
        eval_metadata=EvalMetadata(
            name="t", description="d", status=Status.eval_finished(), num_runs=2, aggregation_method="mean",
            passed_threshold=EvaluationThreshold(success=0.5, standard_error=0.1), passed=True,
        ),
        pid=7,
    )  # fmt: skip


@pytest.mark.parametrize("row", [EvaluationRow(), whole_row()], ids=["empty", "whole"])
def test_json_both_ways(row: EvaluationRow) -> None:
    from eval_protocol.models import EvaluationRow as Theirs

    theirs = Theirs.model_validate_json(row.model_dump_json())
    again = EvaluationRow.model_validate_json(theirs.model_dump_json())
    assert again.model_dump(exclude_none=True) == row.model_dump(exclude_none=True)
    assert theirs.get_termination_reason() == row.get_termination_reason()
    assert theirs.get_total_reward() == row.get_total_reward()
    assert theirs.rollout_status.is_finished() == row.rollout_status.is_finished()


def test_the_same_fields_and_parameters() -> None:
    import eval_protocol.models as theirs
    from eval_protocol.pytest import evaluation_test as their_test
    from eval_protocol.pytest.openenv_rollout_processor import OpenEnvRolloutProcessor as TheirOpenEnv
    from eval_protocol.pytest.types import RolloutProcessorConfig as TheirConfig

    for ours in (EvaluationRow, EvaluateResult, MetricResult, StepOutput, Message, InputMetadata, ExecutionMetadata,
                 EvalMetadata, EvaluationThreshold, Status):  # fmt: skip
        assert set(ours.model_fields) == set(getattr(theirs, ours.__name__).model_fields), ours.__name__
    assert {one.name: one.value for one in Code} == {one.name: one.value for one in theirs.Status.Code}
    assert names_of(their_test) <= names_of(evaluation_test)
    assert names_of(TheirOpenEnv.__init__) == names_of(OpenEnvRolloutProcessor.__init__)
    assert set(TheirConfig.__dataclass_fields__) <= set(RolloutProcessorConfig.__dataclass_fields__)
    assert set(Parameters.__dataclass_fields__) <= set(theirs.EPParameters.model_fields)


def test_the_same_rollout_func() -> None:
    from eval_protocol.pytest.integrations.openenv_trl_vllm import create_openenv_vllm_rollout_func as theirs

    ours = inspect.signature(create_openenv_vllm_rollout_func).parameters
    assert [(p.name, p.kind) for p in ours.values()] == [
        (p.name, p.kind) for p in inspect.signature(theirs).parameters.values()
    ]


def names_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


# --- tests that were written for it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["test_single", "test_group", "test_own"])
async def test_they_are_run_against_an_endpoint(name: str) -> None:
    assert set(find_tests(str(WRITTEN))) == {"test_single", "test_group", "test_own", "test_remote"}
    with ChatServer(lambda body: body["messages"][-1]["content"] + " abc").running() as server:
        test = find_test(f"{WRITTEN}:{name}")
        params = {"base_url": server.url, "api_key": "none"}
        test.params.completion_params[0].update(params)
        (report,) = await run_test(test)
    assert report.unscored == 0, report.unscored_because
    assert report.found.score == pytest.approx(1.0 if name == "test_group" else 7 / 20)
    assert [row.input_metadata.row_id for row in report.done] == ["row-0", "row-1", "row-2"]
    if name == "test_single":
        assert report.passed is True
        assert report.metrics["length"].mean == len("say 0 abc")
        assert {body["temperature"] for body in server.asked} == {0.5}


@pytest.mark.parametrize("name", ["test_single", "test_group", "test_own"])
def test_they_train(name: str, tiny_model: str, tmp_path: Path) -> None:
    from mrl import MRLTrainer

    given = options(tiny_model, tmp_path / "run", evaluation_test=f"{WRITTEN}:{name}", max_steps=1)
    for unused in ("train_dataset", "reward_funcs"):
        del given[unused]
    assert MRLTrainer(**given).train().status == "finished"
    rollouts = list(read_rows(tmp_path / "run", "rollouts"))
    assert {one["status"] for one in rollouts} == {"ok"}
    for one in rollouts:
        (sample,) = one["samples"]
        assert sum(sample["mask"]) >= 1
        if name != "test_group":
            assert one["reward"] == pytest.approx(len(set(one["messages"][-1]["content"])) / 20)


class Streams(RolloutProcessor):
    """An agent that asks as most do, with OpenAI's client and for a stream."""

    def __call__(self, rows: list[EvaluationRow], config: RolloutProcessorConfig) -> list[asyncio.Task[EvaluationRow]]:
        async def attempt(row: EvaluationRow) -> EvaluationRow:
            from openai import AsyncOpenAI

            params = dict(config.completion_params)
            async with AsyncOpenAI(base_url=params["base_url"], api_key=params["api_key"], max_retries=0) as client:
                text, usage = "", None
                stream = await client.chat.completions.create(
                    model=params["model"], messages=[message.for_completion() for message in row.messages],
                    stream=True, stream_options={"include_usage": True}, max_tokens=6,
                )  # fmt: skip
                async for chunk in stream:
                    text += "".join(choice.delta.content or "" for choice in chunk.choices)
                    usage = chunk.usage or usage
            assert usage is not None
            assert usage.completion_tokens >= 1
            row.messages.append(Message(role="assistant", content=text))
            return row

        return [asyncio.create_task(attempt(row)) for row in rows]


def test_an_agent_with_openais_client_that_streams_is_trained_on(tiny_model: str, tmp_path: Path) -> None:
    from mrl import MRLTrainer

    @evaluation_test(
        input_messages=[[[Message(role="user", content=f"say {n}")] for n in range(3)]], rollout_processor=Streams()
    )
    def letters(row: EvaluationRow) -> EvaluationRow:
        row.evaluation_result = EvaluateResult(score=len(set(row.messages[-1].text)) / 20)
        return row

    given = options(tiny_model, tmp_path / "run", evaluation_test=letters, max_steps=1)
    for unused in ("train_dataset", "reward_funcs"):
        del given[unused]
    assert MRLTrainer(**given).train().status == "finished"
    rollouts = list(read_rows(tmp_path / "run", "rollouts"))
    assert {one["status"] for one in rollouts} == {"ok"}
    assert any(one["reward"] > 0 for one in rollouts)
    assert all(sum(sample["mask"]) >= 1 for one in rollouts for sample in one["samples"])


async def test_their_remote_processor_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with Service("log").running() as service, ChatServer(lambda body: "abc").running() as server:
        monkeypatch.setenv("EP_REMOTE_ROLLOUT_PROCESSOR_BASE_URL", service.url)
        test = find_test(f"{WRITTEN}:test_remote")
        assert isinstance(processor_of(test), RemoteRolloutProcessor)
        test.params.completion_params[0].update({"base_url": server.url})
        (report,) = await run_test(test, record=False)
    assert report.unscored == 0, report.unscored_because
    assert {len(row.messages) for row in report.done} == {4}


async def test_it_reads_and_scores_the_rows_that_were_written_here() -> None:
    @evaluation_test(
        input_messages=[[[Message(role="user", content=f"say {n}")] for n in range(3)]],
        completion_params=[{"model": "m"}],
    )
    def plain(row: EvaluationRow) -> EvaluationRow:
        row.evaluation_result = EvaluateResult(score=1.0)
        return row

    with ChatServer(lambda body: "abcd").running() as server:
        (report,) = await run_test(plain, model=server.url)
    assert report.run_dir is not None
    rows = str((report.run_dir / "rows.jsonl").resolve())
    words = ["-n", "0", "-m", "", "-p", "no:cacheprovider", "-q", f"{WRITTEN}::test_read"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], capture_output=True, text=True, timeout=240, cwd=HERE.parents[1],
        env=os.environ | {"ROWS_OF_MRL": rows, "PYTHONPATH": str(HERE.parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
