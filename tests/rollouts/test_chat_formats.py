"""Chat formats: which one a tokenizer has, and what is read from completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mrl.errors import ConfigError
from mrl.rollouts.chat import Past, TemplateChat, chat_format
from mrl.rollouts.chat.known import KnownChat
from mrl.types import Message
from tests.rollouts.chat_templates import STYLES, tokenizer_of
from tests.rollouts.test_conversation import TOOLS, call, chat_of, ids_of

WITH_TOOLS = [name for name, style in STYLES.items() if style.tools]


def test_a_renderer_is_found_by_what_it_writes() -> None:
    """By no name: the tokenizer has none here."""
    chat = chat_of("thinking")
    assert isinstance(chat, KnownChat)
    assert type(chat.renderer).__name__ == "Qwen3Renderer"
    assert isinstance(chat_of("chatml"), TemplateChat)


def test_a_template_of_ones_own_under_a_known_name_is_no_known_one() -> None:
    tokenizer = tokenizer_of("chatml")
    before = tokenizer.name_or_path
    try:
        tokenizer.name_or_path = "Qwen/Qwen3-8B"
        assert isinstance(chat_format(tokenizer), TemplateChat)
    finally:
        tokenizer.name_or_path = before


def test_both_ways_find_the_same_extension() -> None:
    """The package's bridge, and what is derived from the template."""
    known = chat_of("thinking")
    assert isinstance(known, KnownChat)
    ask: list[Message] = [{"role": "user", "content": "the tide"}]
    results: list[Message] = [{"role": "tool", "name": "look_up", "content": f"wet {n}"} for n in range(2)]
    for text in (call("thinking", {"word": "sea"}), "<think>\nhm\n</think>\n\n" + call("thinking", {"word": "\u00e9"})):
        for end in (True, False):
            ids = ids_of("thinking", text, end=end)
            prompt = known.render(ask, TOOLS)
            past = Past(ask, prompt, ids, known.parse(ids, prompt, TOOLS), end, TOOLS)
            for new in (results[:1], results):
                bridged = known.renderer.bridge_to_next_turn(prompt, ids, new, tools=TOOLS)
                assert known.template.extend(past, new) == bridged.token_ids[len(prompt) + len(ids) :]


def test_no_template_is_refused() -> None:
    tokenizer = type("Bare", (), {"chat_template": None})()
    with pytest.raises(ConfigError, match="need a chat template"):
        chat_format(tokenizer)


@pytest.mark.parametrize("style", STYLES)
def test_which_templates_write_calls(style: str) -> None:
    assert chat_of(style).takes_tools == STYLES[style].tools


def parse(style: str, text: str, prompt: list[int] | None = None) -> Any:
    return chat_of(style).parse(ids_of(style, text), prompt or [], TOOLS)


@pytest.mark.parametrize("style", WITH_TOOLS)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"word": "sea"}, {"word": 'a "b" }]\n', "n": 1.5, "deep": {"x": [1, None]}}, {"é": "﷽"}],
)
def test_calls_are_read_back(style: str, arguments: dict[str, Any]) -> None:
    said = parse(style, call(style, arguments))
    assert [(one.name, one.arguments) for one in said.tool_calls] == [("look_up", arguments)]
    assert said.malformed == ()
    assert said.content == ""


@pytest.mark.parametrize("style", WITH_TOOLS)
def test_what_the_template_writes_is_read_back(style: str) -> None:
    """Whatever it is: the message is rendered, and what was written is parsed."""
    tokenizer = tokenizer_of(style)
    made = [{"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": {"word": "sea"}}}]
    ask: list[Message] = [{"role": "user", "content": "x"}]
    said: Message = {"role": "assistant", "content": "", "tool_calls": made}
    written = tokenizer.apply_chat_template([*ask, said], tools=TOOLS, tokenize=False)
    prompts = [tokenizer.apply_chat_template(ask, tools=TOOLS, tokenize=False, add_generation_prompt=p) for p in (1, 0)]
    before = next(prompt for prompt in prompts if written.startswith(prompt))
    ids = tokenizer(written[len(before) :], add_special_tokens=False)["input_ids"]
    turn = chat_of(style).parse(ids, [], TOOLS)
    assert [(one.name, one.arguments) for one in turn.tool_calls] == [("look_up", {"word": "sea"})]


@pytest.mark.parametrize("style", ["chatml", "thinking"])
def test_several_calls_with_text_before(style: str) -> None:
    said = parse(style, "well:\n" + call(style, {"word": "a"}) + "\n" + call(style, {"word": "b"}))
    assert [one.arguments["word"] for one in said.tool_calls] == ["a", "b"]
    assert len({one.id for one in said.tool_calls}) == 2
    assert said.content.strip() == "well:"


