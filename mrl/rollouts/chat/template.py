"""Conversations by a tokenizer's own chat template, also one that nobody has seen before.

What an extension looks like is derived from the template: a sentinel takes the place of what the assistant said,
everything is rendered with the new messages behind it, and what follows the end of the sentinel's turn is what follows
the completion. That holds only if the template leaves alone what stands before, which is looked at each time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from mrl.data.images import pictures_in
from mrl.errors import DataError
from mrl.rollouts.chat.base import AssistantTurn, Past, ToolSpec
from mrl.rollouts.chat.call_syntax import CallSyntax, derive_call_syntax
from mrl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mrl.rollouts.chat.images import ImageWriter

_USER: Message = {"role": "user", "content": "zqask"}
_NEXT: Message = {"role": "user", "content": "zqnext"}
_SAID, _THOUGHT = "zqsaid", "zqthought"
_TAG = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])$")
"""What opens a block of thinking."""
_PROMPT_END = 24
"""Tokens at the end of a prompt that may open such a block."""
_TEXTS_KEPT = 128
"""Texts whose ids are kept."""


class TemplateChat:
    """A tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kwargs: Mapping[str, Any] | None = None,
        images: ImageWriter | None = None,
    ) -> None:
        """kwargs: what the template gets besides messages and tools. images: of a model that takes them."""
        self.tokenizer, self.kwargs, self.images = tokenizer, dict(kwargs or {}), images
        self.special = set(tokenizer.all_special_ids)
        said: Message = {"role": "assistant", "content": _SAID}
        _, written, self.turn_end = self._text([_USER, said]).rpartition(_SAID)
        if not written:
            raise DataError("the chat template does not write what an assistant says as text")
        self.end_token = self._end_between([_USER, said, _NEXT]) or self._first_special(self.turn_end)
        ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(self.end_token) if self.end_token else None]
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({end for end in ends if isinstance(end, int)}))
        self.thinking = self._thinking_tags()
        self.calls: CallSyntax | None = derive_call_syntax(self._text, self.turn_end)
        self._endings: dict[str, str] = {}
        self._ids = lru_cache(_TEXTS_KEPT)(self._tokenised)
        """Attempts of a task begin alike, and environments repeat themselves."""
        self.takes_tools = self.calls is not None

    def closes(self, token_id: int) -> bool:
        """Whether the token ends a turn where it is the last."""
        return token_id in self.special or token_id in self.stop_token_ids

    def render(self, messages: list[Message], tools: list[ToolSpec]) -> list[int]:
        """Ids of a prompt that the assistant continues."""
        text = self._with_images(self._text(messages, tools, prompt=True), messages)
        return list(self._ids(text))

    def extend(self, past: Past, new: list[Message]) -> list[int] | None:
        """Ids between a completion and the next turn, or None."""
        history = self._text(past.messages, past.tools, prompt=True)
        mark = next(text for n in count() if (text := f"zqmark{n}zq") not in history + json.dumps(new, default=str))
        marked = _marked(past.turn, mark)
        ending = self._ending(past, marked, mark)
        whole = self._text([*past.messages, marked, *new], past.tools, prompt=True)
        if not whole.startswith(history):
            history = self._without_prefilled_thinking(history)
        if not whole.startswith(history) or ending is None or whole.count(mark) != 1:
            return None
        if past.turn.reasoning is not None and not past.turn.still_thinking and _THOUGHT not in whole[len(history) :]:
            return None
        tail = whole.partition(mark)[2]
        if not ending.endswith(self.turn_end):
            return None
        closing = ending.removesuffix(self.turn_end)  # of the call that the mark is in, or of the thinking
        if not tail.startswith(closing):
            return None
        if not past.turn.still_thinking:
            tail = tail.removeprefix(closing)
        if past.closed:
            tail = self._after_end(tail, self._decode(past.completion_ids[-1:]))
        return self._ids_after(mark, self._with_images(tail, new)) or None

    def parse(self, completion_ids: list[int], prompt_ids: list[int], tools: list[ToolSpec]) -> AssistantTurn:
        """What a completion says."""
        if completion_ids and self.closes(completion_ids[-1]):
            completion_ids = completion_ids[:-1]
        text = self._decode(completion_ids)
        reasoning, text, still = self._split_thinking(text, self._decode(prompt_ids[-_PROMPT_END:]))
        if still or self.calls is None or not tools:
            return AssistantTurn(self._plain(text), reasoning, still_thinking=still)
        text, calls, malformed = self.calls.parse(text)
        return AssistantTurn(self._plain(text), reasoning, tuple(calls), tuple(malformed))

    # --- inner ------------------------------------------------------------------------------------------------------

    def _text(self, messages: list[Message], tools: list[ToolSpec] | None = None, *, prompt: bool = False) -> str:
        if self.images is not None:
            messages = self.images.shown(messages)
        try:
            shown: list[Any] | None = tools or None
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tools=shown, add_generation_prompt=prompt, tokenize=False, **self.kwargs
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(f"the chat template does not take these messages ({roles}): {error}") from error

    def _with_images(self, text: str, messages: list[Message]) -> str:
        """What was written of these messages, with their images. Raises DataError."""
        if self.images is not None:
            return self.images.expand(text, messages)
        if pictures := pictures_in(messages):
            raise DataError(f"{pictures[0].where}: the model takes no images; use one that does")
        return text

    def _ending(self, past: Past, marked: Message, mark: str) -> str | None:
        """What the template writes after the mark, where nothing follows the turn; None where it hides the mark.

        It closes what the mark is in, so it is found once for all turns that are made of the same parts.
        """
        parts = json.dumps([mark, marked, past.tools != []], default=str)
        if parts not in self._endings:
            alone = self._text([*past.messages, marked], past.tools)
            if alone.count(mark) != 1:
                return None
            if len(self._endings) >= _TEXTS_KEPT:
                self._endings.clear()
            self._endings[parts] = alone.partition(mark)[2]
        return self._endings[parts]

    def _tokenised(self, text: str) -> tuple[int, ...]:
        text = text.encode("utf-8", "replace").decode("utf-8")  # no tokenizer takes half of a surrogate pair
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _ids_after(self, before: str, text: str) -> list[int]:
        """Ids of `text` where it follows `before`: some tokenizers put a space before whatever comes first."""
        first, both = self._ids(before), self._ids(before + text)
        return list(both[len(first) :] if both[: len(first)] == first else self._ids(text))

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _plain(self, text: str) -> str:
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text

    def _first_special(self, text: str) -> str:
        """The special token that stands first in it; "" without one."""
        found = [(text.find(token), -len(token), token) for token in self.tokenizer.all_special_tokens if token in text]
        return min(found)[2] if found else ""

    def _end_between(self, messages: list[Message]) -> str:
        """The special token that ends an assistant's turn only where another message follows; "" where what follows
        begins with the only one."""
        try:
            between = self._text(messages).partition(_SAID)[2].partition(str(messages[-1]["content"]))[0]
        except DataError:
            return ""
        first = self._first_special(between)
        return first if first and self._first_special(between.partition(first)[2]) else ""

    def _after_end(self, tail: str, sampled: str) -> str:
        """What follows the end of a turn, which the completion has itself: the last token that was `sampled`."""
        ending = self.turn_end[: self.turn_end.find(sampled) + len(sampled)] if sampled in self.turn_end else sampled
        if tail.startswith(ending):
            return tail.removeprefix(ending)
        # It ended with another one of the model's tokens for this, which stands for the template's.
        first = self._first_special(tail)
        return tail.partition(first)[2] if first and first == self.end_token else tail

    def _thinking_tags(self) -> tuple[str, str] | None:
        """What opens and closes thinking, where the template treats it apart from what is said."""
        thinker: Message = {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT}
        text = self._text([_USER, thinker])
        before, found, after = text.partition(_THOUGHT)
        if found:
            opening, closing = _TAG.search(before.rstrip()), after.partition(_SAID)[0].strip()
            return (opening.group(), closing) if opening and closing else None
        return ("<think>", "</think>") if "</think>" in self._source() else None

    def _without_prefilled_thinking(self, prompt: str) -> str:
        """A prompt without the empty block of thinking that it ends with, where thinking is off: templates write none
        for a turn that is past. The policy saw it, and it says nothing, so that it may stay."""
        if self.thinking is None:
            return prompt
        opening, closing = map(re.escape, self.thinking)
        return re.sub(rf"{opening}\s*{closing}\s*$", "", prompt)

    def _source(self) -> str:
        template: Any = self.tokenizer.chat_template
        return template if isinstance(template, str) else json.dumps(template)

    def _split_thinking(self, text: str, prompt_end: str) -> tuple[str | None, str, bool]:
        """Thinking, the rest, and whether it still thinks."""
        if self.thinking is None:
            return None, text, False
        opening, closing = self.thinking
        begun = text.lstrip().startswith(opening)
        body = text.partition(opening)[2] if begun else text
        if closing in body:
            thought, _, said = body.partition(closing)
            return thought.strip("\n"), said.lstrip("\n"), False
        if begun or prompt_end.rstrip().endswith(opening):
            return body.strip("\n"), "", True
        return None, text, False


def _marked(turn: AssistantTurn, mark: str) -> Message:
    """A turn of the same parts, the mark being what is said last."""
    message: Message = {"role": "assistant", "content": "" if turn.still_thinking or turn.tool_calls else mark}
    if turn.reasoning is not None:
        message["reasoning_content"] = mark if turn.still_thinking else _THOUGHT
    if turn.tool_calls:
        calls = turn.message["tool_calls"]
        last = {**calls[-1], "function": {"name": turn.tool_calls[-1].name, "arguments": {"zq": mark}}}
        message["tool_calls"] = [*calls[:-1], last]
        message["content"] = _SAID if turn.content else ""
    return message
