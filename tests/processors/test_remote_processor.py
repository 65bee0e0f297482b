"""Rollouts that a service makes: evaluated with an endpoint, trained on token by token; and agents of other kinds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mrl import MRLTrainer
from mrl.errors import ConfigError
from mrl.evals import (
    EvaluateResult,
    EvaluationRow,
    Message,
    RemoteRolloutProcessor,
    RolloutProcessor,
    RolloutProcessorConfig,
    evaluation_test,
    run_test,
)
from mrl.rollouts.endpoint import Endpoint
from mrl.store.run import read_rows
from mrl.types import SamplingParams
from tests.evals.chat_server import ChatServer
from tests.processors.service import Service
from tests.processors.tracing import Tracing
from tests.small_runs import options


def test_of(processor: Any, **parameters: Any) -> Any:
    @evaluation_test(
        input_messages=[[[Message(role="user", content=f"say {n}")] for n in range(3)]],
        rollout_processor=processor,
        **parameters,
    )
    def scored(row: EvaluationRow) -> EvaluationRow:
        said = row.get_assistant_messages()
        row.evaluation_result = EvaluateResult(score=len({letter for one in said for letter in one.text}) / 10)
        return row

    return scored


test_of.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["log", "status"])
async def test_a_service_asks_an_endpoint_through_the_gateway(how: str) -> None:
    with Service(how).running() as service, ChatServer(lambda body: f"{len(body['messages'])}").running() as chat:
        made = RemoteRolloutProcessor(remote_base_url=service.url, poll_interval=0.02)
        params = [{"model": "m", "base_url": chat.url}]
        (report,) = await run_test(test_of(made, completion_params=params), record=False)
    assert report.unscored == 0, report.unscored_because
    assert {row.messages[-1].text for row in report.done} == {"3"}
    assert {len(row.messages) for row in report.done} == {4}
    assert {row.execution_metadata.usage.total_tokens for row in report.done} == {20}
    init = service.inits[0]
    ids = init["metadata"]
    assert init["model_base_url"].endswith(
        f"/rollout_id/{ids['rollout_id']}/invocation_id/{ids['invocation_id']}/experiment_id/{ids['experiment_id']}"
        f"/run_id/{ids['run_id']}/row_id/{ids['row_id']}"
    )
    assert init["completion_params"] == {"model": "m"}
    assert len({one["metadata"]["rollout_id"] for one in service.inits}) == 3
    if how == "log":
        assert report.done[0].execution_metadata.extra["note"] == 1


@pytest.mark.parametrize(
    ("how", "message"),
    [("fail", "ended with status 13: it broke"), ("idle", "without asking the model at the address")],
)
async def test_a_service_that_fails_is_no_wrong_answer(how: str, message: str) -> None:
    with Service(how).running() as service, ChatServer(lambda body: "x").running() as chat:
        made = RemoteRolloutProcessor(remote_base_url=service.url, poll_interval=0.02)
        params = [{"model": "m", "base_url": chat.url}]
        (report,) = await run_test(test_of(made, completion_params=params), record=False)
    assert report.unscored == 3
    assert message in str(report.unscored_because)


async def test_one_that_never_ends_is_given_up() -> None:
    with Service("log").running() as service, ChatServer(lambda body: "x", seconds=1).running() as chat:
        made = RemoteRolloutProcessor(remote_base_url=service.url, poll_interval=0.02, timeout_seconds=0.1)
        params = [{"model": "m", "base_url": chat.url}]
        (report,) = await run_test(test_of(made, completion_params=params), record=False)
    assert "did not end within 0.1 s (timeout_seconds)" in str(report.unscored_because)


@pytest.mark.parametrize("payloads", [False, True])
async def test_somebody_elses_gateway_keeps_what_was_said(payloads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service asks that gateway, which asks the model; afterwards it is asked for the status and the messages."""
    monkeypatch.setenv("EP_REMOTE_API_KEY", "k")
    with (
        Service("log").running() as service,
        Tracing().running() as tracing,
        ChatServer(lambda body: f"{len(body['messages'])}").running() as chat,
    ):
        made = RemoteRolloutProcessor(
            remote_base_url=service.url, model_base_url=tracing.url, poll_interval=0.02, include_payloads=payloads
        )
        params = [{"model": "m", "base_url": chat.url}]
        (report,) = await run_test(test_of(made, completion_params=params), record=False)
    assert report.unscored == 0, report.unscored_because
    for row in report.done:
        assert [message.role for message in row.messages] == ["user", "assistant", "user", "assistant"]
        assert [message.text for message in row.get_assistant_messages()] == ["1", "3"]
        assert (row.execution_metadata.extra or {}).get("payloads") == ([{"n": 1}] * 2 if payloads else None)
    assert {body["model"] for body in chat.asked} == {"m"}
    assert tracing.keys == {"Bearer k"}


