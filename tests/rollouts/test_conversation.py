"""Conversations in token space: what is recorded is what the engine saw, whatever the template does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.errors import DataError
from mrl.rollouts.chat import AssistantTurn, ChatFormat, TemplateChat, chat_format
from mrl.rollouts.conversation import Conversation
from mrl.types import Completion, FinishReason, Message, Sample
from tests.rollouts.chat_templates import STYLES, tokenizer_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
]


@cache
def chat_of(style: str) -> ChatFormat:
    return chat_format(tokenizer_of(style))


@dataclass
class Engine:
    """Says what it is told to, and remembers what it saw."""

    seen: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def complete(self, talk: Conversation, ids: list[int], reason: FinishReason = "stop") -> AssistantTurn:
        self.seen.append((list(talk.next_prompt()), list(ids)))
        number = len(self.seen)
        logprobs = [-float(number) - place / 1000 for place in range(len(ids))]
        return talk.add_completion(Completion(f"r{number}", list(ids), logprobs, reason, number))


def ids_of(style: str, text: str, *, end: bool = True) -> list[int]:
    tokenizer = tokenizer_of(style)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [*ids, tokenizer.eos_token_id] if end else ids


def call(style: str, arguments: dict[str, Any], name: str = "look_up") -> str:
    before, inner, after = STYLES[style].calls
    return before + inner % (name, json.dumps(arguments)) + after


def requests_in(samples: list[Sample]) -> list[tuple[list[int], list[int], list[float], list[int]]]:
    """Every request that samples hold: its prompt, and ids, logprobs and versions that were sampled for it."""
    found = []
    for sample in samples:
        versions = sample.policy_version
        versions = versions if isinstance(versions, list) else [versions] * len(sample.mask)
        place = 0
        while place < len(sample.mask):
            start = place
            while place < len(sample.mask) and sample.mask[place]:
                place += 1
            if place > start:
                part = slice(start, place)
                found.append(
                    (
                        sample.prompt_ids + sample.completion_ids[:start],
                        sample.completion_ids[part],
                        sample.logprobs[part],
                        versions[part],
                    )
                )
            else:
                place += 1
    return found


def check_record(talk: Conversation, engine: Engine) -> None:
    samples = talk.samples
    for sample in samples:
        assert len(sample.completion_ids) == len(sample.mask) == len(sample.logprobs)
        assert sample.mask[0] == sample.mask[-1] == 1
    found = requests_in(samples)
    assert [(prompt, ids) for prompt, ids, _, _ in found] == engine.seen
    for number, (_, ids, logprobs, versions) in enumerate(found, 1):
        assert logprobs == [-float(number) - place / 1000 for place in range(len(ids))]
        assert versions == [number] * len(ids)
    # As many trained tokens as were sampled, so nothing of the environment's is among them.
    assert sum(sum(sample.mask) for sample in samples) == sum(len(ids) for _, ids in engine.seen)
    assert len(samples) == talk.turns - talk.extended
    assert talk.turns == len(engine.seen)


# --- any conversation -----------------------------------------------------------------------------------------------

ODD = (
    *("", " ", "\n\n", "\t\r\n x ", "\U0001f9ea e\u0301 ﷽", "\u202eabc\u0000", "\ud83e", "\ufffd"),
    *("<|im_end|>", "</s>[/INST]", "</think>", "<tool_call>", "{{ x }} {% if %}", "zqsaid", "zqmark0zq"),
)
texts = st.one_of(st.text(max_size=12), st.sampled_from(ODD), st.sampled_from(["the tide", "look_up"]))


@st.composite
def completions(draw: st.DrawFn, style: str) -> tuple[list[int], FinishReason]:
    """Of any kind: text, thinking, calls, garbage; ended by the model, by a stop string, or cut."""
    tokenizer, made = tokenizer_of(style), STYLES[style]
    stops = {tokenizer.eos_token_id, *chat_of(style).stop_token_ids}
    safe = texts.filter(lambda text: "\ud83e" not in text)
    kind = draw(st.sampled_from(["text", "ids", "thought", "open thought", "call", "calls", "malformed", "nothing"]))
    if kind == "ids":
        ids = draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=10))
    else:
        text = "" if kind == "nothing" else draw(safe)
        if kind in ("thought", "open thought"):
            opening = "" if draw(st.booleans()) else "<think>"
            text = opening + draw(safe) + ("</think>" + text if kind == "thought" else "")
        elif kind == "malformed":
            text += draw(st.sampled_from([call(style, {"word": "x"})[:-9], made.calls[0] + "{", '{"name": 3}']))
        elif "call" in kind:
            parts = [call(style, {"word": draw(safe)}) for _ in range(2 if kind == "calls" else 1)]
            text += "\n".join(parts)
        ids = ids_of(style, text, end=False)
    ids = [token for token in ids if token not in stops]
    ending = draw(st.sampled_from(["end", "end", "length", "string"]))
    if ending == "end" or not ids:
        return [*ids, draw(st.sampled_from(sorted(stops)))], "stop"
    return ids, "length" if ending == "length" else "stop"


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("style", STYLES)
@given(data=st.data())
def test_samples_give_back_what_the_engine_saw(style: str, data: st.DataObject) -> None:
    made = STYLES[style]
    tools = TOOLS if made.tools and data.draw(st.booleans()) else []
    systems = data.draw(st.integers(0, {"anywhere": 2, "first": 1}.get(made.systems, 0)))
    asked = [{"role": "system", "content": data.draw(texts)} for _ in range(systems)]
    talk = Conversation(chat_of(style), [*asked, {"role": "user", "content": data.draw(texts)}], tools)
    engine = Engine()
    for _ in range(data.draw(st.integers(1, 5))):
        said = engine.complete(talk, *data.draw(completions(style)))
        check_record(talk, engine)
        talk.add(*answers(data, style, said))


def answers(data: st.DataObject, style: str, said: AssistantTurn) -> list[Message]:
    """What an environment says to a turn, of the kinds that the template takes."""
    results: list[Message] = [
        {"role": "tool", "name": one.name, "tool_call_id": one.id, "content": data.draw(texts)}
        for one in said.tool_calls
    ]
    if STYLES[style].alternates:
        return results or [{"role": "user", "content": data.draw(texts)}]
    more = st.sampled_from(["user", "system"] if STYLES[style].systems == "anywhere" else ["user"])
    roles = data.draw(st.lists(more, min_size=0 if results else 1, max_size=2))
    return results + [{"role": role, "content": data.draw(texts)} for role in roles]


# --- single claims --------------------------------------------------------------------------------------------------


def talk_of(style: str, *, tools: bool = False, chat: ChatFormat | None = None) -> Conversation:
    return Conversation(chat or chat_of(style), [{"role": "user", "content": "the tide"}], TOOLS if tools else [])


@pytest.mark.parametrize("style", ["chatml", "llama", "mistral", "gemma", "phi", "plain", "spaced"])
def test_templates_that_only_append_are_extended(style: str) -> None:
    talk, engine = talk_of(style), Engine()
    for _ in range(4):
        engine.complete(talk, ids_of(style, "the sea"))
        talk.add({"role": "user", "content": "go on"})
    check_record(talk, engine)
    assert (talk.turns, talk.extended, len(talk.samples)) == (4, 3, 1)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("style", ["chatml", "thinking", "llama", "gemma", "phi"])
@given(said=st.text("the sa", min_size=1, max_size=8), asked=st.lists(texts, min_size=1, max_size=3))
def test_an_extended_prompt_is_what_the_template_writes(style: str, said: str, asked: list[str]) -> None:
    """Where the completion's tokens are those that the template's text has, so that the two can be compared."""
    talk, engine = talk_of(style), Engine()
    for text in asked:
        engine.complete(talk, ids_of(style, said.strip() or "x"))
        talk.add({"role": "user", "content": text})
        assert list(talk.next_prompt()) == chat_of(style).render(talk.messages, [])
    assert talk.extended == talk.turns - 1


@pytest.mark.parametrize("style", ["chatml", "thinking", "llama", "mistral"])
def test_results_of_tools_are_extended(style: str) -> None:
    talk, engine = talk_of(style, tools=True), Engine()
    for word in ("sea", "moon"):
        said = engine.complete(talk, ids_of(style, call(style, {"word": word})))
        assert [(one.name, one.arguments) for one in said.tool_calls] == [("look_up", {"word": word})]
        talk.add({"role": "tool", "name": "look_up", "tool_call_id": said.tool_calls[0].id, "content": "wet"})
    engine.complete(talk, ids_of(style, "done"))
    check_record(talk, engine)
    assert talk.extended == 2


def test_thinking_that_the_template_removes_begins_a_new_sample() -> None:
    talk, engine = talk_of("thinking"), Engine()
    engine.complete(talk, ids_of("thinking", "<think>\nhm\n</think>\n\nthe sea"))
    talk.add({"role": "user", "content": "go on"})
    engine.complete(talk, ids_of("thinking", "more"))
    check_record(talk, engine)
    assert len(talk.samples) == 2
    assert "hm" not in tokenizer_of("thinking").decode(talk.samples[1].prompt_ids)


def test_thinking_between_calls_of_tools_stays() -> None:
    talk, engine = talk_of("thinking", tools=True), Engine()
    said = engine.complete(talk, ids_of("thinking", "<think>\nhm\n</think>\n\n" + call("thinking", {"word": "sea"})))
    assert (said.reasoning.strip(), len(said.tool_calls)) == ("hm", 1)
    talk.add({"role": "tool", "name": "look_up", "content": "wet"})
    engine.complete(talk, ids_of("thinking", "done"))
    check_record(talk, engine)
    assert len(talk.samples) == 1
    talk.add({"role": "user", "content": "go on"})  # now the thinking of both turns goes
    engine.complete(talk, ids_of("thinking", "yes"))
    check_record(talk, engine)
    assert len(talk.samples) == 2


@pytest.mark.parametrize("own", [False, True])
def test_an_empty_block_of_thinking_is_removed_too(own: bool) -> None:
    chat = TemplateChat(tokenizer_of("thinking")) if own else chat_of("thinking")
    talk, engine = talk_of("thinking", chat=chat), Engine()
    said = engine.complete(talk, ids_of("thinking", "<think>\n\n</think>\n\nthe sea"))
    assert said.reasoning == ""
    talk.add({"role": "user", "content": "go on"})
    engine.complete(talk, ids_of("thinking", "more"))
    assert len(talk.samples) == 2


def test_tools_before_the_last_user_message_begin_a_new_sample() -> None:
    """Mistral's way: they move with the conversation."""
    talk, engine = talk_of("mistral", tools=True), Engine()
    for _ in range(2):
        engine.complete(talk, ids_of("mistral", "the sea"))
        talk.add({"role": "user", "content": "go on"})
    check_record(talk, engine)
    assert len(talk.samples) == 2


