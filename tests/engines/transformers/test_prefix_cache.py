"""Keys and values of conversations, kept between their turns: the same completions for less prefill, within a bound."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mrl.config import ModelConfig
from mrl.engines.transformers.engine import TransformersEngine
from mrl.engines.transformers.kv_cache import RowStates
from mrl.engines.transformers.prefix_cache import BLOCK, PrefixCache
from mrl.engines.transformers.trial import make_causal_lm
from mrl.models import load_model
from mrl.types import Completion, GenerateRequest, SamplingParams, TokenSequence, WeightRef
from mrl.weights.files import publish
from tests.engines.small_models import assert_same, build, fresh_logprobs, generate, prompts_of
from tests.engines.transformers import test_architectures as architectures
from tests.soak import slow_but

TURNS = 3
SAMPLING = SamplingParams(temperature=0.9, max_tokens=9)
Ids = tuple[int, ...]


def talk(
    engine: TransformersEngine,
    first: list[Ids],
    *,
    sampling: SamplingParams = SAMPLING,
    sessions: bool = True,
    change: Callable[[Ids], Ids] = lambda ids: ids,
) -> list[list[Completion]]:
    """The completions of each turn of these conversations. After each turn an environment says from 1 to 11 tokens.

    change: what becomes of a conversation before its next turn.
    """
    spoken, turns = list(first), []
    for turn in range(TURNS):
        requests = [
            GenerateRequest(f"{n}/{turn}", ids, sampling, 10 * n + turn, session=f"s{n}" if sessions else None)
            for n, ids in enumerate(spoken)
        ]
        turns.append(generate(engine, requests))
        answers = prompts_of([1 + 5 * ((n + turn) % 3) for n in range(len(spoken))])
        spoken = [
            change((*ids, *completion.token_ids)) + answer
            for ids, completion, answer in zip(spoken, turns[-1], answers, strict=True)
        ]
    return turns


def both(
    model: PreTrainedModel, first: list[Ids], change: Callable[[Ids], Ids] = lambda ids: ids, **options: Any
) -> tuple[int, int, TransformersEngine]:
    """Hold the conversations with and without sessions. Returns the tokens computed for each, and the engine that kept
    states."""
    kept, whole = (TransformersEngine(model, None, max_model_len=128, **options) for _ in range(2))
    got, expected = talk(kept, first, change=change), talk(whole, first, change=change, sessions=False)
    for turn, turn_expected in zip(got, expected, strict=True):
        assert_same(turn, turn_expected)
    whole.close()
    return computed(*got), computed(*expected), kept


def computed(*turns: list[Completion]) -> int:
    """Tokens that were computed for these completions before their first one."""
    return sum(completion.prefilled or 0 for completions in turns for completion in completions)


def new_tokens(first: list[Ids]) -> int:
    """Tokens of prompts that nobody sampled, and the last one of each completion, which is sampled but not computed."""
    said = [1 + 5 * ((n + turn) % 3) for n in range(len(first)) for turn in range(TURNS - 1)]
    return sum(map(len, set(first))) + sum(said) + (TURNS - 1) * len(first)


FIRST = [*prompts_of([21, 34, 18, 26]), prompts_of([21])[0]]
"""Two of the conversations begin with the same prompt."""


def test_a_conversation_goes_on_where_it_ended(model: PreTrainedModel) -> None:
    for rows in (None, 3):
        once, again, engine = both(model, FIRST, max_rows=rows)
        if make_causal_lm(model, 128, None).replaces_rows:
            assert once == new_tokens(FIRST) < again
        else:  # rows of such caches cannot be taken apart
            assert once == again
            assert len(engine._prefixes) == 0
        engine.close()
        assert len(engine._prefixes) == 0


@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "gemma3", "gpt2"])
def test_and_with_a_cache_of_fixed_size(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for ended rows every fourth step, as on a GPU: rows run on beyond their end, and write there."""
    monkeypatch.setattr("mrl.engines.transformers.decode.STEPS_PER_CHECK", {"cpu": 4})
    for rows in (None, 2):
        once, _, _ = both(build(architecture), FIRST, max_rows=rows, decode_step="static")
        assert once == new_tokens(FIRST)


