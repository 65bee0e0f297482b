"""Chat formats: conversations as token ids, and completions as messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrl.errors import ConfigError
from mrl.rollouts.chat.base import AssistantTurn, ChatFormat, Past, ToolCall, ToolSpec
from mrl.rollouts.chat.images import ImageWriter
from mrl.rollouts.chat.template import TemplateChat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_format(tokenizer: PreTrainedTokenizerBase, images: ImageWriter | None = None) -> ChatFormat:
    """How this tokenizer writes conversations. images: of a model that takes them. Raises ConfigError where it has no
    chat template."""
    from mrl.rollouts.chat.known import known_chat

    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("conversations of several turns need a chat template, and this tokenizer has none")
    template = TemplateChat(tokenizer, images)
    return known_chat(tokenizer, template) or template


__all__ = ["AssistantTurn", "ChatFormat", "ImageWriter", "Past", "TemplateChat", "ToolCall", "ToolSpec", "chat_format"]