@pytest.mark.parametrize("style", ["chatml", "llama", "mistral", "gemma", "phi", "spaced"])
def test_a_turn_that_was_cut_is_closed_by_the_environment(style: str) -> None:
    """By length, or by a stop string: the end of the turn is in the next prompt and is not trained on."""
    end = chat_of(style).stop_token_ids[0] if len(chat_of(style).stop_token_ids) == 1 else None
    end = tokenizer_of(style).eos_token_id if end is None else end
    for reason in ("length", "stop"):
        talk, engine = talk_of(style), Engine()
        ids = ids_of(style, "the sea", end=False)
        engine.complete(talk, ids, reason)
        talk.add({"role": "user", "content": "go on"})
        prompt = list(talk.next_prompt())
        engine.complete(talk, ids_of(style, "more"))
        check_record(talk, engine)
        assert len(talk.samples) == 1
        assert end in prompt[len(engine.seen[0][0]) + len(ids) :]
        ended, other = talk_of(style), Engine()
        other.complete(ended, [*ids, end])
        ended.add({"role": "user", "content": "go on"})
        assert [token for token in ended.next_prompt() if token == end] == [token for token in prompt if token == end]


def test_thinking_that_was_cut_is_closed_by_the_template() -> None:
    talk, engine = talk_of("thinking", tools=True), Engine()
    said = engine.complete(talk, ids_of("thinking", "<think>\nhm", end=False), "length")
    assert said.still_thinking
    talk.add({"role": "tool", "name": "look_up", "content": "wet"})
    engine.complete(talk, ids_of("thinking", "done"))
    check_record(talk, engine)


