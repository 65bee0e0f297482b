"""The `transformers` engine: what is computed once, and rows that come and go."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from mrl.engines.transformers import decode as transformers_decode
from mrl.engines.transformers.decode_queue import Limits
from mrl.engines.transformers.engine import TransformersEngine
from mrl.engines.transformers.trial import make_causal_lm
from mrl.types import Completion, GenerateRequest, SamplingParams
from tests.engines.small_models import (
    InputShapes,
    assert_same,
    build,
    generate,
    greedy_reference,
    prompts_of,
    requests_for,
)
from tests.soak import but


def test_shared_prompts_are_computed_once(engine, qwen):
    with InputShapes(qwen) as shapes:
        generate(engine, requests_for(prompts_of([12, 12]), SamplingParams(max_tokens=5), copies=9))
    assert shapes.seen == [(2, 12)] + [(18, 1)] * 4


def test_finished_rows_leave_the_batch(engine, qwen):
    prompt = prompts_of([6])[0]
    requests = [GenerateRequest(str(n), prompt, SamplingParams(max_tokens=n), n) for n in range(1, 9)]
    with InputShapes(qwen) as shapes:
        generate(engine, requests)
    rows = [rows for rows, columns in shapes.seen if columns == 1]
    assert rows == [8, 6, 6, 4, 3, 2, 1]


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("architecture", but(("mistral",), ["gpt2", "mistral", "lfm2"]))
def test_looking_less_often_for_finished_rows_changes_nothing(architecture, rows, monkeypatch):
    model = build(architecture)
    engine = TransformersEngine(model, None, max_model_len=128, max_rows=rows)
    sampling = SamplingParams(max_tokens=125, stop_token_ids=(1, 2, 3, 4))
    requests = requests_for(prompts_of([4, 120]), sampling, copies=6)  # finished long rows run past their last position
    expected = generate(engine, requests)
    monkeypatch.setitem(transformers_decode.STEPS_PER_CHECK, "cpu", 7)
    got = generate(engine, requests)
    assert [(c.token_ids, c.finish_reason) for c in got] == [(c.token_ids, c.finish_reason) for c in expected]


def test_prefill_is_cut_by_tokens_and_merged(qwen):
    prompts = prompts_of([30, 5, 30, 11, 6])
    requests = requests_for(prompts, SamplingParams(max_tokens=6), copies=2)
    engine = TransformersEngine(qwen, None, max_model_len=40)
    expected = generate(engine, requests)
    engine._limits = Limits(max_model_len=40, max_batch_tokens=10_000, max_rows=99, prefill_tokens=40)
    with InputShapes(qwen) as shapes:
        got = generate(engine, requests)
    assert shapes.seen == [(1, 30), (1, 30), (3, 11)] + [(10, 1)] * 5
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]


def test_the_cache_grows_beyond_its_first_room(monkeypatch, qwen):
    monkeypatch.setattr("mrl.engines.transformers.decode.FIRST_ROOM", 4)
    engine = TransformersEngine(qwen, None, max_model_len=128)
    prompt = prompts_of([6])[0]
    got = generate(engine, requests_for([prompt], SamplingParams(temperature=0, max_tokens=60)))[0]
    assert got.token_ids == greedy_reference(qwen, prompt, 60)


def run_with(
    model: PreTrainedModel, requests: list[GenerateRequest], **limits: int
) -> tuple[list[Completion], list[tuple[int, int]]]:
    """Completions under the limits, and the shapes that went through the model."""
    engine = TransformersEngine(model, None, max_model_len=128, **limits)
    with InputShapes(model) as shapes:
        completions = generate(engine, requests)
    engine.close()
    return completions, shapes.seen


def test_waiting_requests_take_the_places_of_those_that_ended(model):
    """With 4 rows, 4 long completions and 36 short ones: nothing waits for the long ones, and nothing changes."""
    prompts = prompts_of([21, 9, 14, 3, 30])
    lengths = [80 if number % 10 == 0 else 2 + number % 7 for number in range(40)]
    requests = [
        GenerateRequest(str(n), prompts[n % 5], SamplingParams(max_tokens=length), n)
        for n, length in enumerate(lengths)
    ]
    expected, _ = run_with(model, requests)
    got, shapes = run_with(model, requests, max_rows=4)
    assert_same(got, expected)
    steps = [rows for rows, columns in shapes if columns == 1]
    assert max(steps) == 4
    if make_causal_lm(model, 128, None).replaces_rows:
        assert len(steps) < 1.6 * sum(lengths) / 4
        assert sum(rows for rows, columns in shapes if columns > 1) == len(prompts)


def test_a_prompt_whose_requests_do_not_fit_together_is_computed_once(qwen):
    requests = requests_for(prompts_of([50, 7]), SamplingParams(max_tokens=6), copies=9)
    got, shapes = run_with(qwen, requests, max_rows=2)
    assert [shape for shape in shapes if shape[1] > 1] == [(1, 50), (1, 7)]
    assert [c.token_ids for c in got] == [c.token_ids for c in run_with(qwen, requests)[0]]


def test_rows_and_their_longest_length_stay_within_the_limits(qwen):
    requests = requests_for(prompts_of([10, 20, 10]), SamplingParams(max_tokens=10), copies=6)

    def most_rows(**limits: int) -> int:
        return max(rows for rows, columns in run_with(qwen, requests, **limits)[1] if columns == 1)

    assert most_rows() == 18
    assert most_rows(max_rows=12) == 12
    assert most_rows(max_batch_tokens=150) == 7  # of 20 tokens; 5 of 30
    assert most_rows(max_batch_tokens=150, max_rows=6) == 6


def test_what_all_prompts_begin_with_is_computed_once(qwen):
    beginning, *rests = prompts_of([40, 3, 17, 9])
    requests = requests_for([beginning + rest for rest in rests], SamplingParams(max_tokens=5), copies=2)
    got, shapes = run_with(qwen, requests)
    assert shapes == [(1, 40), (3, 17)] + [(6, 1)] * 4
    for request, completion in zip(requests, got, strict=True):
        assert completion.token_ids == run_with(qwen, [request])[0][0].token_ids
    apart = requests_for([(1, *beginning), (2, *beginning)], SamplingParams(max_tokens=2))
    assert run_with(qwen, apart)[1][0] == (2, 41)
