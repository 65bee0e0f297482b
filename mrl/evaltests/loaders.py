"""Where rows come from: inline ones, functions that make them, JSONL files, the Hub; and adapters between."""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mrl.data import load_rows
from mrl.errors import DataError
from mrl.evaltests.messages import Message
from mrl.evaltests.rows import EvaluationRow

Rows = list[EvaluationRow]
Adapter = Callable[[list[dict[str, Any]]], Rows]
Preprocess = Callable[[Rows], Rows]


@dataclass
class DataLoaderResult:
    """What a variant of a loader gives."""

    rows: Rows
    type: str
    variant_id: str
    variant_description: str | None = None
    preprocessed: bool = False


@dataclass(kw_only=True)
class EvaluationDataLoader(ABC):
    """Gives rows, in one or several variants."""

    preprocess_fn: Preprocess | None = None
    """What is done to the rows of each variant."""

    @abstractmethod
    def variants(self) -> Sequence[Callable[[], DataLoaderResult]]:
        """What each of them loads with."""

    def load(self) -> list[DataLoaderResult]:
        """All of them. Each row's `dataset_info` says which variant it is of, and its place in it."""
        loaded = []
        for variant in self.variants():
            result = variant()
            before = len(result.rows)
            if self.preprocess_fn is not None:
                result.rows, result.preprocessed = self.preprocess_fn(result.rows), True
            for index, row in enumerate(result.rows):
                row.input_metadata.dataset_info = (row.input_metadata.dataset_info or {}) | {
                    "data_loader_type": result.type,
                    "data_loader_variant_id": result.variant_id,
                    "data_loader_variant_description": result.variant_description,
                    "data_loader_preprocessed": result.preprocessed,
                    "data_loader_num_rows": before,
                    "data_loader_num_rows_after_preprocessing": len(result.rows),
                    "data_loader_row_idx": index,
                }
            loaded.append(result)
        return loaded


@dataclass(kw_only=True)
class InlineDataLoader(EvaluationDataLoader):
    """Rows, or conversations, that are written down. Raises ValueError for neither."""

    rows: Rows | None = None
    messages: Sequence[list[Any]] | None = None
    id: str = "inline"
    description: str | None = None

    def __post_init__(self) -> None:
        if self.rows is None and self.messages is None:
            raise ValueError("InlineDataLoader: give rows or messages")

    def variants(self) -> Sequence[Callable[[], DataLoaderResult]]:
        def load() -> DataLoaderResult:
            rows = [row.model_copy(deep=True) for row in self.rows or []]
            rows += [row_of_messages(one) for one in self.messages or []]
            return DataLoaderResult(rows, type(self).__name__, self.id, self.description)

        return [load]


@dataclass(kw_only=True)
class DynamicDataLoader(EvaluationDataLoader):
    """Functions that make rows whenever they are asked; each is a variant."""

    generators: Sequence[Callable[[], Rows]]

    def variants(self) -> Sequence[Callable[[], DataLoaderResult]]:
        def loading(generator: Callable[[], Rows]) -> Callable[[], DataLoaderResult]:
            name = getattr(generator, "__name__", type(generator).__name__)
            return lambda: DataLoaderResult(
                list(generator()), type(self).__name__, name, inspect.getdoc(generator) or None
            )

        return [loading(generator) for generator in self.generators]


@dataclass(kw_only=True)
class EvaluationRowJsonlDataLoader(EvaluationDataLoader):
    """A file with an EvaluationRow in each line."""

    jsonl_path: str
    id: str = "jsonl"
    description: str | None = None

    def variants(self) -> Sequence[Callable[[], DataLoaderResult]]:
        def load() -> DataLoaderResult:
            rows = adapted(read_dataset(self.jsonl_path), default_dataset_adapter, self.jsonl_path)
            return DataLoaderResult(rows, type(self).__name__, self.id, self.description)

        return [load]


def row_of_messages(messages: Sequence[Any]) -> EvaluationRow:
    """A row of a conversation: messages, or dicts of their fields."""
    return EvaluationRow(
        messages=[m.model_copy(deep=True) if isinstance(m, Message) else Message.model_validate(m) for m in messages]
    )


def default_dataset_adapter(rows: list[dict[str, Any]]) -> Rows:
    """Dicts as rows: those of an EvaluationRow as they are.

    A dict without `messages` is one of a dataset: its `prompt` (text or messages), or `question` or `instruction`,
    becomes the conversation, `ground_truth` or `answer` the ground truth, `id` the row's id, and every column stays in
    `dataset_info`. Raises ValueError for one without any of them.
    """
    return [EvaluationRow.model_validate(row) if "messages" in row else _of_columns(row) for row in rows]


def read_dataset(name: str, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of a JSONL file, or of whatever else a dataset's name may stand for (a file, a folder, a Hub id, whose
    split may follow: `org/name:test`). Raises DataError."""
    path = Path(name).expanduser()
    if path.suffix == ".jsonl":
        return _read_jsonl(path, limit)
    source, colon, split = name.rpartition(":")
    hub = colon and "/" in source and not path.exists()
    return load_rows(source if hub else name, split=split if hub else "train", max_samples=limit).rows


def adapted(rows: list[dict[str, Any]], adapter: Adapter, where: str) -> Rows:
    """What the adapter makes of them. Raises DataError for what are no rows."""
    try:
        made = adapter(rows)
    except (ValidationError, ValueError, TypeError, KeyError) as error:
        name = getattr(adapter, "__name__", type(adapter).__name__)
        raise DataError(f"{where}: {name} cannot make rows of it: {type(error).__name__}: {error}") from error
    return list(made)


def _read_jsonl(path: Path, limit: int | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                number += 1
                if limit is not None and len(rows) >= limit:
                    break
                if line.strip():
                    rows.append(json.loads(line))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}; looked in {Path.cwd()})") from None
    except ValueError as error:
        raise DataError(f"{path}, line {number}: is no JSON ({error})") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: is of type {type(row).__name__}, and a row is an object")
    return rows


def _of_columns(row: dict[str, Any]) -> EvaluationRow:
    prompt = next((row[name] for name in ("prompt", "question", "instruction") if row.get(name) is not None), None)
    if prompt is None:
        raise ValueError(
            f"a row has no messages and no prompt (its columns: {', '.join(map(str, row)) or 'none'}); give a "
            "dataset_adapter, which makes EvaluationRows of them"
        )
    made = row_of_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    made.ground_truth = next((row[name] for name in ("ground_truth", "answer") if row.get(name) is not None), None)
    if row.get("id") is not None:
        made.input_metadata.row_id = str(row["id"])
    made.input_metadata.dataset_info = dict(row)
    return made
