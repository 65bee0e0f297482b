"""Rewards with options, and models, as they are written under `reward_funcs`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mrl.errors import RewardError
from mrl.store.find import find_run
from mrl.system.yaml_values import yaml_numbers

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LONGEST = 255
"""Characters of a file's name."""
_EXAMPLE = "{judge: {model: gpt-4o-mini, base_url: 'https://api.openai.com/v1', rubric: rubric.md}}"


def with_options(spec: Any) -> tuple[str, dict[str, Any]] | None:
    """Name and options of `{name: {option: value}}`: a mapping, its text as YAML or JSON, or a YAML file that holds it.

    None for what has another form. Raises RewardError for what begins like one and is none.
    """
    found = spec
    if isinstance(spec, str):
        text = _written(spec)
        if text is None:
            return None
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise RewardError(f"reward_funcs: {spec!r:.80} cannot be read ({error}); as in {_EXAMPLE}") from None
    elif not isinstance(spec, Mapping):
        return None
    if not isinstance(found, Mapping) or len(found) != 1:
        raise RewardError(f"reward_funcs: {spec!r:.80} is not one reward's name with its options, as in {_EXAMPLE}")
    ((name, options),) = found.items()
    if not isinstance(name, str) or not isinstance(options, Mapping | None):
        raise RewardError(f"reward_funcs: {spec!r:.80} holds no options by name, as in {_EXAMPLE}")
    return name, yaml_numbers(dict(options or {}))


def names_model(spec: str) -> bool:
    """Whether it can be nothing but a model's: a folder, a run, or a Hub id with its owner."""
    if max(map(len, spec.split("/"))) > _LONGEST or "\n" in spec:
        return False
    if os.path.isdir(os.path.expanduser(spec)) or spec.startswith(("/", ".", "~")):
        return True
    return bool(_HUB_ID.fullmatch(spec)) or find_run(spec.rpartition("@")[0] or spec) is not None


def is_model(value: Any) -> bool:
    """Whether it is a loaded classifier of transformers, compiled or not."""
    torch = sys.modules.get("torch")  # without it there is none
    return torch is not None and isinstance(value, torch.nn.Module) and hasattr(value, "config")


def _written(spec: str) -> str | None:
    if spec.lstrip().startswith("{"):
        return spec
    if not spec.endswith((".yaml", ".yml")):
        return None
    path = Path(spec).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RewardError(f"reward_funcs: {path} cannot be read ({reason}; looked in {Path.cwd()})") from None
