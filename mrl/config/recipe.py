"""Recipes: YAML files of options."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from mrl.errors import ConfigError
from mrl.system.yaml_values import yaml_numbers


def load_recipe(path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A recipe's options, flat or by section, and the line (from 1) of each key by its path: `training.batch_size`.

    Raises ConfigError naming file and line, also where a key stands twice: YAML would take the last one.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give the path of a YAML recipe") from None
    try:
        lines = _lines(yaml.compose(text, Loader=yaml.SafeLoader), path)
        options = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None
    return {key: yaml_numbers(value) for key, value in options.items()}, lines


@contextlib.contextmanager
def located(path: Path | None, given: Iterable[str] = ()) -> Iterator[None]:
    """Within it, a ConfigError about what the recipe at `path` says begins with the file and the line.

    given: options whose value is not the recipe's, flags for one.
    """
    try:
        yield
    except ConfigError as error:
        message = str(error)
        if path is None or message.startswith(str(path)):
            raise
        lines: dict[str, int] = {}
        for key, line in load_recipe(path)[1].items():
            lines.setdefault(key.rpartition(".")[2], line)
        named = [found.rpartition(".")[2] for found in _SUBJECTS.findall(message)]
        found = sorted({lines[name] for name in named if name in lines and name not in set(given)})
        if not found:
            raise
        where = f"line {found[0]}" if len(found) == 1 else f"lines {', '.join(map(str, found))}"
        there = type(error)(f"{path}, {where}: {message}")
        there.worded = error.worded
        raise there from error


_SUBJECTS = re.compile(r"(?:^|; )(?:unknown option ')?([A-Za-z_][\w.]*)(?=[:' ])")
"""What the sentences of an error are about: each begins with the option's name."""


def _lines(root: yaml.Node | None, path: str | Path) -> dict[str, int]:
    """The line of every key. Raises ConfigError for what is no mapping of names."""
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag.endswith(":null")):
        return {}
    if not isinstance(root, yaml.MappingNode):
        kind = "list" if isinstance(root, yaml.SequenceNode) else "text"
        raise ConfigError(
            f"{path}, line {root.start_mark.line + 1}: a recipe is a list of `option: value` lines, found a {kind}"
        )
    return _lines_within(root, path)


def _lines_within(
    node: yaml.MappingNode, path: str | Path, prefix: str = "", above: tuple[yaml.Node, ...] = ()
) -> dict[str, int]:
    """Of a mapping's keys and of the mappings in it. Raises ConfigError for one that stands twice."""
    if node in above:
        raise ConfigError(f"{path}, line {node.start_mark.line + 1}: {prefix[:-1]} is an alias of what it stands in")
    lines: dict[str, int] = {}
    inner: dict[str, int] = {}
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        line = key.start_mark.line + 1
        if not key.tag.endswith(":str"):
            raise ConfigError(f"{path}, line {line}: a recipe is a list of `option: value`, found {key.value!r}")
        name = f"{prefix}{key.value}"
        if name in lines:
            raise ConfigError(f"{path}, line {line}: {name} is given twice, first in line {lines[name]}: give it once")
        lines[name] = line
        if isinstance(value, yaml.MappingNode):
            inner |= _lines_within(value, path, f"{name}.", (*above, node))
            continue
        try:
            yaml.SafeLoader("").construct_object(value, deep=True)
        except ValueError as error:  # what looks like a date and is none
            raise ConfigError(f"{path}, line {line}: {name}: {error}; put text in quotes") from None
    return lines | inner
