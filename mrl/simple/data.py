"""The dataset's rows in the shape each of TRL's trainers learns from, checked before a model is loaded."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from mrl.config import OrchestratorConfig
from mrl.data.tasks import Row, columns_of
from mrl.errors import ConfigError, DataError
from mrl.rollouts.prompts import PromptEncoder
from mrl.simple.trainers import TrainerSpec
from mrl.types import Task, derive_seed

if TYPE_CHECKING:
    from datasets import Dataset

TASK = "mrl_task"
"""Column that says which task a prompt belongs to."""
ANSWERS = ("completion", "chosen", "rejected")


def check_shape(rows: list[Row], spec: TrainerSpec, where: str, text_column: str = "text") -> tuple[str, ...]:
    """The columns that `spec` learns from in these rows. Raises DataError naming row and column.

    text_column: what the column of plain texts is called (TRL's `dataset_text_field`).
    """
    there = columns_of(rows)
    shapes = [tuple(text_column if name == "text" else name for name in shape) for shape in spec.shapes]
    shape = next((shape for shape in shapes if set(shape) <= set(there)), None)
    if shape is None:
        wanted = ", or ".join(" + ".join(map(repr, shape)) for shape in shapes)
        raise DataError(
            f"{where}: algorithm {spec.name} learns from the columns {wanted}; there are {', '.join(there) or 'none'}. "
            "Use rename, e.g. --rename response=completion"
        )
    for index, row in enumerate(rows):
        for name in shape:
            _check_cell(row.get(name), name, f"{where}: row {index}, column {name!r}")
        _check_alike(row, shape, f"{where}: row {index}")
    if "prompt" not in shape and spec.name == "dpo" and isinstance(rows[0]["chosen"], str):
        raise DataError(f"{where}: algorithm dpo needs a column 'prompt' where chosen and rejected are text")
    return shape


def make_examples(rows: list[Row], shape: tuple[str, ...], encoder: PromptEncoder) -> list[Row]:
    """Only the columns that are learned from, with text prompts as messages where `prompt_format` says so.

    Raises ConfigError for a system prompt that has nowhere to go, DataError for messages without a chat template.
    """
    if "prompt" not in shape and "messages" not in shape and encoder.system_prompt is not None:
        raise ConfigError(f"system_prompt: rows of {', '.join(shape)} have no prompt to put it before; leave it out")
    examples = []
    for row in rows:
        example = {name: row[name] for name in shape}
        has_messages = any(isinstance(value, list) for value in example.values())
        if has_messages and not encoder.has_template:
            raise DataError("rows are messages and this tokenizer has no chat template; use text columns")
        if "messages" in shape:
            example["messages"] = encoder.messages(example["messages"])
        if "prompt" in shape and (encoder.chat or has_messages):
            example["prompt"] = encoder.messages(example["prompt"])
            for name in ANSWERS:
                if isinstance(example.get(name), str):
                    example[name] = [{"role": "assistant", "content": example[name]}]
        examples.append(example)
    return examples


def examples_dataset(examples: list[Row], config: OrchestratorConfig, spec: TrainerSpec) -> Dataset:
    """The examples for a trainer that learns from them."""
    from datasets import Dataset

    if spec.name == "kto" and config.data.shuffle:  # it compares neighbours and wants one order throughout
        examples = list(examples)
        random.Random(derive_seed(config.training.seed, "epoch", 0)).shuffle(examples)
    return Dataset.from_list(examples)


def prompts_dataset(tasks: list[Task], numbers: range, encoder: PromptEncoder) -> Dataset:
    """The prompts for a trainer that answers them: `prompt` as TRL takes it, and the task's number.

    Prompts are put in when a row is read: Arrow would give every message every key of the others.
    """
    from datasets import Dataset

    as_messages = encoder.chat or any(not isinstance(task.prompt, str) for task in tasks)
    if as_messages and not encoder.chat and any(isinstance(task.prompt, str) for task in tasks):
        raise ConfigError(
            "prompt_format: text with prompts that are partly text and partly messages cannot be had with mode: simple;"
            " use prompt_format: chat"
        )
    prompts = {
        number: encoder.messages(task.prompt) if as_messages else task.prompt
        for number, task in zip(numbers, tasks, strict=True)
    }

    def put_in(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"prompt": [prompts[number] for number in batch[TASK]], TASK: list(batch[TASK])}

    return Dataset.from_dict({TASK: list(numbers)}).with_transform(put_in)


def _check_cell(value: Any, name: str, where: str) -> None:
    if name == "label":
        if not isinstance(value, bool):
            raise DataError(f"{where} is {value!r:.60}: a label is true (wanted) or false")
        return
    if value is None:
        raise DataError(f"{where} is missing")
    if not isinstance(value, str | list) or (name == "messages" and isinstance(value, str)):
        kinds = "a list of messages" if name == "messages" else "text or a list of messages"
        raise DataError(f"{where} is of type {type(value).__name__}: it must be {kinds}")
    if not value or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{where} is empty")
    for number, message in enumerate(value if isinstance(value, list) else []):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{where}, message {number}: a message is a dict with 'role' and 'content'")


def _check_alike(row: Row, shape: tuple[str, ...], where: str) -> None:
    """Answers are all text or all messages."""
    kinds = {name: isinstance(row[name], list) for name in shape if name != "label"}
    if len({kind for name, kind in kinds.items() if name != "prompt"}) > 1:
        listed = ", ".join(f"{name}: {'messages' if kind else 'text'}" for name, kind in kinds.items())
        raise DataError(f"{where} mixes text and messages ({listed}); use one of them")
