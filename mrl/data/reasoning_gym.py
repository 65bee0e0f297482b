"""`reasoning_gym:TASK?option=value&…`: generated tasks with a verifier (github.com/open-thought/reasoning-gym).

A row holds the arguments that its task was generated with: the verifier generates the same task again, wherever it
runs. Some tasks are drawn from sets, whose order follows the interpreter's hash seed
(`PYTHONHASHSEED`), so they are generated, here and there, by an interpreter whose hash seed is 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import json
import os
import random
import subprocess
import sys
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
    try:
        made = _make(recipe, min(size, max_samples or size))
    except _CannotBeMade as error:
        raise DataError(f"{where}: {error}") from None
    return [
        {
            "id": f"{task}-{recipe['seed']}-{index}",
            "prompt": prompt,
            "answer": answer,
            COLUMN: {**recipe, "index": index},
        }
        for index, (prompt, answer) in enumerate(made)
    ]


reasoning_gym.reward = "reasoning_gym"  # type: ignore[attr-defined]  # what scores these tasks when nothing else is named


class _CannotBeMade(Exception):
    pass


def _make(recipe: dict[str, Any], count: int) -> list[tuple[str, str | None]]:
    """Questions and answers of the first `count` tasks, by an interpreter whose hash seed is 0: this one, where it is.
    Raises _CannotBeMade."""
    if not sys.flags.hash_randomization:
        try:
            entries = [entry(**recipe, index=index) for index in range(count)]
        except (AssertionError, ValueError, TypeError) as error:
            raise _CannotBeMade(f"{type(error).__name__}: {error}") from error
        pairs = ((str(made["question"]), made.get("answer")) for made in entries)
        return [(question, None if answer is None else str(answer)) for question, answer in pairs]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", "from mrl.data.reasoning_gym import make_for_parent; make_for_parent()"],
        input=json.dumps([recipe, count]),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
    )
    said: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr.strip()[-500:]}
    if "error" in said:
        raise _CannotBeMade(said["error"])
    return [(question, answer) for question, answer in said["made"]]


def make_for_parent() -> None:
    """The child of `_make`: a recipe and a count on stdin, what was made, as JSON, on stdout."""
    recipe, count = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # for what the library prints
        try:
            said: dict[str, Any] = {"made": _make(recipe, count)}
        except _CannotBeMade as error:
            said = {"error": str(error)}
    print(json.dumps(said))


def entry(task: str, options: str, seed: int, size: int, index: int) -> dict[str, Any]:
    """One task as the library has it: question, answer, metadata. The same for the same arguments and hash seed.

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
