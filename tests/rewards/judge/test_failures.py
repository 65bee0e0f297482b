"""A judge that is down, slow, odd or out of reach: reasons, and never a score."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
from fastapi import Response

from mrl.errors import RewardError
from mrl.rewards.judge import Judge
from mrl.workers.reward import RewardWorker
from tests.rewards.judge.asked import metric, rows, score
from tests.rewards.judge.server import JudgeServer, chat, error, texts_shown


def test_what_passes_is_tried_again(server: JudgeServer) -> None:
    troubles = [error(429, "slow down", {"Retry-After": "0"}), error(500, "oops"), Respond200, error(503, "")]
    server.respond = lambda body, number: troubles[number] if number < len(troubles) else '{"score": 6}'
    scores = score(Judge(**server.options()), rows("x"))
    assert scores.values == [0.6]
    assert (metric(scores, "requests"), metric(scores, "retries")) == (1, 4)


Respond200 = {"something": "else"}


def test_retry_after_is_kept(server: JudgeServer) -> None:
    from time import monotonic

    times: list[float] = []

    def respond(body: dict[str, Any], number: int) -> Any:
        times.append(monotonic())
        return '{"score": 6}' if number else error(429, "slow down", {"Retry-After": "0.3"})

    server.respond = respond
    assert score(Judge(**server.options()), rows("x")).values == [0.6]
    assert times[1] - times[0] >= 0.3


@pytest.mark.parametrize(
    ("respond", "tries", "because"),
    [
        (lambda body, number: error(500, "it broke"), 3, "answered 500: it broke (3 tries)"),
        (lambda body, number: error(429, "wait", {"Retry-After": "86400"}), 1, "answered 429: wait"),
        (lambda body, number: error(429, "no money", code="insufficient_quota"), 1, "answered 429: no money"),
        (lambda body, number: error(401, "wrong key"), 1, "answered 401: wrong key"),
        (lambda body, number: {"choices": []}, 3, "what is no chat completion"),
        (lambda body, number: Response("[" * 100_000, 200), 3, "what is no chat completion"),
        (
            lambda body, number: Response('{"choices": [{"message": {}}], "usage": {"prompt_tokens": 1e999}}', 200),
            3,
            "what is no chat completion",
        ),
        (
            lambda body, number: {**chat("1"), "usage": {"completion_tokens": -(10**30)}},
            3,
            "what is no chat completion",
        ),
        (lambda body, number: Response("[" * 100_000, 403), 1, "answered 403: [[["),
        (lambda body, number: error(400, "too long for me"), 2, "answered 400: too long for me"),
    ],
)
def test_an_outage_is_a_failure_and_never_a_zero(server: JudgeServer, respond: Any, tries: int, because: str) -> None:
    server.respond = respond
    scores = score(Judge(**server.options(retries=2)), rows("x"))
    assert scores.values == [None]
    assert because in scores.errors[0]
    assert len(server.bodies) == tries


def test_a_server_that_is_slow_or_not_there(server: JudgeServer) -> None:
    server.respond = lambda body, number: 5.0
    scores = score(Judge(**server.options(retries=1, timeout=0.05)), rows("x"))
    assert "did not answer within 0.05 s (2 tries)" in scores.errors[0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        scores = score(Judge(**server.options(base_url=url, retries=1)), rows("x", "y"))
    assert scores.values == [None, None]
    assert "could not be reached (ConnectError" in scores.errors[1]


def test_an_outage_is_waited_out_once_and_not_for_each(server: JudgeServer) -> None:
    server.respond = lambda body, number: error(500, "down")
    scores = score(Judge(**server.options(retries=4, concurrency=2)), rows(*"abcdefghij"))
    assert len(scores.errors) == 10
    assert len(server.bodies) <= 2 * 5 + 8
    assert server.most_at_once <= 2


def test_one_that_fails_leaves_the_others(server: JudgeServer) -> None:
    def respond(body: dict[str, Any], number: int) -> Any:
        return error(500, "oops") if "bad" in texts_shown(body).values() else '{"score": 5}'

    server.respond = respond
    report = asyncio.run(RewardWorker(Judge(**server.options(retries=0))).score(rows("good", "bad", "fine")))
    assert [result.reward for result in report.results] == [0.5, None, 0.5]
    assert report.results[1].error is not None
    assert "answered 500" in report.results[1].error


def test_a_row_without_a_column(server: JudgeServer) -> None:
    requests = rows("x", gold="1") + rows("y", gold=None)
    scores = score(Judge(**server.options(rubric="{gold}")), requests)
    assert scores.values == [0.1, None]
    assert "the row has no 'gold'" in scores.errors[1]


def test_the_key_is_in_no_message(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret-123")
    server.respond = lambda body, number: error(401, "x" * 290 + "secret-123 is wrong")
    judge = Judge(**server.options(api_key_env="MY_KEY"))
    said = score(judge, rows("x")).errors[0]
    assert "secr" not in said
    assert "secret" not in repr(judge) + json.dumps(judge.recorded()) + str(pickle.dumps(judge))
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(RewardError, match="api_key_env: MY_KEY is not set"):
        score(judge, rows("x"))


@pytest.mark.parametrize("key", ["secret\n-123", "secret -123", "secret\u2026"])
def test_what_cannot_be_a_key_is_refused_and_in_no_message(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(RewardError, match="api_key_env: MY_KEY holds spaces") as caught:
        score(Judge(**server.options(api_key_env="MY_KEY")), rows("x"))
    assert "secret" not in str(caught.value)
    assert not server.bodies


def test_a_run_that_is_stopped_keeps_what_was_paid_for(server: JudgeServer, tmp_path: Path) -> None:
    server.respond = lambda body, number: 0.2
    judge = Judge(**server.options(cache=str(tmp_path / "c.db")))

    async def stopped() -> None:
        scoring = asyncio.ensure_future(judge.score(rows("a"), trainer_state=None))
        await asyncio.sleep(0.1)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        await asyncio.sleep(0.4)
        await judge.close()

    asyncio.run(stopped())
    assert score(judge, rows("a")).values == [0.1]
    assert len(server.bodies) == 1
