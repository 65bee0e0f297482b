"""Recipes: YAML files of options."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from mrl.errors import ConfigError


def load_yaml(path: str | Path) -> dict[str, Any]:
    """A recipe's options, flat or by section. Raises ConfigError naming file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give the path of a YAML recipe") from None
    try:
        _check_keys(yaml.compose(text, Loader=yaml.SafeLoader), str(path))
        options = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None
    if options is None:
        return {}
    return {key: yaml_numbers(value) for key, value in options.items()}


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
        lines = _lines(path)
        named = [found.rpartition(".")[2] for found in _SUBJECTS.findall(message)]
        found = sorted({lines[name] for name in named if name in lines and name not in set(given)})
        if not found:
            raise
        where = f"line {found[0]}" if len(found) == 1 else f"lines {', '.join(map(str, found))}"
        raise type(error)(f"{path}, {where}: {message}") from error


_SUBJECTS = re.compile(r"(?:^|; )(?:unknown option ')?([A-Za-z_][\w.]*)(?=[:' ])")
"""What the sentences of an error are about: each begins with the option's name."""


def _lines(path: Path) -> dict[str, int]:
    """The line of every option in a recipe, flat or below its section."""
    root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    lines: dict[str, int] = {}
    for key, value in root.value if isinstance(root, yaml.MappingNode) else []:
        lines[key.value] = key.start_mark.line + 1
        for inner, _ in value.value if isinstance(value, yaml.MappingNode) else []:
            lines.setdefault(inner.value, inner.start_mark.line + 1)
    return lines


def _check_keys(root: yaml.Node | None, path: str) -> None:
    """Raise ConfigError for what is no mapping of names, and for a name that is there twice: YAML takes the last."""
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag.endswith(":null")):
        return
    if not isinstance(root, yaml.MappingNode):
        line = root.start_mark.line + 1
        kind = "list" if isinstance(root, yaml.SequenceNode) else "text"
        raise ConfigError(f"{path}, line {line}: a recipe is a list of `option: value` lines, found a {kind}")
    for mapping in [root, *(value for _, value in root.value if isinstance(value, yaml.MappingNode))]:
        first: dict[str, int] = {}
        for key, value in mapping.value:
            line = key.start_mark.line + 1
            if not key.tag.endswith(":str"):
                raise ConfigError(f"{path}, line {line}: a recipe is a list of `option: value`, found {key.value!r}")
            if isinstance(key.value, str) and first.setdefault(key.value, line) != line:
                raise ConfigError(f"{path}, line {line}: {key.value} is there already, in line {first[key.value]}")
            try:
                yaml.SafeLoader("").construct_object(value, deep=True)
            except ValueError as error:  # what looks like a date and is none
                raise ConfigError(f"{path}, line {line}: {key.value}: {error}; put text in quotes") from None


def yaml_value(text: str) -> Any:
    """One value as a recipe would have it: `true`, `1e-5`, `[1, 2]`, text. Raises ConfigError."""
    try:
        return yaml_numbers(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r} is not a YAML value ({getattr(error, 'problem', error)})") from None


def yaml_numbers(value: Any) -> Any:
    """YAML 1.1 reads `1e-5` as text (it wants `1.0e-5`); people write the former."""
    if isinstance(value, dict):
        return {key: yaml_numbers(inner) for key, inner in value.items()}
    if isinstance(value, str) and "e" in value.lower() and value[:1] in "+-.0123456789":
        try:
            return float(value)
        except ValueError:
            return value
    return value
