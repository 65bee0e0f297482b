"""Verdicts on several completions of a task in one request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mrl.rewards.judge import Judge
from mrl.rewards.judge.judge import _label
from tests.rewards.judge.asked import rows, score
from tests.rewards.judge.server import JudgeServer, texts_shown


def test_an_order_becomes_shares_of_the_group(server: JudgeServer) -> None:
    judge = Judge(**server.options(groupwise="order"))
    group = rows("a", "aaaa", "bb", "cc", "aaaa", task="one") + rows("b", "bb", task="two")
    scores = score(judge, group)
    assert scores.values == [0.0, 0.875, 0.375, 0.375, 0.875, 0.0, 1.0]
    assert sorted(len(texts_shown(body)) for body in server.bodies) == [2, 4]  # equal ones are shown once


def test_scores_of_a_group(server: JudgeServer) -> None:
    judge = Judge(**server.options(groupwise="scores", rubric="Compare {completions} for {prompt}, {hint}."))
    assert score(judge, rows("a", "aaaa", "a", hint="h")).values == [0.1, 0.4, 0.1]
    assert score(judge, rows("aa", hint="h")).values == [0.2]
    assert server.bodies[0]["messages"][1]["content"].endswith("for say it, h.")


def test_the_order_shown_is_by_seed_and_not_by_place(server: JudgeServer) -> None:
    texts = [chr(ord("a") + k) * (k + 1) for k in range(8)]

    def shown(seed: int, *completions: str) -> list[str]:
        server.reset()
        score(Judge(**server.options(groupwise="order", seed=seed)), rows(*completions))
        return list(texts_shown(server.bodies[0]).values())

    assert shown(0, *texts) == shown(0, *reversed(texts)) != shown(1, *texts)
    server.reset()
    votes = score(Judge(**server.options(groupwise="order", samples=4)), rows(*texts))
    assert len({tuple(texts_shown(body).values()) for body in server.bodies}) == 4
    assert votes.values == pytest.approx([k / 7 for k in range(8)])


@pytest.mark.parametrize("order", [["A"], ["A", "B", "B"], ["A", "B", "C"], "AB", [["A", "B"], "A"], None, [1, 2]])
def test_an_order_that_is_none_is_asked_for_once_more(server: JudgeServer, order: Any) -> None:
    server.respond = lambda body, number: json.dumps({"order": order if number == 0 else ["A", "B"]})
    scores = score(Judge(**server.options(groupwise="order")), rows("x", "y"))
    assert sorted(scores.values) == [0.0, 1.0]
    assert len(server.bodies) == 2
    server.reset()
    server.respond = lambda body, number: json.dumps({"order": order})
    scores = score(Judge(**server.options(groupwise="order")), rows("x", "y"))
    assert scores.values == [None, None]
    assert all("does not name A, B, each once" in said for said in scores.errors.values())


def test_groups_without_anything_to_compare(server: JudgeServer) -> None:
    scores = score(Judge(**server.options(groupwise="order")), rows("x", "x", task="one") + rows("x", task="two"))
    assert scores.values == [0.5, 0.5, None]
    assert "alone has no place in an order" in scores.errors[2]
    assert not server.bodies


def test_labels() -> None:
    assert [_label(k) for k in (0, 25, 26, 27, 51, 52, 701, 702)] == ["A", "Z", "AA", "AB", "AZ", "BA", "ZZ", "AAA"]
