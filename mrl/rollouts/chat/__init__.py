"""Chat formats: conversations as token ids, and completions as messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mrl.errors import ConfigError
from mrl.rollouts.chat.base import AssistantTurn, ChatFormat, Past, ToolCall, ToolSpec
from mrl.rollouts.chat.images import ImageWriter
from mrl.rollouts.chat.template import TemplateChat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_format(
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    images: ImageWriter | None = None,
) -> ChatFormat:
    """How this tokenizer writes conversations. Raises ConfigError where it has no chat template.

    template_kwargs: what the template gets besides messages and tools, e.g. {"enable_thinking": False}. images: of a
    model that takes them.
    """
    from mrl.rollouts.chat.known import known_chat

    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("conversations of several turns need a chat template, and this tokenizer has none")
    template = TemplateChat(tokenizer, template_kwargs, images)
    return known_chat(tokenizer, template) or template


__all__ = ["AssistantTurn", "ChatFormat", "ImageWriter", "Past", "TemplateChat", "ToolCall", "ToolSpec", "chat_format"]
