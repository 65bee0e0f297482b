"""`reasoning_gym:TASK?option=value&…`: generated tasks with a verifier (github.com/open-thought/reasoning-gym).

A row holds the arguments that its task was generated with: the verifier generates the same task again, wherever it
runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import json
import random
from collections.abc import Iterator
from typing import Any

from mrl.errors import ConfigError, DataError
from mrl.system.yaml_values import yaml_value
from mrl.types import derive_seed

DEFAULT_SIZE = 500
"""Tasks when neither `max_samples` nor the option `size` says how many: the library's own default."""
COLUMN = "reasoning_gym"


def reasoning_gym(
    argument: str, *, config: str | None, split: str, max_samples: int | None, seed: int
) -> list[dict[str, Any]]:
    """`max_samples` tasks of one kind, drawn from `seed` and the split's name: any split there may be is another draw.

    argument: "chain_sum", or "chain_sum?min_terms=2&max_terms=4" with options of that task's configuration. Each row
    has `prompt`, `answer` (the library's; others may be right too) and what the verifier needs. Raises DataError.
    """
    where = f"dataset 'reasoning_gym:{argument}'"
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError(f"{where}: reasoning-gym is not installed; pip install 'mrl[reasoning-gym]'")
    if config is not None:
        raise DataError(
            f"{where}: has no config, but dataset_config is {config!r}: options follow the name, as ?a=1&b=2"
        )
    task, _, query = argument.partition("?")
    options = _options(query, where)
    size = options.pop("size", None) or max_samples or DEFAULT_SIZE
    _check(task, options, where)
    recipe: dict[str, Any] = {
        "task": task,
        "options": json.dumps(options, sort_keys=True),
        "seed": options.pop("seed", None) or derive_seed(seed, "reasoning_gym", split) % 2**31,
        "size": size,
    }
    rows = []
    for index in range(min(size, max_samples or size)):
        try:
            made = entry(**recipe, index=index)
        except (AssertionError, ValueError, TypeError) as error:
            raise DataError(f"{where}: {type(error).__name__}: {error}") from error
        prompt, answer = str(made["question"]), made.get("answer")
        rows.append(
            {
                "id": f"{task}-{recipe['seed']}-{index}",
                "prompt": prompt,
                "answer": None if answer is None else str(answer),
                COLUMN: {**recipe, "index": index},
            }
        )
    return rows


reasoning_gym.reward = "reasoning_gym"  # type: ignore[attr-defined]  # what scores these tasks when nothing else is named


def entry(task: str, options: str, seed: int, size: int, index: int) -> dict[str, Any]:
    """One task as the library has it: question, answer, metadata. The same for the same arguments.

    options: JSON. Raises whatever the library raises for options that will not do.
    """
    with _own_random(seed, index):
        made: dict[str, Any] = dataset(task, options, seed, size)[index]
    return made


@functools.lru_cache(maxsize=32)
def dataset(task: str, options: str, seed: int, size: int) -> Any:
    """The library's dataset behind some rows."""
    import reasoning_gym as library

    return library.create_dataset(task, **{**json.loads(options), "seed": seed, "size": size})


def _options(query: str, where: str) -> dict[str, Any]:
    options = {}
    for pair in query.split("&") if query else []:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise DataError(
                f"{where}: {pair!r} is not of the form option=value; e.g. reasoning_gym:chain_sum?min_terms=2"
            )
        try:
            options[name] = yaml_value(value)
        except ConfigError as error:
            raise DataError(f"{where}: {name}: {error}") from None
    if "size" in options and (not isinstance(options["size"], int) or options["size"] < 1):
        raise DataError(f"{where}: size is {options['size']!r}: give a number of tasks")
    return options


def _check(task: str, options: dict[str, Any], where: str) -> None:
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS or task == "composite":
        close = difflib.get_close_matches(task, list(DATASETS), n=3)
        hint = (
            f"; did you mean {', '.join(close)}?"
            if close
            else f" (some of {len(DATASETS)}: {', '.join(list(DATASETS)[1:9])} …)"
        )
        raise DataError(f"{where}: reasoning-gym has no task {task!r}{hint}")
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise DataError(f"{where}: {task} has no option {name!r}{hint} (options: {', '.join(known)})")


@contextlib.contextmanager
def _own_random(*parts: int) -> Iterator[None]:
    """Some tasks draw from Python's global generator: give them one that depends on nothing else."""
    state = random.getstate()
    random.seed(derive_seed("reasoning_gym", *parts))
    try:
        yield
    finally:
        random.setstate(state)
