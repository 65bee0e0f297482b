"""Single values as recipes write them."""

from __future__ import annotations

from typing import Any

import yaml

from mrl.errors import ConfigError


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
