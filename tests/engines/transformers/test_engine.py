"""The `transformers` engine: the right tokens and logprobs for every kind of model, ends and refusals."""

from __future__ import annotations

import asyncio
import re

import pytest
import torch
from transformers import (
    T5Config,
    T5ForConditionalGeneration,
)

from mrl.engines.transformers import score as transformers_score
from mrl.engines.transformers.engine import TransformersEngine
from mrl.errors import EngineError, SyncError
from mrl.types import GenerateRequest, SamplingParams, TokenSequence, WeightRef
from tests.engines.small_models import (
    FULL_ATTENTION,
    VOCAB,
    build,
    fresh_logprobs,
    generate,
    greedy_reference,
    prompts_of,
    requests_for,
)
from tests.soak import slow_but

# --- the right tokens and logprobs, for every kind of model ----------------------------------------------------------


def test_greedy_equals_generate_on_ragged_prompts(model):
    prompts = prompts_of([3, 17, 9, 17, 1, 12])
    engine = TransformersEngine(model, None, max_model_len=128)
    got = generate(engine, requests_for(prompts, SamplingParams(temperature=0, max_tokens=20)))
    for prompt, completion in zip(prompts, got, strict=True):
        assert completion.token_ids == greedy_reference(model, prompt, 20)
        assert completion.finish_reason == "length"
        assert completion.logprobs == [0.0] * 20
    assert asyncio.run(engine.sampled_tokens()) == 6 * 20


def test_logprobs_are_those_of_a_fresh_forward(model):
    requests = requests_for(prompts_of([2, 14, 8]), SamplingParams(temperature=0.8, max_tokens=15), copies=3)
    engine = TransformersEngine(model, None, max_model_len=128)
    completions = generate(engine, requests)
    sequences = [
        TokenSequence(r.prompt_ids, tuple(c.token_ids), 0.8) for r, c in zip(requests, completions, strict=True)
    ]
    scored = asyncio.run(engine.logprobs(sequences))
    for sequence, completion, score in zip(sequences, completions, scored, strict=True):
        expected = fresh_logprobs(model, sequence)
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)
        assert score == pytest.approx(expected, abs=1e-5)


def test_scoring_in_pieces_gives_the_same_logprobs(model, monkeypatch):
    sequences = [
        TokenSequence(p[:n], p[n:], 1.3) for p, n in zip(prompts_of([30, 22, 22, 9]), (4, 20, 1, 5), strict=True)
    ]
    engine = TransformersEngine(model, None, max_model_len=128)
    monkeypatch.setattr(transformers_score, "MAX_LOGITS", 4 * VOCAB * 5)
    for sequence, score in zip(sequences, asyncio.run(engine.logprobs(sequences)), strict=True):
        assert score == pytest.approx(fresh_logprobs(model, sequence), abs=1e-4)


@pytest.mark.parametrize(
    "sampling",
    slow_but(
        [SamplingParams(0.7, 0.9, 8, 0.05)],
        [
            SamplingParams(top_p=0.7),
            SamplingParams(top_k=5),
            SamplingParams(min_p=0.1),
            SamplingParams(0.7, 0.9, 8, 0.05),
        ],
    ),
    ids=["top_p", "top_k", "min_p", "all"],
)
def test_filtered_logprobs_are_renormalised(engine, qwen, sampling):
    requests = requests_for(prompts_of([6, 6, 11]), sampling, copies=4)
    for request, completion in zip(requests, generate(engine, requests), strict=True):
        ids = torch.tensor([request.prompt_ids + tuple(completion.token_ids)])
        with torch.no_grad():
            logits = qwen(ids).logits[0, len(request.prompt_ids) - 1 : -1] / sampling.temperature
        for step, token in enumerate(completion.token_ids):
            probs = logits[step].softmax(-1)
            kept = probs >= sampling.min_p * probs.max()
            if sampling.top_k:
                kept &= probs >= probs.topk(sampling.top_k).values[-1]
            probs = torch.where(kept, probs, 0.0) / probs[kept].sum()
            order = probs.argsort(descending=True)
            nucleus = order[: int((probs[order].cumsum(0) < sampling.top_p).sum()) + 1]
            assert token in nucleus
            expected = (probs[token] / probs[nucleus].sum()).log().item()
            assert completion.logprobs[step] == pytest.approx(expected, abs=1e-4)