def test_a_history_that_is_replaced_begins_a_new_sample() -> None:
    talk, engine = talk_of("chatml"), Engine()
    engine.complete(talk, ids_of("chatml", "the sea"))
    talk.replace([{"role": "user", "content": "in short: sea"}])
    engine.complete(talk, ids_of("chatml", "more"))
    check_record(talk, engine)
    assert (len(talk.samples), talk.extended) == (2, 0)


def test_messages_that_a_template_refuses_are_named() -> None:
    talk, engine = talk_of("gemma"), Engine()
    engine.complete(talk, ids_of("gemma", "the sea"))
    talk.add({"role": "user", "content": "a"}, {"role": "user", "content": "b"})
    with pytest.raises(DataError, match=r"does not take these messages \(user, assistant, user, user\)"):
        talk.next_prompt()


def test_what_cannot_be_said_is_refused() -> None:
    talk = talk_of("chatml")
    with pytest.raises(ValueError, match="by its tokens"):
        talk.add({"role": "assistant", "content": "no"})
    with pytest.raises(ValueError, match="without tokens"):
        talk.add_completion(Completion("r", [], [], "abort", 0))
    Engine().complete(talk, ids_of("chatml", "x"))
    with pytest.raises(ValueError, match="last word"):
        talk.next_prompt()


def test_the_version_is_one_number_where_it_is() -> None:
    talk = talk_of("chatml")
    for versions in (3, [3, 3, 4]):
        ids = ids_of("chatml", "ab", end=False)[:2]
        talk.add_completion(Completion("r", [*ids, 363], [-1.0] * 3, "stop", versions))
        if versions == 3:
            assert talk.samples[0].policy_version == 3
            talk.add({"role": "user", "content": "go on"})
    versions = talk.samples[0].policy_version
    assert versions[:3] == [3, 3, 3]
    assert versions[-3:] == [3, 3, 4]
    assert len(versions) == len(talk.samples[0].mask)
