"""Evaluation tests from rows to a number: with an endpoint and with a checkpoint, in every mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import ConfigError, RewardError
from mrl.evals import (
    BackoffConfig,
    EvaluateResult,
    EvaluationRow,
    ExceptionHandlerConfig,
    Message,
    MetricResult,
    NoOpRolloutProcessor,
    SingleTurnRolloutProcessor,
    evaluation_test,
    run_test,
)
from mrl.evals.episode import turns_of
from mrl.store.run import read_rows
from mrl.types import Sample
from tests.evals.chat_server import ChatServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ChatServer]:
    """Says what the last message says, backwards."""
    monkeypatch.setenv("MRL_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    with ChatServer(lambda body: body["messages"][-1]["content"][::-1]).running() as running:
        yield running


def asked(*texts: str) -> dict[str, Any]:
    return {"input_messages": [[[Message(role="user", content=text)] for text in texts]]}


def ends_with_a() -> Any:
    """A test that is nobody's to collect."""
    params = {"completion_params": [{"model": "m"}], "num_runs": 2, "passed_threshold": 0.5}
    return evaluation_test(**asked("abc", "xyz"), **params)(_ends_with_a)


def _ends_with_a(row: EvaluationRow) -> EvaluationRow:
    """The answer has to end with an a."""
    text = row.last_assistant_message().text
    row.evaluation_result = EvaluateResult(
        score=float(text.endswith("a")), metrics={"length": MetricResult(score=len(text), reason="characters")}
    )
    return row


async def test_against_an_endpoint_with_its_record(server: ChatServer) -> None:
    (report,) = await run_test(ends_with_a(), model=server.url, options={"temperature": 0.5})
    assert (report.found.score, report.rows, report.runs, report.passed) == (0.5, 2, 2, True)
    assert report.failure is None
    assert report.metrics["length"].mean == 3.0
    assert {body["temperature"] for body in server.asked} == {0.5}
    assert {body["model"] for body in server.asked} == {"m"}
    assert report.run_dir is not None
    recorded = list(read_rows(report.run_dir, "eval_rollouts"))
    assert sorted(one["reward"] for one in recorded) == [0.0, 0.0, 1.0, 1.0]
    (metrics,) = read_rows(report.run_dir, "eval_metrics")
    assert metrics["eval/score"] == 0.5
    assert metrics["eval/metrics/length"] == 3.0
    lines = (report.run_dir / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [EvaluationRow.model_validate(json.loads(line)) for line in lines]
    assert [row.messages[-1].text for row in rows] == ["cba", "zyx"] * 2
    assert len({row.execution_metadata.run_id for row in rows}) == 2
    assert len({row.execution_metadata.rollout_id for row in rows}) == 4
    assert {row.execution_metadata.usage.total_tokens for row in rows} == {10}
    assert all(row.eval_metadata.passed for row in rows)
    assert {row.evaluation_result.agg_score for row in rows} == {0.5}


async def test_below_the_threshold_it_fails(server: ChatServer) -> None:
    @evaluation_test(**asked("xyz"), completion_params=[{"model": "m", "base_url": server.url}], passed_threshold=0.5)
    def never(row: EvaluationRow) -> EvaluationRow:
        row.evaluation_result = EvaluateResult(score=0.25)
        return row

    (report,) = await run_test(never, record=False)
    assert report.failure == "the score 0.250 is below the threshold 0.5"
    assert report.run_dir is None


async def test_groups_are_the_attempts_at_a_row(server: ChatServer) -> None:
    seen = []

    @evaluation_test(**asked("ab", "cd"), completion_params=[{"model": "m"}], mode="groupwise", num_runs=3)
    def ranked(rows: list[EvaluationRow]) -> list[EvaluationRow]:
        seen.append([row.messages[0].text for row in rows])
        for place, row in enumerate(rows):
            row.evaluation_result = EvaluateResult(score=place / 2)
        return rows[::-1]  # in any order

    (report,) = await run_test(ranked, model=server.url, record=False)
    assert sorted(seen) == [["ab"] * 3, ["cd"] * 3]
    assert [row.evaluation_result.score for row in report.done] == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]


async def test_groups_of_several_completion_params(server: ChatServer) -> None:
    seen = []

    @evaluation_test(**asked("ab", "cd"), completion_params=[{"model": "m"}, {"model": "n"}], mode="groupwise")
    def compared(rows: list[EvaluationRow]) -> list[EvaluationRow]:
        seen.append([row.input_metadata.completion_params["model"] for row in rows])
        for row in rows:
            row.evaluation_result = EvaluateResult(score=float(row.input_metadata.completion_params["model"] == "n"))
        return rows

    reports = await run_test(compared, model=server.url, record=False)
    assert seen == [["m", "n"], ["m", "n"]]
    assert [report.found.score for report in reports] == [0.0, 1.0]


