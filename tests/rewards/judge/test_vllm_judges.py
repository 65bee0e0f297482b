"""A judge on a real OpenAI-compatible server: vLLM's, with a model of random weights, whose answers are noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.rewards.judge import Judge
from tests.conftest import VLLM_SHAPE, build_model
from tests.engines.vllm.test_remote import serve
from tests.rewards.judge.asked import metric, rows, score

pytestmark = pytest.mark.vllm


def test_noise_is_failed_and_counted(tmp_path: Path) -> None:
    model = str(build_model(tmp_path / "model", max_position_embeddings=4096, **VLLM_SHAPE))
    with serve(model, tmp_path / "log.txt", "--max-model-len", "4096") as url:
        options: dict[str, Any] = {"model": model, "base_url": url + "/v1", "rubric": "Longer is better."}
        free = Judge(**options, structured=False, max_tokens=50)
        noise = score(free, rows("a", "b"))
        assert noise.values == [None, None]
        assert all("no readable answer in two" in said for said in noise.errors.values())
        assert metric(noise, "requests") == 4
        assert metric(noise, "completion_tokens") == 4 * 50
        held = Judge(**options, max_tokens=400, temperature=1.0)
        scores = score(held, rows("a", "b"))
        for row, value in enumerate(scores.values):  # it keeps to the schema, which has no end of a text, nor a range
            cut = value is None and "it was cut" in scores.errors[row]
            assert cut or (value is None and "no number from 0 to 10" in scores.errors[row]) or 0 <= (value or 0) <= 1
            assert value is not None or "{" in scores.errors[row]
        unknown = score(Judge(**(options | {"model": "another"})), rows("a"))
        assert "answered 404" in unknown.errors[0]
        long = score(Judge(**options), rows("x" * 5000))
        assert "answered 400" in long.errors[0]
