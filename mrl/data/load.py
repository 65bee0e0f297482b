"""`load_tasks`: from anything a user may have to a list of tasks."""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mrl.data import files
from mrl.data.files import FirstRows
from mrl.data.sources import DATASETS
from mrl.data.tasks import Row, columns_of, rename_columns, rows_to_tasks
from mrl.errors import ConfigError, DataError
from mrl.types import Task


@dataclass(frozen=True)
class KnownDataset:
    """What a Hub dataset needs so that it works by its name alone."""

    config: str | None
    """Taken when none is asked for."""
    rename: Mapping[str, str]
    """Leaves out what the user's own `rename` or `prompt_column` deals with."""


KNOWN_DATASETS = {
    # The Hub has no default config for it; this is the one with test cases.
    "opencoder-llm/opc-sft-stage2": KnownDataset(
        "educational_instruct", {"instruction": "prompt", "testcase": "testcases"}
    ),
}
"""By Hub id in lower case."""


class Loaded(NamedTuple):
    """Rows, and what can be said of them."""

    rows: list[Row]
    where: str
    """The name errors give them."""
    total: int | None
    """How many rows the source has, before `max_samples`; None = a stream, which nobody counts."""


def load_tasks(
    source: Any,
    *,
    config: str | None = None,
    split: str = "train",
    prompt_column: str | None = None,
    rename: Mapping[str, str] | None = None,
    max_samples: int | None = None,
    seed: int = 0,
) -> list[Task]:
    """Tasks from a Hub id, a local file or folder, a `datasets.Dataset`, a list of dicts, or a callable.

    source: a name in `DATASETS` such as "tiny-code"; a path (.jsonl, .json, .csv, .parquet, also .gz, or a folder of
        these, or one that `save_to_disk` wrote); a Hub id; a Dataset; a DatasetDict; an IterableDataset (with
        `max_samples`); a list of dicts; or a callable that returns one of these. A callable gets those of `config`,
        `split`, `max_samples` and `seed` that its signature names.
    config: configuration (subset) of a Hub dataset or of a folder with a dataset card.
    split: name, for the Hub and folders also a slice like "train[:100]". A file, a list and a Dataset have no
        splits but the whole, "train": any other name is refused, lest held-out tasks turn out to be the training tasks.
    prompt_column: the column that holds the prompts (text, or messages), if it is not "prompt".
    rename: {"old": "new"}, all at once. `OpenCoder-LLM/opc-sft-stage2` has its own, see `KNOWN_DATASETS`.
    max_samples: the first so many rows, in the dataset's order; 0 or None = all.
    seed: for sources that draw their rows. The order of training is `TaskOrder`'s.

    A task's id is the row's `id` (else `task_id`), which stays a column too; without one it is a hash of the row's
    content. None entries inside nested values of Arrow data are removed: Arrow gives every struct every key.
    Raises DataError naming file, row (from 0) and column.
    """
    loaded = load_rows(
        source,
        config=config,
        split=split,
        prompt_column=prompt_column,
        rename=rename,
        max_samples=max_samples,
        seed=seed,
    )
    return rows_to_tasks(loaded.rows, loaded.where)


def load_rows(
    source: Any,
    *,
    config: str | None = None,
    split: str = "train",
    prompt_column: str | None = None,
    rename: Mapping[str, str] | None = None,
    max_samples: int | None = None,
    seed: int = 0,
) -> Loaded:
    """The rows behind `load_tasks`, also for data whose rows are no tasks. Raises DataError."""
    if max_samples is not None and max_samples < 0:
        raise DataError(f"max_samples is {max_samples}: give the number of rows, 0 for all")
    limit = max_samples or None
    part, where = _read(source, config, split, limit, seed)
    rows = list(itertools.islice(part.rows, limit))
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{where}: row {index} is of type {type(row).__name__}: a row is a dict of columns")
        bad = next((name for name in row if not isinstance(name, str)), None)
        if bad is not None:
            raise DataError(f"{where}: row {index}: the column name {bad!r} is of type {type(bad).__name__}, not text")
    if not rows:
        raise DataError(f"{where}: the dataset is empty")
    return Loaded(rename_columns(rows, _renames(source, rows, prompt_column, rename, where), where), where, part.total)