async def test_all_rows_of_a_run_at_once(server: ChatServer) -> None:
    seen = []

    @evaluation_test(**asked("ab", "cd", "ef"), completion_params=[{"model": "m"}], mode="all", num_runs=2)
    def together(rows: list[EvaluationRow]) -> list[EvaluationRow]:
        seen.append([row.messages[-1].text for row in rows])
        for row in rows:
            row.evaluation_result = EvaluateResult(score=1 / len(rows))
        return rows

    (report,) = await run_test(together, model=server.url, record=False)
    assert seen == [["ba", "dc", "fe"]] * 2
    assert report.found.score == pytest.approx(1 / 3)


async def test_what_cannot_be_scored_is_counted_and_no_0(server: ChatServer) -> None:
    @evaluation_test(**asked("ab", "skip", "raise"), completion_params=[{"model": "m"}])
    def picky(row: EvaluationRow) -> EvaluationRow:
        if row.messages[0].text == "raise":
            raise ValueError("cannot read it")
        row.evaluation_result = EvaluateResult(
            score=1.0, is_score_valid=row.messages[0].text != "skip", reason="nothing to say"
        )
        return row

    (report,) = await run_test(picky, model=server.url, record=False)
    assert report.found.score == 1.0
    assert (report.unscored, report.errors) == (2, 1)
    assert report.failure is not None
    assert "the test raised an exception" in report.failure


async def test_an_attempt_that_fails_is_no_wrong_answer(server: ChatServer) -> None:
    server.says = lambda body: 400 if body["messages"][-1]["content"] == "bad" else "a"
    seen = []

    @evaluation_test(**asked("ok", "bad"), completion_params=[{"model": "m"}])
    def scored(row: EvaluationRow) -> EvaluationRow:
        seen.append(row.messages[0].text)
        row.evaluation_result = EvaluateResult(score=1.0)
        return row

    (report,) = await run_test(scored, model=server.url, record=False)
    assert seen == ["ok"]
    assert (report.found.score, report.unscored, report.errors) == (1.0, 1, 0)
    assert "HTTP 400" in (report.unscored_because or "")
    assert report.done[1].rollout_status.is_error()