@pytest.mark.parametrize("name", slow_but(architectures.IN_SHORT, architectures.ARCHITECTURES))
def test_logprobs_of_a_conversation_are_those_of_a_fresh_forward(name: str) -> None:
    model = architectures.build(name)
    engine = TransformersEngine(model, None, max_model_len=128, max_rows=4)
    spoken = [(*ids, 7) for ids in FIRST]
    prefilled = 0
    for turn in range(TURNS):
        requests = [
            GenerateRequest(f"{n}/{turn}", ids, SAMPLING, n + turn, session=str(n)) for n, ids in enumerate(spoken)
        ]
        completions = generate(engine, requests)
        prefilled += computed(completions)
        for ids, completion in zip(spoken, completions, strict=True):
            expected = fresh_logprobs(model, TokenSequence(ids, tuple(completion.token_ids), SAMPLING.temperature))
            assert completion.logprobs == pytest.approx(expected, abs=5e-5)
        spoken = [(*ids, *c.token_ids, 1 + n, 3, 4) for n, (ids, c) in enumerate(zip(spoken, completions, strict=True))]
    if make_causal_lm(model, 128, None).replaces_rows:
        assert prefilled == sum(map(len, {(*ids, 7) for ids in FIRST})) + len(FIRST) * (TURNS - 1) * 4


def test_what_was_changed_in_between_is_computed_from_there(qwen: PreTrainedModel) -> None:
    """As by templates that remove what the policy thought: the beginning that is left is still used."""

    def without_thoughts(ids: Ids) -> Ids:
        return ids[:-6] + ids[-3:]

    once, again, _ = both(qwen, FIRST, change=without_thoughts)
    assert once < again - 4 * len(FIRST) * BLOCK


def test_another_sessions_beginning_serves_too(qwen: PreTrainedModel) -> None:
    engine = TransformersEngine(qwen, None, max_model_len=128)
    beginning, *rests = prompts_of([40, 9, 5])
    first, second = (
        GenerateRequest(s, beginning + rest, SAMPLING, 1, session=s) for s, rest in zip("ab", rests, strict=True)
    )
    generate(engine, [first])
    got = generate(engine, [second])
    assert computed(got) < len(second.prompt_ids) - 2 * BLOCK
    assert_same(got, generate(TransformersEngine(qwen, None, max_model_len=128), [second]))
    without = GenerateRequest("c", beginning + rests[0], SAMPLING, 2)
    assert computed(generate(engine, [without])) == len(without.prompt_ids), "single requests depend on nothing before"


def test_keys_and_values_in_bfloat16_are_kept_too(qwen: PreTrainedModel) -> None:
    engine = TransformersEngine(qwen, None, max_model_len=128, autocast_dtype=torch.bfloat16)
    turns = talk(engine, FIRST)
    assert computed(*turns) == new_tokens(FIRST)
    assert all(completion.error is None for completions in turns for completion in completions)


