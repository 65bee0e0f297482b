"""Sandboxes: programs nobody trusts in, verdicts out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mrl.errors import ConfigError
from mrl.registry import Registry
from mrl.sandbox.base import IOTest, Limits, Program, Sandbox, Test, TestResult, Verdict

SANDBOXES: Registry[Callable[..., Sandbox]] = Registry(
    "sandboxes",
    "sandbox",
    {
        "auto": "mrl.sandbox.local:make_auto",
        "local": "mrl.sandbox.local:LocalSandbox",
        "modal": "mrl.sandbox.modal:ModalSandbox",
        "process": "mrl.sandbox.process:ProcessSandbox",
    },
)

__all__ = ["SANDBOXES", "IOTest", "Limits", "Program", "Sandbox", "Test", "TestResult", "Verdict", "make_factory"]


def make_factory(name: str, options: dict[str, Any] | None = None) -> Callable[[], Sandbox]:
    """What makes the sandbox called `name` with these arguments. Raises ConfigError naming an argument it has not."""
    factory = SANDBOXES.get(name)
    known = [p.name for p in inspect.signature(factory).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for option in options or {}:
        if option not in known:
            raise ConfigError(
                f"sandbox_options: sandbox {name!r} has no argument {option!r}; it has {', '.join(known) or 'none'}"
            )
    return functools.partial(factory, **(options or {}))
