"""Stop strings: a completion ends at the first token after which one occurs in its text."""

from __future__ import annotations

import asyncio

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from mrl.engines import stop_strings
from mrl.engines.transformers import TransformersEngine
from mrl.types import GenerateRequest, SamplingParams


@pytest.fixture(scope="module")
def tokenizer(tiny_model: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.mark.parametrize("tail", [32, 1], ids=["usual tail", "shortest tail"])
def test_ends_at_the_first_token_after_which_the_string_occurs(tiny_model, tokenizer, monkeypatch, tail):
    monkeypatch.setattr(stop_strings, "_MIN_TAIL_TOKENS", tail)
    engine = TransformersEngine(AutoModelForCausalLM.from_pretrained(tiny_model), tokenizer, max_model_len=256)
    prompt = tuple(tokenizer("abc")["input_ids"])

    def run(stop: tuple[str, ...]) -> list:
        sampling = SamplingParams(max_tokens=200, stop=stop)
        # Rows without stop strings sit among the others.
        requests = [
            GenerateRequest(str(n), prompt, sampling if n % 3 else SamplingParams(max_tokens=200), n) for n in range(12)
        ]
        return asyncio.run(engine.generate(requests))

    whole = run(())
    stopped = 0
    texts = [tokenizer.decode(full.token_ids) for full in whole]
    pieces = [(text[60 + n : 63 + n], text[120 : 122 + n]) for n, text in enumerate(texts) if len(text) > 140]
    for stop in (*pieces, ("a", "b", "c"), ("é", "<|im_start|>"), ("never occurs in random text",)):
        for n, (full, cut) in enumerate(zip(whole, run(stop), strict=True)):
            expected = first_end(tokenizer, full.token_ids, stop) if n % 3 else None
            assert cut.token_ids == full.token_ids[:expected]
            if expected is not None:
                assert cut.finish_reason == "stop"
                stopped += 1
    assert stopped >= 10


def first_end(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop: tuple[str, ...]) -> int | None:
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if any(s in text for s in stop):
            return end
    return None