def test_new_weights_make_all_of_it_stale(tiny_model: str, tmp_path: Path) -> None:
    config = ModelConfig(model=tiny_model, device="cpu", max_model_len=128)
    module = load_model(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    ref = publish(module.state_dict(), tmp_path, 1)
    engine, fresh = TransformersEngine.create(config), TransformersEngine.create(config)
    fresh.load_weights(ref)
    first = GenerateRequest("a", tuple(range(40)), SAMPLING, 1, session="s")
    said = generate(engine, [first])[0]
    assert len(engine._prefixes) == 1
    engine.load_weights(WeightRef(1, path=ref.path))
    assert len(engine._prefixes) == engine._prefixes.bytes == 0
    second = GenerateRequest("b", (*first.prompt_ids, *said.token_ids, 5), SAMPLING, 2, session="s")
    got = generate(engine, [second])
    assert_same(got, generate(fresh, [second]))
    assert computed(got) == len(second.prompt_ids)
    engine.close()
    fresh.close()


def test_the_bound_holds_and_changes_no_completion(qwen: PreTrainedModel) -> None:
    one = 2 * 2 * 2 * 8 * 4  # bytes of a token: layers, keys and values, heads, width, float32
    room = 70 * one
    bounded, whole, engine = both(qwen, FIRST, prefix_bytes=room)
    assert 0 < engine._prefixes.bytes <= room
    assert new_tokens(FIRST) < bounded < whole
    none, whole, engine = both(qwen, FIRST, prefix_bytes=0)
    assert none == whole


def test_a_request_that_failed_leaves_nothing(qwen: PreTrainedModel) -> None:
    broken = build("qwen2")
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    engine = TransformersEngine(broken, None, max_model_len=128)
    assert generate(engine, [GenerateRequest("a", FIRST[0], SAMPLING, 1, session="s")])[0].error
    assert len(engine._prefixes) == 0


def test_conversations_that_come_and_go_at_any_time(qwen: PreTrainedModel) -> None:
    """Each turn is what it is alone, and prefills only what is new, whoever decodes meanwhile."""
    lengths = [20, 33, 17, 24, 20, 29, 22, 18]

    async def hold(engine: TransformersEngine, number: int) -> list[Completion]:
        ids, said = prompts_of(lengths)[number], []
        for turn in range(TURNS):
            request = GenerateRequest(f"{number}/{turn}", ids, SAMPLING, number + turn, session=str(number))
            said += await engine.generate([request])
            ids += (*said[-1].token_ids, 1, 2, 3)
            await asyncio.sleep(0.001 * (hash((number, turn)) % 7))
        return said

    async def hold_all(engine: TransformersEngine) -> list[list[Completion]]:
        return list(await asyncio.gather(*(hold(engine, number) for number in range(len(lengths)))))

    engine = TransformersEngine(qwen, None, max_model_len=128, max_rows=5, endless=True)
    got = asyncio.run(hold_all(engine))
    assert computed(*got) == sum(lengths) + len(lengths) * (TURNS - 1) * 4
    engine.close()
    alone = TransformersEngine(qwen, None, max_model_len=128, prefix_bytes=0)
    for number, completions in enumerate(got):
        assert_same(completions, asyncio.run(hold(alone, number)))


# --- the cache by itself ----------------------------------------------------------------------------------------------


def states(tokens: Ids) -> RowStates:
    """States that say which tokens they are of."""
    stack = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None].repeat(2, 1, 1, 2)
    return RowStates({(1, 2): stack}, ((1, 2), (1, 2)))


def test_it_finds_the_longest_beginning_it_has_and_stays_within_its_bound() -> None:
    """Against a search through all it holds, for random conversations that branch off each other."""
    draw = random.Random(0)
    cache = PrefixCache(max_bytes=16 * 600)
    for _ in range(400):
        session = str(draw.randrange(12))
        known = [kept.tokens for kept in cache._kept.values()]
        base = draw.choice(known) if known and draw.random() < 0.8 else ()
        tokens = (*base[: draw.randrange(len(base) + 1)], *(draw.randrange(3) for _ in range(draw.randrange(1, 60))))
        shared = [_alike(tokens[:-1], other) for other in known]
        own = _alike(tokens[:-1], cache._kept[session].tokens) if session in cache._kept else 0
        found = cache.find(session, tokens)
        if found is None:
            assert own < BLOCK
        else:
            assert tuple(found.stacks[1, 2][0, 0, :, 0].int().tolist()) == tokens[: len(found)]
            assert own <= len(found) <= max(shared)
            assert len(found) < len(tokens)
        cache.keep(session, tokens, states(tokens))
        assert cache.bytes == sum(kept.states.nbytes for kept in cache._kept.values()) <= cache.max_bytes
        assert session in cache._kept or len(tokens) < BLOCK or 16 * len(tokens) > cache.max_bytes
    cache.clear()
    assert cache.find("0", (1,) * 40) is None
    assert cache.bytes == len(cache) == 0


def test_the_least_recently_used_goes_first() -> None:
    cache = PrefixCache(max_bytes=3 * 16 * 20)
    conversations = [tuple(range(100 * n, 100 * n + 20)) for n in range(4)]
    for n in range(3):
        cache.keep(str(n), conversations[n], states(conversations[n]))
    assert cache.find("other", (*conversations[0], 1)) is not None  # used by another session
    assert cache.find("2", (*conversations[2], 1)) is not None  # goes on, and will be kept anew
    cache.keep("3", conversations[3], states(conversations[3]))
    assert list(cache._kept) == ["1", "0", "3"]
    cache.keep("3", conversations[1] * 4, states(conversations[1] * 4))  # too large by itself
    assert list(cache._kept) == ["1", "0"]


def _alike(left: Ids, right: Ids) -> int:
    alike = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        alike += 1
    return alike