def test_a_request_does_not_depend_on_its_neighbours(model):
    engine = TransformersEngine(model, None, max_model_len=128, max_batch_tokens=1200)
    alone = requests_for(prompts_of([10]), SamplingParams(max_tokens=16))[0]
    first = generate(engine, [alone])[0]
    crowd = requests_for(prompts_of([3, 10, 25, 7, 18]), SamplingParams(temperature=0.9, top_p=0.8, max_tokens=24), 8)
    for order in (1, -1):
        requests = [*crowd[:21], alone, *crowd[21:]][::order]
        completions = generate(engine, requests)
        assert [c.request_id for c in completions] == [r.id for r in requests]
        again = completions[requests.index(alone)]
        assert again.token_ids == first.token_ids
        assert again.logprobs == pytest.approx(first.logprobs, abs=1e-4)


def test_different_seeds_give_different_completions(engine):
    completions = generate(engine, requests_for(prompts_of([5]), SamplingParams(max_tokens=30), copies=20))
    assert len({tuple(c.token_ids) for c in completions}) == 20


# --- when completions end ---------------------------------------------------------------------------------------------


def test_stop_ids_end_a_completion_and_are_kept(engine, qwen):
    long = generate(engine, requests_for(prompts_of([8, 13]), SamplingParams(max_tokens=40), copies=6))
    stopping = generate(
        engine, requests_for(prompts_of([8, 13]), SamplingParams(max_tokens=40, stop_token_ids=(7, 19)), copies=6)
    )
    ended = 0
    for whole, cut in zip(long, stopping, strict=True):
        hits = [i for i, token in enumerate(whole.token_ids) if token in (7, 19)]
        end = hits[0] + 1 if hits else 40
        ended += bool(hits)
        assert cut.token_ids == whole.token_ids[:end]
        assert cut.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-4)
        assert cut.finish_reason == ("stop" if hits else "length")
    assert ended > 0


def test_the_models_own_eos_ids_end_a_completion(qwen):
    class Tokenizer:
        eos_token_id = 5

    qwen.generation_config.eos_token_id, before = [3, 4], qwen.generation_config.eos_token_id
    try:
        engine = TransformersEngine(qwen, Tokenizer(), max_model_len=128)
    finally:
        qwen.generation_config.eos_token_id = before
    completions = generate(engine, requests_for(prompts_of([8]), SamplingParams(temperature=3.0, max_tokens=100), 30))
    assert {c.token_ids[-1] for c in completions if c.finish_reason == "stop"} == {3, 4, 5}
    assert all(not {3, 4, 5}.intersection(c.token_ids[:-1]) for c in completions)


