"""Templates that the `renderers` package knows: its bridge between turns, and its parser.

Which one a tokenizer has is tried, not looked up by the model's name: fine-tuned models keep names and change
templates, and a checkpoint in a folder has another name. A renderer is used if it writes what the tokenizer's own
template writes, id by id, for some conversations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mrl.data.images import pictures_in
from mrl.errors import DataError
from mrl.rollouts.chat.base import AssistantTurn, Past, ToolCall, ToolSpec
from mrl.rollouts.chat.call_syntax import as_arguments, call_id
from mrl.rollouts.chat.template import TemplateChat
from mrl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONFIGS = (
    *("Qwen3RendererConfig", "Llama3RendererConfig", "Qwen35RendererConfig", "Qwen36RendererConfig"),
    *("GLM45RendererConfig", "GLM5RendererConfig", "GLM51RendererConfig", "GLM53RendererConfig"),
    *("KimiK2RendererConfig", "MiniMaxM2RendererConfig", "Hy3RendererConfig"),
    *("DeepSeekV3RendererConfig", "DeepSeekR1RendererConfig", "DeepSeekV4RendererConfig"),
    *("Nemotron3RendererConfig", "Nemotron3UltraRendererConfig", "Nemotron35RendererConfig"),
    *("Gemma4RendererConfig", "LagunaXS2RendererConfig", "LagunaM1RendererConfig"),
    "GptOssRendererConfig",
)
"""Renderers of text, by the class of their options."""
_NEEDS = {"GptOssRendererConfig": "<|channel|>"}
"""A token without which a renderer need not be made: this one fetches its own vocabulary."""

_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
_CALL = {"type": "function", "id": call_id(0), "function": {"name": "look_up", "arguments": {"word": "tide"}}}
_SYSTEM, _ASK, _SAY, _MORE = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a tide?"},
    {"role": "assistant", "content": "The sea's rise and fall."},
    {"role": "user", "content": "Why?"},
)
_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Message = {"role": "tool", "name": "look_up", "tool_call_id": call_id(0), "content": "rise and fall"}
_TRIALS: tuple[tuple[list[Message], list[ToolSpec]], ...] = (
    ([_ASK], []),
    ([_SYSTEM, _ASK], []),
    ([_SYSTEM, _ASK, _SAY, _MORE], []),
    ([_ASK, {**_SAY, "reasoning_content": "Short."}, _MORE], []),
    ([_SYSTEM, _ASK], [_TOOL]),
    ([_SYSTEM, _ASK, _CALLS, _RESULT], [_TOOL]),
    ([_ASK, _CALLS, _RESULT, _SAY, _MORE], [_TOOL]),
)
"""Conversations, with tools, that both have to write alike."""


def known_chat(tokenizer: PreTrainedTokenizerBase, template: TemplateChat) -> KnownChat | None:
    """The tokenizer's format by a renderer that writes the same; None where there is none."""
    import renderers

    plain = TemplateChat(tokenizer) if template.kwargs else template
    wanted = [(case, _by_template(plain, *case)) for case in _TRIALS]
    if all(ids is None for _, ids in wanted):
        return None
    for name in _CONFIGS:
        config = getattr(renderers, name)
        renderer = _made(tokenizer, config, {})
        if renderer is not None and all(ids is None or _renders(renderer, *case) == ids for case, ids in wanted):
            return KnownChat(renderer, template) if not template.kwargs else _with_kwargs(tokenizer, config, template)
    return None


def _with_kwargs(tokenizer: PreTrainedTokenizerBase, config: Any, template: TemplateChat) -> KnownChat | None:
    """The same renderer with the template's arguments; None where it has others, or begins a conversation otherwise.

    Only first prompts have to be alike: with thinking off, renderers keep the empty block that a prompt ends with in
    the history, where templates drop it, so that turns extend each other.
    """
    if not template.kwargs.keys() <= config.template_field_names():
        return None
    renderer = _made(tokenizer, config, template.kwargs)
    first = [case for case in _TRIALS if all(message["role"] in ("system", "user") for message in case[0])]
    if renderer is None or any(_by_template(template, *case) != _renders(renderer, *case) for case in first):
        return None
    return KnownChat(renderer, template)


