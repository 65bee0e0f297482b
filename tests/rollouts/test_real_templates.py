"""Chat templates of real models, as TRL's package has them, each with a tokenizer of bytes and its special tokens."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mrl.errors import DataError
from mrl.rollouts.chat import ChatFormat, chat_format
from mrl.rollouts.chat.known import KnownChat
from mrl.rollouts.conversation import Conversation
from mrl.types import Message
from tests.rollouts.test_conversation import TOOLS, Engine, check_record

TRL = find_spec("trl")
pytestmark = pytest.mark.skipif(TRL is None, reason="TRL's package has the templates")

TOKENS = re.compile(
    r"<\|[^|<>\s'\"{}]+\|>|<｜[^｜]+｜>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>|<\|?turn\|?>|</?(?:think|tool_call|tool_response)>"
)
WORDS = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}
"""Tokens that are no special ones."""
OFTEN = {"<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<|begin_of_text|>"}
"""Tokens that models have and templates need not name."""
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "deepseekv3": "<｜end▁of▁sentence｜>", "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>", "gemma4_v5": "<turn|>", "gptoss": "<|return|>", "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>", "llama3_2": "<|eot_id|>", "nemotron_3_nano": "<|im_end|>",
    "phi3": "<|end|>", "phi3_5": "<|end|>", "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>", "qwen3_instruct_2507": "<|im_end|>", "qwen3_vl": "<|im_end|>",
}  # fmt: skip
"""Templates, and what ends a turn of the assistant."""
WRITTEN_ANEW = {"deepseekv3", "nemotron_3_nano", "qwen3_5_think"}
"""Thinking is opened by the prompt, and removed from the history."""
KNOWN = {
    "nemotron_3_nano": "Nemotron3Renderer",
    "qwen3_5_think": "Qwen35Renderer",
    **dict.fromkeys(("qwen3", "qwen3_instruct_2507", "qwen3_vl"), "Qwen3Renderer"),
}
"""Those that the package `renderers` knows, with such a tokenizer."""
CALLS = {"gptoss": 0, "llama3_1": 1, "llama3_2": 1, "qwen2_5": 1, "qwen3": 1, "qwen3_instruct_2507": 1, "qwen3_vl": 1}
"""Those whose calls of tools are read, and how many turns a call and its result are extended by."""


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    assert TRL is not None
    assert TRL.origin is not None
    template = (Path(TRL.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: n for n, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken(word, normalized=False) for word in sorted(WORDS)])
    special = sorted((set(TOKENS.findall(template)) | OFTEN) - WORDS - {ENDS[name]})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=ENDS[name],
        pad_token="<pad>",
        bos_token="<bos>",
        additional_special_tokens=special,
    )
    tokenizer.chat_template = template
    return tokenizer


@cache
def chat_of(name: str) -> ChatFormat:
    return chat_format(tokenizer_of(name))


def written(name: str, asked: list[Message], said: Message, tools: list[dict[str, object]]) -> list[int]:
    """What the template writes for the assistant, up to the end of its turn, as a model would sample it."""
    tokenizer = tokenizer_of(name)
    text = str(tokenizer.apply_chat_template([*asked, said], tools=tools or None, tokenize=False))
    prompts = [
        str(tokenizer.apply_chat_template(asked, tools=tools or None, tokenize=False, add_generation_prompt=prompt))
        for prompt in (True, False)
    ]
    body = next(text[len(prompt) :] for prompt in prompts if text.startswith(prompt))
    body = body.rpartition(ENDS[name])[0] if ENDS[name] in body else re.sub(r"<\|call\|>$", "", body)
    ids = tokenizer(body.removesuffix(f"{ENDS[name]}\n"), add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id]


@pytest.mark.parametrize("name", ENDS)
def test_which_renderer_writes_the_same(name: str) -> None:
    chat = chat_of(name)
    assert (type(chat.renderer).__name__ if isinstance(chat, KnownChat) else None) == KNOWN.get(name)


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_is_extended_as_the_template_goes_on(name: str) -> None:
    asked: list[Message] = [{"role": "user", "content": "ask"}]
    talk, engine = Conversation(chat_of(name), asked), Engine()
    for number in range(3):
        engine.complete(talk, [*tokenizer_of(name)("hello", add_special_tokens=False)["input_ids"],
                               tokenizer_of(name).eos_token_id])  # fmt: skip
        talk.add({"role": "user", "content": f"more {number}"})
        if name != "gptoss":  # the channel is part of what is said
            assert list(talk.next_prompt()) == chat_of(name).render(talk.messages, [])
    check_record(talk, engine)
    assert talk.extended == (0 if name in WRITTEN_ANEW else 2)


@pytest.mark.parametrize("name", ENDS)
def test_calls_of_tools_are_read_and_extended(name: str) -> None:
    chat = chat_of(name)
    if name not in CALLS:
        assert not chat.takes_tools or isinstance(chat, KnownChat)
        return
    asked: list[Message] = [{"role": "user", "content": "ask"}]
    made = {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": {"word": "sea"}}}
    talk, engine = Conversation(chat, asked, TOOLS), Engine()
    said: Message = {"role": "assistant", "content": "", "tool_calls": [made]}
    turn = engine.complete(talk, written(name, asked, said, TOOLS))
    assert [(call.name, call.arguments) for call in turn.tool_calls] == [("look_up", {"word": "sea"})]
    talk.add({"role": "tool", "name": "look_up", "tool_call_id": turn.tool_calls[0].id, "content": "wet"})
    if name != "qwen3":  # an empty block of thinking, which is kept here and not by the template
        assert list(talk.next_prompt()) == chat.render(talk.messages, TOOLS)
    engine.complete(talk, [*tokenizer_of(name)("done", add_special_tokens=False)["input_ids"],
                           tokenizer_of(name).eos_token_id])  # fmt: skip
    check_record(talk, engine)
    assert talk.extended == CALLS[name]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think"])
def test_without_thinking_turns_extend_each_other(name: str, known: bool) -> None:
    """Prompts end with an empty block of thinking, which templates drop from what is past: here it stays as it was.

    Qwen3.5's keeps it until the next user's message, and drops it then: what is past is another text.
    """
    off = {"enable_thinking": False}
    tokenizer = tokenizer_of(name)
    chat: ChatFormat = chat_format(tokenizer, off)
    assert isinstance(chat, KnownChat)
    chat = chat if known else chat.template
    asked: list[Message] = [{"role": "user", "content": "ask"}]
    talk, engine = Conversation(chat, asked, TOOLS), Engine()
    prompt = tokenizer.apply_chat_template(asked, tools=TOOLS, add_generation_prompt=True, tokenize=False, **off)
    assert tokenizer.decode(talk.next_prompt()) == prompt
    assert str(prompt).rstrip().endswith("</think>")
    for number in range(3):
        ids = tokenizer("hello", add_special_tokens=False)["input_ids"]
        turn = engine.complete(talk, [*ids, tokenizer.eos_token_id])
        assert (turn.content, turn.reasoning or "") == ("hello", "")
        role = "user" if number else "tool"
        talk.add({"role": role, "name": "look_up", "content": f"more {number}"})
        assert tokenizer.decode(talk.next_prompt()).rstrip().endswith("</think>")
    check_record(talk, engine)
    assert talk.extended == (2 if known or name == "qwen3" else 1)


@pytest.mark.parametrize("name", ["idefics3", "llava_next"])
def test_templates_that_take_no_text_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENDS, name, "<end_of_utterance>")
    with pytest.raises(DataError, match="the chat template does not"):
        chat_of(name)
