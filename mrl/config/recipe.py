"""Recipes: YAML files of options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mrl.errors import ConfigError


def load_recipe(path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A recipe's options, flat or by section, and the line (from 1) of each key by its path: `training.batch_size`.

    Raises ConfigError naming file and line, also where a key stands twice: YAML would take the last one.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give the path of a YAML recipe") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines = {} if node is None else _lines(node, Path(path))
        options = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None
    if options is None:
        return {}, {}
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        raise ConfigError(f"{path}: a recipe is a list of `option: value` lines, found {type(options).__name__}")
    return {key: yaml_numbers(value) for key, value in options.items()}, lines


def _lines(node: yaml.Node, path: Path, prefix: str = "", above: tuple[yaml.Node, ...] = ()) -> dict[str, int]:
    """The line of every key of a mapping and of the mappings in it. Raises ConfigError for one that stands twice."""
    if not isinstance(node, yaml.MappingNode):
        return {}
    if node in above:
        raise ConfigError(f"{path}, line {node.start_mark.line + 1}: {prefix[:-1]} is an alias of what it stands in")
    lines: dict[str, int] = {}
    inner: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{path}, line {line}: {name} is given twice, first in line {lines[name]}: give it once")
        lines[name] = line
        inner |= _lines(value, path, f"{name}.", (*above, node))
    return lines | inner


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