@pytest.mark.parametrize("style", ["mistral", "deepseek"])
def test_several_calls_in_one_section(style: str) -> None:
    texts = {
        "mistral": '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]',
        "deepseek": (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{}\n```<｜tool▁call▁end｜>\n"
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>b\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>"
        ),
    }
    said = parse(style, texts[style])
    assert [(one.name, one.arguments) for one in said.tool_calls] == [("a", {}), ("b", {"x": 1})]
    assert (said.content, said.malformed) == ("", ())


def test_a_template_of_one_call_takes_no_two() -> None:
    said = parse("llama", call("llama", {}) + "; " + call("llama", {}))
    assert (len(said.tool_calls), len(said.malformed)) == (0, 1)


@pytest.mark.parametrize("style", WITH_TOOLS)
@pytest.mark.parametrize("damage", ["cut", "json", "no name", "list", "half a pair"])
def test_calls_that_cannot_be_read_are_counted(style: str, damage: str) -> None:
    before, inner, after = STYLES[style].calls
    good = call(style, {"word": "sea"})
    text = {
        "cut": before
        + (inner % ("look_up", '{"word": "s'))[: -max(1, len(inner.partition("%s")[2].partition("%s")[2]))],
        "json": before + inner % ("look_up", "{'word': sea}") + after,
        "no name": before + inner % ("", "{}") + after,
        "list": before + inner % ("look_up", "[1, 2]") + after,
        "half a pair": before + inner % ("look_up", '{"word": "\\ud83e"}') + after,
    }[damage]
    said = parse(style, text)
    assert len(said.tool_calls) == 0
    assert len(said.malformed) == 1
    if style in ("chatml", "thinking"):
        both = parse(style, text + ("</tool_call>" if damage == "cut" else "") + "\n" + good)
        assert (len(both.tool_calls), len(both.malformed)) == (1, 1)


@pytest.mark.parametrize("style", WITH_TOOLS)
@pytest.mark.parametrize("value", ["1" * 5000, "[" * 3000 + "]" * 3000, "[" * 200_000])
def test_calls_that_python_cannot_read_are_malformed_too(style: str, value: str) -> None:
    before, inner, after = STYLES[style].calls
    said = parse(style, before + inner % ("look_up", '{"word": ' + value + "}") + after)
    assert (len(said.tool_calls), len(said.malformed)) == (0, 1)


def test_arguments_that_are_json_in_a_string_are_taken() -> None:
    text = "<tool_call>\n" + json.dumps({"name": "look_up", "arguments": '{"word": "sea"}'}) + "\n</tool_call>"
    for style in ("chatml", "thinking"):
        assert parse(style, text).tool_calls[0].arguments == {"word": "sea"}


@pytest.mark.parametrize("style", STYLES)
def test_text_is_text(style: str) -> None:
    said = parse(style, 'the "sea" {is} [wet]')
    assert (said.content.strip(), said.reasoning, said.tool_calls, said.malformed) == (
        'the "sea" {is} [wet]', None, (), ()
    )  # fmt: skip


def test_json_that_is_no_call_is_text() -> None:
    assert parse("llama", '{"answer": 3}').content == '{"answer": 3}'
    assert parse("llama", '{"answer": 3}').malformed == ()


@pytest.mark.parametrize("style", ["thinking", "deepseek"])
def test_thinking_is_told_from_what_is_said(style: str) -> None:
    prompt = chat_of(style).render([{"role": "user", "content": "x"}], [])
    opened = style == "deepseek"  # by the prompt
    text = ("" if opened else "<think>\n") + "hm\n</think>\n\nthe sea"
    said = chat_of(style).parse(ids_of(style, text), prompt, [])
    assert (said.reasoning.strip(), said.content, said.still_thinking) == ("hm", "the sea", False)
    cut = chat_of(style).parse(ids_of(style, text.partition("hm")[0] + "hm", end=False), prompt, [])
    assert (cut.reasoning.strip(), cut.content, cut.still_thinking) == ("hm", "", True)


def test_templates_that_know_no_thinking_keep_it_as_text() -> None:
    assert parse("chatml", "<think>hm</think>sea").content == "<think>hm</think>sea"


def test_a_call_with_an_end_of_call_in_a_string_is_read_where_json_says_so() -> None:
    assert parse("chatml", call("chatml", {"word": "</tool_call>"})).tool_calls[0].arguments == {"word": "</tool_call>"}
