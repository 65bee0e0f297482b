"""What a Modal app is made with. It is read when the app's module is imported, here and in every container."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mrl.errors import ConfigError

VARIABLE = "MRL_MODAL"
"""Environment variable with the settings as JSON; containers have it in their image."""

LONGEST = 24 * 3600
"""Seconds a call may take at Modal."""
_NUMBERS = {"concurrent_inputs": 1000, "actor_nodes": 32}
"""The largest of each."""


@dataclass(frozen=True)
class Settings:
    """See `ModalBackend` for what they mean."""

    app: str = "mrl"
    volume: str = "mrl-storage"
    secrets: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    concurrent_inputs: int = 32
    actor_nodes: int = 1
    rdma: bool = False

    @classmethod
    def from_environment(cls) -> Settings:
        """Those of `MRL_MODAL`, a JSON object. Raises ConfigError."""
        said = os.environ.get(VARIABLE, "{}")
        try:
            found = json.loads(said)
            if not isinstance(found, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            raise ConfigError(
                f'{VARIABLE}: {said!r} is no JSON ({error}); give e.g. {VARIABLE}=\'{{"app": "mine"}}\''
            ) from None
        return cls.of(found, VARIABLE)

    @classmethod
    def of(cls, options: Mapping[str, Any], where: str = "backend_options") -> Settings:
        """Settings by name. where: what an error names. Raises ConfigError."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in options.items():
            if name not in known:
                raise ConfigError(
                    f"{where}: there is no {name!r} among the app's settings; there are {', '.join(known)}"
                )
            _check(where, name, value)
        given: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in options.items()}
        return cls(**given)

    def environ(self) -> dict[str, str]:
        """The environment variables with which a process has these settings."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self), sort_keys=True)}


def require_modal() -> None:
    """Raise ConfigError when modal is not installed."""
    if importlib.util.find_spec("modal") is None:
        raise ConfigError("backend: modal needs the package modal: pip install 'mrl[modal]'")


def _check(where: str, name: str, value: Any) -> None:
    if name in ("secrets", "packages"):
        good = isinstance(value, (list, tuple)) and all(isinstance(one, str) and one for one in value)
        wanted = "a list of names, e.g. [huggingface]" if name == "secrets" else "a list for pip, e.g. [math-verify]"
    elif name in _NUMBERS:
        good = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _NUMBERS[name]
        wanted = f"a number from 1 to {_NUMBERS[name]}"
    elif name == "rdma":
        good, wanted = isinstance(value, bool), "true or false"
    else:
        good, wanted = isinstance(value, str) and bool(value), "a name"
    if not good:
        raise ConfigError(f"{where}: {name} is {value!r}; give {wanted}")