def _read(
    source: Any, config: str | None, split: str, limit: int | None, seed: int, where: str = ""
) -> tuple[FirstRows, str]:
    """Rows and the name errors give them."""
    if isinstance(source, str | Path):
        return _read_name(source, config, split, limit, seed)
    if callable(source) and not files.is_dataset(source):
        return _read_callable(source, config, split, limit, seed)
    where = where or f"dataset ({type(source).__name__})"
    if config is not None:
        raise DataError(f"{where}: config {config!r} applies to Hub datasets and folders only: remove it")
    if files.is_dataset(source):
        return files.dataset_rows(source, split, limit, where), where
    if isinstance(source, list | tuple):
        files.require_whole(split, where)
        # Not through datasets.Dataset.from_list: it takes the columns of the first row only, and drops the others.
        return FirstRows(source, len(source)), where
    if type(source).__name__ == "DataFrame":
        raise DataError(f"{where}: give a pandas DataFrame as frame.to_dict('records')")
    raise DataError(
        f"{where}: expected a Hub id, a path, a datasets.Dataset, a list of dicts, or a callable that returns one"
    )


def _read_name(
    source: str | Path, config: str | None, split: str, limit: int | None, seed: int
) -> tuple[FirstRows, str]:
    text = str(source)
    where = f"dataset {text!r}"
    if isinstance(source, str):
        name, _, argument = source.partition(":")
        if name in DATASETS.names():
            rows = DATASETS.get(name)(argument, config=config, split=split, max_samples=limit, seed=seed)
            return FirstRows(rows, len(rows)), where
        if argument and not Path(source).exists() and "/" not in name and len(name) > 1:
            try:
                DATASETS.get(name)
            except ConfigError as error:
                raise DataError(str(error)) from error
    path = Path(text).expanduser()
    if path.exists():
        return files.read_path(path, config, split, limit), where
    if isinstance(source, Path) or files.looks_like_path(text):
        raise files.no_such_path(path)
    known = KNOWN_DATASETS.get(text.lower())
    close = difflib.get_close_matches(text, DATASETS.names(), n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return files.read_hub(text, config or (known.config if known else None), split, limit, hint), where


def _read_callable(
    source: Callable[..., Any], config: str | None, split: str, limit: int | None, seed: int
) -> tuple[FirstRows, str]:
    name = getattr(source, "__qualname__", type(source).__name__)
    where = f"dataset {name}()"
    offered = {"config": config, "split": split, "max_samples": limit, "seed": seed}
    try:
        parameters = list(inspect.signature(source).parameters.values())
    except ValueError:  # some builtins have no signature
        parameters = []
    every = any(p.kind is p.VAR_KEYWORD for p in parameters)
    taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in offered
    ]
    if missing:
        raise DataError(f"{where} wants {', '.join(missing)}: it may only take {', '.join(offered)}, or nothing")
    if config is not None and not every and "config" not in taken:
        raise DataError(f"{where} takes no config, but dataset_config is {config!r}: remove it")
    takes_split = every or "split" in taken
    try:
        result = source(**{k: v for k, v in offered.items() if every or k in taken})
        if cut := inspect.isgenerator(result) and limit is not None:
            result = list(itertools.islice(result, limit))
        elif inspect.isgenerator(result):
            result = list(result)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{where} raised {type(error).__name__}: {error}") from error
    if isinstance(result, str | Path) or (callable(result) and not files.is_dataset(result)):
        raise DataError(f"{where} returned type {type(result).__name__}: it must return a Dataset or a list of dicts")
    if result is None:
        raise DataError(f"{where} returned None: it must return a Dataset or a list of dicts")
    if not takes_split and not files.has_splits(result):
        files.require_whole(split, where)
    split = "train" if takes_split and not files.has_splits(result) else split
    part, where = _read(result, None, split, limit, seed, where)
    return (FirstRows(part.rows, None) if cut else part), where


def _renames(
    source: Any, rows: list[Row], prompt_column: str | None, rename: Mapping[str, str] | None, where: str
) -> dict[str, str]:
    """The user's renames, and the built-in ones that they leave room for."""
    wanted = dict(rename or {})
    if prompt_column is not None and prompt_column != "prompt":
        if wanted.get(prompt_column, "prompt") != "prompt":
            raise DataError(f"{where}: prompt_column and rename both name column {prompt_column!r}: give only one")
        wanted[prompt_column] = "prompt"
    there = columns_of(rows)
    keeps_prompt = prompt_column == "prompt"
    known = KNOWN_DATASETS.get(source.lower()) if isinstance(source, str) else None
    for old, new in (known.rename if known else {}).items():
        free = old not in wanted and new not in wanted.values() and new not in there
        if old in there and free and not (keeps_prompt and new == "prompt"):
            wanted[old] = new
    return wanted
