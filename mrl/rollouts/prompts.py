"""From a task's prompt to token ids, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from mrl.data.images import pictures_in
from mrl.errors import ConfigError, DataError
from mrl.rollouts.chat.images import ImageWriter
from mrl.types import Media, Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from mrl.config import DataConfig


class PromptEncoder:
    """Renders prompts for one tokenizer.

    Text prompts become a user's message where the format says so; prompts that are messages always go through the chat
    template. processor: of a model that takes images. Raises ConfigError when the format needs a chat template and
    there is none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_format: Literal["auto", "chat", "text"] = "auto",
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        processor: ProcessorMixin | None = None,
    ) -> None:
        """template_kwargs: what the chat template gets besides messages and tools. processor: of a model that takes
        images."""
        if processor is not None and not getattr(tokenizer, "chat_template", None):
            tokenizer.chat_template = processor.chat_template  # older files have it there
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if prompt_format == "chat" and not has_template:
            raise ConfigError("prompt_format: chat needs a chat template and this tokenizer has none; use text")
        if system_prompt is not None and not has_template:
            raise ConfigError("system_prompt needs a chat template and this tokenizer has none; leave it out")
        self.tokenizer = tokenizer
        self.has_template = has_template
        self.chat = has_template if prompt_format == "auto" else prompt_format == "chat"
        self.insists_on_chat = prompt_format == "chat" or system_prompt is not None
        """Whether text prompts are to be messages whatever makes the rollouts, not only because a template is there."""
        self.system_prompt = system_prompt
        self.images = None if processor is None else ImageWriter(processor)
        """None = the model takes none."""
        self.template_kwargs = dict(template_kwargs or {})

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, data: DataConfig, processor: ProcessorMixin | None = None
    ) -> PromptEncoder:
        """As a run's options say."""
        return cls(tokenizer, data.prompt_format, data.system_prompt, data.chat_template_kwargs, processor)

    def notices(self) -> list[str]:
        """Arguments that the chat template does not read."""
        template = str(getattr(self.tokenizer, "chat_template", None))
        unread = [name for name in self.template_kwargs if name not in template]
        return [f"chat_template_kwargs: this model's chat template reads no {name}." for name in unread]

    def messages(self, prompt: Prompt) -> list[Message]:
        """The conversation up to the completion."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return messages

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of the prompt, ready to be continued, with those of its images.

        Raises DataError for messages without a chat template, and for images that the model does not take.
        """
        if isinstance(prompt, str) and not self.chat:
            return list(self.tokenizer(prompt)["input_ids"])
        if not self.has_template:
            raise DataError("prompts are messages and this tokenizer has no chat template; use text prompts")
        messages = self.messages(prompt)
        if self.images is None:
            if pictures := pictures_in(messages):
                raise DataError(f"{pictures[0].where}: the model takes no images; use one that does")
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **self.template_kwargs
            )
            return list(ids)
        shown = self.images.shown(messages)
        text = str(
            self.tokenizer.apply_chat_template(
                shown, add_generation_prompt=True, tokenize=False, **self.template_kwargs
            )
        )
        return list(self.tokenizer(self.images.expand(text, messages), add_special_tokens=False)["input_ids"])

    def media(self, prompt: Prompt, ids: Sequence[int]) -> tuple[Media, ...]:
        """The images of a prompt, whose ids are these. Raises DataError for one that cannot be read."""
        if self.images is None or isinstance(prompt, str):
            return ()
        return tuple(self.images.media(ids, self.messages(prompt)))