async def test_servers_that_are_busy_are_asked_again(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([503, 429, "a"])
    server.says = lambda body: next(answers)
    monkeypatch.setattr("mrl.rollouts.endpoint.FIRST_WAIT", 0.01)
    (report,) = await run_test(ends_with_a(), model=server.url, num_runs=1, record=False, options={"max_tokens": 5})
    assert report.unscored < 2
    assert {body["max_tokens"] for body in server.asked} == {5}


async def test_tools_are_shown_and_called_by_nobody(server: ChatServer) -> None:
    function = {"name": "search", "arguments": '{"query": "x"}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    server.says = lambda body: {"role": "assistant", "content": None, "tool_calls": calls}
    spec = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
    given = EvaluationRow(messages=[Message(role="user", content="find")], tools=[spec])

    @evaluation_test(input_rows=[[given]], completion_params=[{"model": "m"}])
    def called(row: EvaluationRow) -> EvaluationRow:
        call = row.last_assistant_message().tool_calls[0]
        row.evaluation_result = EvaluateResult(score=float(json.loads(call.function.arguments) == {"query": "x"}))
        return row

    (report,) = await run_test(called, model=server.url, record=False)
    assert report.found.score == 1.0
    assert server.asked[0]["tools"] == [spec]
    assert report.done[0].execution_metadata.tool_call_count == 1


async def test_rows_with_their_answers_need_no_model(tmp_path: Path) -> None:
    answered = EvaluationRow(messages=[Message(role="user", content="a"), Message(role="assistant", content="b")])

    @evaluation_test(input_rows=[[answered]], rollout_processor=NoOpRolloutProcessor())
    def reads(row: EvaluationRow) -> EvaluationRow:
        row.evaluation_result = EvaluateResult(score=float(row.last_assistant_message().text == "b"))
        return row

    (report,) = await run_test(reads, record=False)
    assert report.found.score == 1.0


async def test_with_a_checkpoint_its_tokens_are_recorded(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (report,) = await run_test(
        ends_with_a(), model=tiny_model, options={"max_tokens": 6, "device": "cpu", "dtype": "float32"}
    )
    assert report.unscored == 0
    assert report.run_dir is not None
    for one in read_rows(report.run_dir, "eval_rollouts"):
        (sample,) = one["samples"]
        assert 1 <= len(sample["completion_ids"]) <= 6
        assert len(sample["logprobs"]) == len(sample["completion_ids"])
        (row,) = [row for row in report.done if row.execution_metadata.rollout_id == one["extra"]["rollout_id"]]
        episode = row.execution_metadata.extra["full_episode"]
        before = len(sample["prompt_ids"])
        assert episode["token_ids"] == sample["prompt_ids"] + sample["completion_ids"]
        assert episode["mask"] == [0] * before + [1] * len(sample["completion_ids"])
        assert episode["logprobs"] == [None] * before + sample["logprobs"]
        assert (len(episode["detokenized_tokens"]), episode["num_turns"]) == (len(episode["token_ids"]), 1)


def test_turns_are_counted() -> None:
    sample = Sample([1], [2, 3, 4, 5, 6], [-1.0] * 5, [1, 1, 0, 1, 0], 0)
    assert turns_of(sample) == [1, 1, 0, 2, 0]


async def test_nothing_says_which_model() -> None:
    @evaluation_test(**asked("a"))
    def scored(row: EvaluationRow) -> EvaluationRow:
        return row

    with pytest.raises(ConfigError, match="give --model"):
        await run_test(scored)


async def test_a_function_that_returns_no_rows(server: ChatServer) -> None:
    @evaluation_test(**asked("a"), completion_params=[{"model": "m"}])
    def forgets(row: EvaluationRow) -> EvaluationRow:
        row.evaluation_result = EvaluateResult(score=1.0)
        return None  # type: ignore[return-value]

    with pytest.raises(RewardError, match="forgets returned None"):
        await run_test(forgets, model=server.url, record=False)

    @evaluation_test(**asked("a"), completion_params=[{"model": "m"}])
    def empty(row: EvaluationRow) -> EvaluationRow:
        return row

    with pytest.raises(RewardError, match="without evaluation_result"):
        await run_test(empty, model=server.url, record=False)


async def test_errors_that_may_pass_are_tried_again(server: ChatServer) -> None:
    handler = ExceptionHandlerConfig(backoff_config=BackoffConfig(base_delay=0.01, max_tries=3))
    answers = iter([400, 400, "fine"])
    server.says = lambda body: next(answers)

    @evaluation_test(**asked("a"), completion_params=[{"model": "m"}], exception_handler_config=handler)
    def scored(row: EvaluationRow) -> EvaluationRow:
        row.evaluation_result = EvaluateResult(score=float(row.messages[-1].text == "fine"))
        return row

    (report,) = await run_test(scored, model=server.url, record=False)
    assert report.found.score == 1.0
    answers = iter([400] * 9)
    (report,) = await run_test(scored, model=server.url, record=False)
    assert (report.unscored, len(server.asked)) == (1, 6)


async def test_options_of_a_processor_are_its_constructors(server: ChatServer) -> None:
    @evaluation_test(
        **asked("a"), rollout_processor=SingleTurnRolloutProcessor(), rollout_processor_kwargs={"retries": 2}
    )
    def scored(row: EvaluationRow) -> EvaluationRow:
        return row

    with pytest.raises(ConfigError, match="takes its options in its constructor"):
        await run_test(scored, model=server.url)


async def test_an_endpoint_that_is_down_or_needs_a_key_is_known_before(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "EP_LLM_API_BASE", "EP_LLM_BASE_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    test = ends_with_a()
    with pytest.raises(ConfigError, match=r"--model http://127\.0\.0\.1:9/v1: .*All connection attempts failed"):
        await run_test(test, model="http://127.0.0.1:9/v1", record=False)
    down = evaluation_test(**asked("a"), completion_params=[{"model": "m", "base_url": "http://127.0.0.1:9/v1"}])
    with pytest.raises(ConfigError, match=r"nothing answers at http://127\.0\.0\.1:9/v1 .*where m is to be asked"):
        await run_test(down(_ends_with_a), record=False)
    server.key = "k"
    locked = evaluation_test(**asked("a"), completion_params=[{"model": "m", "base_url": server.url}])(_ends_with_a)
    for given in ({"test": test, "model": server.url}, {"test": locked}):
        with pytest.raises(ConfigError, match="needs a key: put one into the environment variable OPENAI_API_KEY"):
            await run_test(**given, record=False)
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    with pytest.raises(ConfigError, match="refuses the key: put one into"):
        await run_test(test, model=server.url, record=False)
    assert server.asked == []
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    (report,) = await run_test(test, model=server.url, record=False)
    assert report.unscored == 0


@pytest.mark.parametrize(
    ("models", "named", "asks"),
    [
        (("served",), "openai/gpt", "served"),
        (("gpt", "other"), "openai/gpt", "gpt"),
        (("openai/gpt-oss",), "openai/gpt-oss", "openai/gpt-oss"),
        (("a", "b"), "openai/gpt", None),
    ],
)
async def test_at_an_address_its_own_model_is_asked(
    server: ChatServer, models: tuple[str, ...], named: str, asks: str | None
) -> None:
    server.models = models
    test = evaluation_test(**asked("a"), completion_params=[{"model": named}])(_ends_with_a)
    if asks is None:
        with pytest.raises(ConfigError, match=r"2 models \(a, b\), and no gpt; say which with"):
            await run_test(test, model=server.url, record=False)
        return
    await run_test(test, model=server.url, record=False)
    assert [body["model"] for body in server.asked] == [asks]


async def test_who_a_policy_factory_makes_is_asked_where_no_model_is_given(server: ChatServer) -> None:
    from tests.processors.test_openenv_processor import processor

    @evaluation_test(
        **asked("go"), completion_params=[{"model": "m", "base_url": server.url}], rollout_processor=processor()
    )
    def played(row: EvaluationRow) -> EvaluationRow:
        said = [message.text for message in row.get_assistant_messages()]
        row.evaluation_result = EvaluateResult(score=float(said == ["move 0", "move 1", "move 2"]))
        return row

    (report,) = await run_test(played, record=False)
    assert (report.found.score, server.asked) == (1.0, [])
    await run_test(played, model=server.url, record=False)
    assert len(server.asked) == 3