class KnownChat:
    """A format that a renderer knows. Where its bridge refuses, the template itself is asked."""

    takes_tools = True

    def __init__(self, renderer: Any, template: TemplateChat) -> None:
        """renderer: a `renderers.Renderer`, whose types of messages are narrower than ours."""
        self.renderer, self.template = renderer, template
        self.stop_token_ids = tuple(sorted({*renderer.get_stop_token_ids(), *template.stop_token_ids}))

    def closes(self, token_id: int) -> bool:
        """Whether the token ends a turn where it is the last."""
        return token_id in self.stop_token_ids or self.template.closes(token_id)

    def render(self, messages: list[Message], tools: list[ToolSpec]) -> list[int]:
        """Ids of a prompt that the assistant continues."""
        return self.template.render(messages, tools)

    def extend(self, past: Past, new: list[Message]) -> list[int] | None:
        """Ids between a completion and the next turn, or None."""
        if pictures_in(new):  # of which renderers know nothing
            return self.template.extend(past, new)
        before = [*past.prompt_ids, *past.completion_ids]
        try:
            bridged: Any = self.renderer.bridge_to_next_turn(
                past.prompt_ids, past.completion_ids, new, tools=past.tools or None
            )
        except (ValueError, TypeError, KeyError):  # messages of a shape that it does not know
            bridged = None
        # A bridge may cut off what a completion has after an end of turn; then it is not what was sampled.
        if bridged is not None and bridged.token_ids[: len(before)] == before and len(bridged.token_ids) > len(before):
            return list(bridged.token_ids[len(before) :])
        return self.template.extend(past, new)

    def parse(self, completion_ids: list[int], prompt_ids: list[int], tools: list[ToolSpec]) -> AssistantTurn:
        """What a completion says."""
        try:
            parsed = self.renderer.parse_response(completion_ids, tools=tools or None, prompt_ids=prompt_ids)
        except (ValueError, RecursionError):  # e.g. a number of more digits than Python reads
            return self.template.parse(completion_ids, prompt_ids, tools)
        calls: list[ToolCall] = []
        malformed: list[str] = []
        for call in parsed.tool_calls if tools else []:
            arguments = as_arguments(call.arguments if call.arguments is not None else {})
            if call.status.value in ("ok", "unknown_tool") and call.name and arguments is not None:
                calls.append(ToolCall(call_id(len(calls)), call.name, arguments))
            else:
                malformed.append(call.raw)
        if len(calls) > 1 and self.template.calls is not None and not self.template.calls.several:
            malformed, calls = [call.raw for call in parsed.tool_calls], []
        reasoning = parsed.reasoning_content
        if reasoning is None:  # an empty block of thinking is one too
            reasoning = self.template.parse(completion_ids, prompt_ids, []).reasoning
        content = "\n".join([*([parsed.content] if parsed.content else []), *malformed])
        still = parsed.reasoning_complete is False
        return AssistantTurn(content, reasoning, tuple(calls), tuple(malformed), still_thinking=still)


def _by_template(template: TemplateChat, messages: list[Message], tools: list[ToolSpec]) -> list[int] | None:
    try:
        return template.render(messages, tools)
    except DataError:
        return None


def _made(tokenizer: PreTrainedTokenizerBase, config: Any, kwargs: dict[str, Any]) -> Any:
    from renderers import create_renderer

    if (needed := _NEEDS.get(config.__name__)) is not None and needed not in tokenizer.get_vocab():
        return None
    try:
        return create_renderer(tokenizer, config(**kwargs))
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError, ImportError, OSError, RuntimeError):
        return None  # it needs tokens that this tokenizer lacks, and each says so in a way of its own


def _renders(renderer: Any, messages: list[Message], tools: list[ToolSpec]) -> list[int] | None:
    try:
        return list(renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True))
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError):
        return None
