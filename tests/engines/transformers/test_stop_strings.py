"""Stop strings: a completion ends at the first token after which one occurs in its text."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mrl.engines.transformers import stop_strings
from mrl.engines.transformers.engine import TransformersEngine
from mrl.engines.transformers.stop_strings import StopStrings
from mrl.types import GenerateRequest, SamplingParams


@pytest.fixture(scope="module")
def tokenizer(tiny_model: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.mark.slow
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
    pieces = [(text[60 + n : 63 + n], text[120 : 122 + n]) for n, text in enumerate(texts) if len(text) > 140][:4]
    for stop in (*pieces, ("a", "b", "c"), ("é", "<|im_start|>"), ("never occurs in random text",)):
        for n, (full, cut) in enumerate(zip(whole, run(stop), strict=True)):
            expected = first_end(tokenizer, full.token_ids, stop) if n % 3 else None
            assert cut.token_ids == full.token_ids[:expected]
            if expected is not None:
                assert cut.finish_reason == "stop"
                stopped += 1
    assert stopped >= 5


@pytest.mark.parametrize("name", ["byte-level", "metaspace", "wordpiece", "byte fallback"])
def test_tokens_that_cannot_complete_a_string_are_told_apart(name):
    """Whatever the tokenizer does between tokens: skipping those tokens loses no end."""
    tokenizer = tokenizer_of(name)
    generator = torch.Generator().manual_seed(0)
    stops = [("ab",), ("b c",), ("cab", "é"), ("c ",), ("a", "zzz"), ("zq",)]
    skipped = 0
    for stop in stops:
        finder = StopStrings(tokenizer)
        for _ in range(30):
            ids = torch.randint(0, len(tokenizer), (1, 12), generator=generator)
            finder.set_rows([stop], len(tokenizer))
            running, one = torch.ones(1, dtype=torch.bool), torch.ones(1, dtype=torch.int64)
            ends = [n for n in range(12) if finder.found(ids, one * n, ids[:, n], running)]
            assert (ends[0] + 1 if ends else None) == first_end(tokenizer, ids[0].tolist(), stop)
        skipped += int((~finder._known[stop]).sum())
    assert skipped > 3 * len(tokenizer)


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    pieces = ["a", "b", "c", "ab", "bc", "z", "q", "x"]
    if name == "byte-level":
        model, decoder = models.BPE({p: i for i, p in enumerate([*pieces, "Ġ", "Ġa", "bĠ", "Ã", "©"])}, []), "ByteLevel"
    elif name == "wordpiece":
        model, decoder = (
            models.WordPiece({p: i for i, p in enumerate([*pieces, "##a", "##b", "##c", "é"])}),
            "WordPiece",
        )
    else:
        more = ["▁", "▁a", "▁c", "é"] if name == "metaspace" else ["▁", "▁a", "▁c", "<0xC3>", "<0xA9>"]
        model, decoder = models.BPE({p: i for i, p in enumerate([*pieces, *more])}, []), "Metaspace"
    fast = Tokenizer(model)
    fast.decoder = getattr(decoders, decoder)()
    if name == "byte fallback":
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        fast.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=fast)


def test_text_is_decoded_only_where_a_string_can_have_ended(tiny_model, tokenizer, monkeypatch):
    engine = TransformersEngine(AutoModelForCausalLM.from_pretrained(tiny_model), tokenizer, max_model_len=256)
    decoded = []
    decode = StopStrings._decode
    monkeypatch.setattr(StopStrings, "_decode", lambda self, ids: decoded.append(len(ids)) or decode(self, ids))
    prompt = tuple(tokenizer("abc")["input_ids"])
    sampling = SamplingParams(max_tokens=100, stop=("never occurs in random text",))
    requests = [GenerateRequest(str(n), prompt, sampling, n) for n in range(40)]
    tokens = sum(len(c.token_ids) for c in asyncio.run(engine.generate(requests)))
    first = len(decoded)
    assert first < tokens / 4
    again = [GenerateRequest(str(n), prompt, sampling, n + 99) for n in range(40)]
    tokens = sum(len(c.token_ids) for c in asyncio.run(engine.generate(again)))
    assert len(decoded) - first < tokens / 8


def first_end(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop: tuple[str, ...]) -> int | None:
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if any(s in text for s in stop):
            return end
    return None