def test_length_limits_are_per_request_and_per_model(qwen):
    engine = TransformersEngine(qwen, None, max_model_len=20)
    short, long = prompts_of([4, 17])
    requests = [
        GenerateRequest("a", short, SamplingParams(max_tokens=1), 1),
        GenerateRequest("b", short, SamplingParams(max_tokens=9), 2),
        GenerateRequest("c", long, SamplingParams(max_tokens=9), 3),
        GenerateRequest("d", short, SamplingParams(max_tokens=900), 4),
    ]
    completions = generate(engine, requests)
    assert [len(c.token_ids) for c in completions] == [1, 9, 3, 16]
    assert {c.finish_reason for c in completions} == {"length"}
    assert [len(c.logprobs) for c in completions] == [1, 9, 3, 16]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerateRequest("r7", (), SamplingParams(), 0), "'r7' has an empty prompt"),
        (GenerateRequest("r7", (1,) * 128, SamplingParams(), 0), r"'r7' has a prompt of 128 tokens.*127"),
        (GenerateRequest("r7", (1, VOCAB), SamplingParams(), 0), "'r7' has id 61 in its prompt.*61 ids"),
        (GenerateRequest("r7", (1, -1), SamplingParams(), 0), "'r7' has id -1"),
        (GenerateRequest("r7", (1,), SamplingParams(), -3), "'r7' has seed -3"),
        (GenerateRequest("r7", (1,), SamplingParams(temperature=-1.0), 0), "'r7' has temperature=-1.0"),
        (GenerateRequest("r7", (1,), SamplingParams(temperature=float("nan")), 0), "temperature=nan"),
        (GenerateRequest("r7", (1,), SamplingParams(top_p=0.0, max_tokens=0), 0), "top_p=0.0.*max_tokens=0"),
        (GenerateRequest("r7", (1,), SamplingParams(top_k=-1, min_p=1.5), 0), "top_k=-1.*min_p=1.5"),
        (GenerateRequest("r7", (1,), SamplingParams(top_k=2**70), 0), r"from 0 to 2\*\*31 - 1"),
        (GenerateRequest("r7", (1,), SamplingParams(stop=("",)), 0), "empty string"),
        (GenerateRequest("r7", (1,), SamplingParams(stop=("x",)), 0), "tokenizer"),
    ],
)
def test_impossible_requests_are_refused_by_name_and_take_no_other_with_them(engine, request_, message):
    good = requests_for(prompts_of([3]), SamplingParams(max_tokens=2))
    alone = generate(engine, good)
    *served, refused = generate(engine, [*good, request_])
    assert [c.token_ids for c in served] == [c.token_ids for c in alone]
    assert (refused.request_id, refused.finish_reason, refused.token_ids) == ("r7", "error", [])
    assert re.search(message, refused.error)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (TokenSequence((), (1,)), "empty prompt"),
        (TokenSequence((1,), (99,)), "id 99 in its completion"),
        (TokenSequence((1,) * 100, (1,) * 29), "129 tokens"),
        (TokenSequence((1,), (1,), 0.0), "temperature=0.0"),
    ],
)
def test_impossible_sequences_are_refused(engine, sequence, message):
    with pytest.raises(EngineError, match=message):
        asyncio.run(engine.logprobs([TokenSequence((1,), (2,)), sequence]))


def test_an_empty_completion_has_no_logprobs(engine):
    assert asyncio.run(engine.logprobs([TokenSequence((1, 2), ())])) == [[]]
    assert generate(engine, []) == []


@pytest.mark.parametrize("architecture", FULL_ATTENTION)
def test_weights_that_are_not_finite_are_an_error(architecture):
    model = build(architecture)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "norm" in n or "ln_f" in n)[0] = float("nan")
    engine = TransformersEngine(model, None, max_model_len=128)
    for completion in generate(engine, requests_for(prompts_of([4, 6]), SamplingParams(max_tokens=4))):
        assert completion.finish_reason == "error"
        assert "not finite" in completion.error


def test_models_and_sizes_it_cannot_serve_are_refused(qwen):
    t5 = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=8))
    with pytest.raises(EngineError, match="encoder-decoder"):
        TransformersEngine(t5, None, max_model_len=16)
    with pytest.raises(EngineError, match="128 positions"):
        TransformersEngine(qwen, None, max_model_len=129)
    with pytest.raises(EngineError, match="max_rows=0"):
        TransformersEngine(qwen, None, max_model_len=16, max_rows=0)
    with pytest.raises(EngineError, match="max_batch_tokens=9"):
        TransformersEngine(qwen, None, max_model_len=10, max_batch_tokens=9)
    with pytest.raises(EngineError, match="not Linear"):
        TransformersEngine(torch.nn.Linear(2, 2), None, max_model_len=16)


def test_a_module_that_cannot_be_served_is_not_adopted(engine, qwen):
    with pytest.raises(SyncError, match="not Linear"):
        engine.load_weights(WeightRef(1, module=torch.nn.Linear(2, 2)))
    assert engine.version == 0
    assert len(generate(engine, requests_for(prompts_of([3]), SamplingParams(max_tokens=2)))[0].token_ids) == 2
