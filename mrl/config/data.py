"""Options of the tasks."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mrl.config.section import Section
from mrl.errors import ConfigError

TEMPLATE_ARGUMENTS = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "return_dict", "return_tensors", "padding", "truncation", "max_length"),
    }
)
"""Arguments of `apply_chat_template` that are no business of a template."""


class DataConfig(Section):
    """The tasks: where they come from and how their prompts are read."""

    train_dataset: Any = None
    """A `datasets.Dataset`, a list of dicts, or a callable that returns either (Python only)."""
    dataset_name: str | None = None
    """Hub id, local folder or file (jsonl, json, csv, parquet), `tiny-code` (the shipped tasks), `humaneval`, or
    `reasoning_gym:TASK?option=value` (generated ones, e.g. `reasoning_gym:chain_sum?min_terms=2`)."""
    dataset_config: str | None = None
    """Configuration (subset) of a Hub dataset."""
    dataset_split: str = "train"
    """Split to train on."""
    eval_dataset: Any = None
    """Held-out tasks: anything `train_dataset` or `dataset_name` takes; None = the training dataset, when there is an
    `eval_split`. Where there are held-out tasks, they are attempted before the first and after the last step."""
    eval_split: str | None = None
    """Split to evaluate on, e.g. `heldout`, `test`; None = `train` of `eval_dataset`."""
    eval_samples: int | None = Field(64, ge=1)
    """How many held-out tasks an evaluation uses, drawn once by `seed`; None = all."""
    prompt_column: str | None = None
    """Column that holds the prompt, when it is not called `prompt`."""
    rename: dict[str, str] = Field(default_factory=dict)
    """Columns to rename, `{"old": "new"}`; reward functions see the new names."""
    max_samples: int | None = Field(None, ge=0)
    """Use only the first so many rows of the dataset; None or 0 = all."""
    shuffle: bool = True
    """Another order of the tasks each epoch, derived from `seed`."""
    prompt_format: Literal["auto", "chat", "text"] = "auto"
    """How a text prompt reaches the model: `chat` = as a user's message through the chat template, `text` = as it is,
    `auto` = `chat` where the tokenizer has a template. Prompts that are messages always go through the template."""
    system_prompt: str | None = None
    """System message put before every prompt that has none; needs a chat template."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the chat template gets besides messages and tools, e.g. `{"enable_thinking": false}` for Qwen3."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _not_what_is_given_anyway(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(TEMPLATE_ARGUMENTS & value.keys()):
            raise ConfigError(f"chat_template_kwargs: {taken[0]} is given by mrl itself; leave it out")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.train_dataset is not None and self.dataset_name is not None:
            raise ConfigError("train_dataset and dataset_name both name the training tasks: give only one")
        if self.prompt_format == "text" and self.system_prompt is not None:
            raise ConfigError("system_prompt has no effect with prompt_format: text; use prompt_format: chat")
        return self