async def test_a_gateway_without_traces_is_no_wrong_answer() -> None:
    with (
        Service("log").running() as service,
        Tracing(forgets=True).running() as tracing,
        ChatServer(lambda body: "x").running() as chat,
    ):
        made = RemoteRolloutProcessor(remote_base_url=service.url, model_base_url=tracing.url, poll_interval=0.02)
        params = [{"model": "m", "base_url": chat.url}]
        (report,) = await run_test(test_of(made, completion_params=params), record=False)
    assert report.unscored == 3
    assert "has no trace of rollout" in str(report.unscored_because)


def test_what_somebody_else_samples_is_not_trained_on(tiny_model: str, tmp_path: Path) -> None:
    made = RemoteRolloutProcessor(remote_base_url="http://127.0.0.1:1", model_base_url="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="RemoteRolloutProcessor makes rollouts whose tokens nobody sees"):
        train(tiny_model, tmp_path / "run", test_of(made))


def train(model: str, folder: Path, test: Any) -> list[dict[str, Any]]:
    given = options(model, folder, evaluation_test=test, max_steps=1, max_tokens=6, max_completion_length=64)
    for name in ("train_dataset", "reward_funcs"):
        del given[name]
    assert MRLTrainer(**given).train().status == "finished"
    return list(read_rows(folder, "rollouts"))


def test_what_a_service_asked_is_trained_on_token_by_token(tiny_model: str, tmp_path: Path) -> None:
    with Service("log").running() as service:
        made = RemoteRolloutProcessor(remote_base_url=service.url, poll_interval=0.02)
        rollouts = train(tiny_model, tmp_path / "run", test_of(made))
    for one in rollouts:
        assert one["status"] == "ok", one["error"]
        assert len(one["messages"]) == 4
        sampled = sum(sum(sample["mask"]) for sample in one["samples"])
        assert 2 <= sampled <= 12
        for sample in one["samples"]:
            told = [logprob for logprob, mask in zip(sample["logprobs"], sample["mask"], strict=True) if mask]
            assert all(logprob < 0 for logprob in told)


class Own(RolloutProcessor):
    """An agent of somebody's own, which asks an endpoint."""

    def __call__(self, rows: list[EvaluationRow], config: RolloutProcessorConfig) -> list[asyncio.Task[EvaluationRow]]:
        async def attempt(row: EvaluationRow) -> EvaluationRow:
            endpoint = Endpoint.of(config.completion_params)
            for _ in range(2):
                asked = [message.plain() for message in row.messages]
                reply = await endpoint.reply(asked, [], SamplingParams(max_tokens=6), 0)
                row.messages.append(Message.of(reply.turn.message))
                row.messages.append(Message(role="user", content="more"))
            await endpoint.close()
            return row

        return [asyncio.create_task(attempt(row)) for row in rows]


def test_an_agent_of_ones_own_is_trained_on(tiny_model: str, tmp_path: Path) -> None:
    rollouts = train(tiny_model, tmp_path / "run", test_of(Own()))
    assert all(one["status"] == "ok" for one in rollouts)
    assert all(sum(sum(sample["mask"]) for sample in one["samples"]) >= 2 for one in rollouts)
