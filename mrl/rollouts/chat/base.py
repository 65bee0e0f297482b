"""What a chat format is: between messages and token ids, in both directions, for one tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from mrl.types import Message

ToolSpec = dict[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class AssistantTurn:
    """What a completion says."""

    content: str
    reasoning: str | None = None
    """None = no thinking at all; "" = an empty block of it, which a template may remove from the history too."""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    """Calls that were begun and cannot be read, as they were written. They stay in `content`."""
    still_thinking: bool = False
    """The completion ended before its thinking did."""

    @property
    def message(self) -> Message:
        """The turn as chat templates take it."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True)
class Past:
    """A conversation up to the end of a completion."""

    messages: list[Message]
    """Before the completion."""
    prompt_ids: list[int]
    completion_ids: list[int]
    turn: AssistantTurn
    """What the completion says."""
    closed: bool
    """Whether the completion ends with an end-of-turn token. One that ended by length, or by a stop string, does not.
    """
    tools: list[ToolSpec] = field(default_factory=list)


class ChatFormat(Protocol):
    """One tokenizer's way of writing conversations."""

    stop_token_ids: tuple[int, ...]
    """Ids that end the assistant's turn, besides those the model's own configuration has."""
    takes_tools: bool
    """Whether it writes calls of tools in a way that can be read back."""

    def closes(self, token_id: int) -> bool:
        """Whether a completion that ends with this token has ended its turn: these, and other special tokens."""
        ...

    def render(self, messages: list[Message], tools: list[ToolSpec]) -> list[int]:
        """Ids of a prompt that the assistant continues. Raises DataError for messages that the template refuses."""
        ...

    def extend(self, past: Past, new: list[Message]) -> list[int] | None:
        """Ids between a completion and the assistant's next turn: the end of its turn (where the completion has none),
        the new messages, and the beginning of the next turn.

        None where no ids will do, because the template writes what is past differently once there is more.
        Raises DataError for messages that the template refuses.
        """
        ...

    def parse(self, completion_ids: list[int], prompt_ids: list[int], tools: list[ToolSpec]) -> AssistantTurn:
        """What a completion says. Never raises: what cannot be read as a call is text, and noted."""
        ...
