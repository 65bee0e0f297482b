"""Functions as tools: what the policy is told of them, from their types and docstrings."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, EnvError
from mrl.rollouts.chat import ToolSpec

CHARACTERS_PER_TOKEN = 32
"""A tool or an environment may say so many characters at once for each token of the context: more fits none, and would
hold up all attempts while it is made tokens."""
MOST_CHARACTERS = 1_000_000
"""The same where the context is not known."""
MOST_OF_ERROR = 4000
"""Characters of an exception that the policy is told."""
_UNNAMED: dict[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**", Parameter.POSITIONAL_ONLY: ""}
"""Parameters that a call cannot name, and what stands before them."""


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call."""

    name: str
    spec: ToolSpec
    function: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any], option: str = "tools") -> Tool:
        """Raises ConfigError for a function without types or a docstring, naming its line."""
        from transformers.utils.chat_template_utils import (
            DocstringParsingException,
            TypeHintParsingException,
            get_json_schema,
        )

        if not callable(function):
            raise ConfigError(f"{option}: {function!r} is no function, but of type {type(function).__name__}")
        try:
            if unnamed := [p for p in inspect.signature(function).parameters.values() if p.kind in _UNNAMED]:
                first = f"{_UNNAMED[unnamed[0].kind]}{unnamed[0].name}"
                raise ConfigError(
                    f"{option}: {described(function)} takes {first}: a call names its arguments, so each needs a name "
                    "and a type of its own"
                )
            spec: ToolSpec = get_json_schema(function)
        except (DocstringParsingException, TypeHintParsingException, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{option}: {described(function)} cannot be told to the model: {error} A tool needs a type for every "
                "argument, and a docstring that says what it does, with a line for each under `Args:`"
            ) from error
        return cls(spec["function"]["name"], spec, function)


def distinct(tools: list[Tool], option: str) -> dict[str, Tool]:
    """By name. Raises ConfigError for two of one name."""
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if (other := by_name.setdefault(tool.name, tool)) is not tool:
            raise ConfigError(
                f"{option}: two tools are called {tool.name!r}: {described(other.function)} and "
                f"{described(tool.function)}; rename one"
            )
    return by_name


def found(given: Any, option: str) -> Any:
    """A Python object as it is; one named `file.py:name` or `package.module:name`, imported. Raises ConfigError."""
    if not isinstance(given, str):
        return given
    where, _, name = given.rpartition(":")
    if not where or not name:
        raise ConfigError(f"{option}: {given!r} is not of the form file.py:name or package.module:name")
    try:
        module = _from_file(Path(where).expanduser()) if where.endswith(".py") else importlib.import_module(where)
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        raise ConfigError(f"{option}: {given!r} does not import: {type(error).__name__}: {error}") from error
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{option}: {given!r} does not import: there is no {name!r} in {where}{hint}") from None


def described(function: Any) -> str:
    """Its name and line, for messages."""
    inner = inspect.unwrap(getattr(function, "__func__", function))
    name = getattr(inner, "__qualname__", None) or repr(inner)
    try:
        return f"{name} ({inspect.getsourcefile(inner)}:{inspect.getsourcelines(inner)[1]})"
    except (TypeError, OSError):
        return str(name)


def as_text(said: Any, who: Any, most: int | None = None) -> str:
    """What a tool or an environment said, as a message's text: blocks of text joined, all else as `str` has it.

    most: characters that the context has room for; None = it is not known. Raises EnvError for more, and for images.
    """
    if isinstance(said, list) and said and all(isinstance(part, dict) and "type" in part for part in said):
        if other := [part["type"] for part in said if part["type"] != "text"]:
            raise EnvError(f"{described(who)} returned a part of type {other[0]!r}, and only text is taken")
        said = "".join(str(part.get("text", "")) for part in said)
    text = said if isinstance(said, str) else str(said)
    if len(text) > (MOST_CHARACTERS if most is None else most):
        room = (
            f"more than {MOST_CHARACTERS:,}" if most is None else f"and max_model_len leaves room for {most:,} at most"
        )
        raise EnvError(f"{described(who)} returned {len(text):,} characters, {room}: shorten what it says")
    return encodable(text)


def encodable(text: str) -> str:
    """Without halves of surrogate pairs, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def copied(value: Any) -> Any:
    """Lists and dicts anew, all else as it is: what a function does to its arguments changes neither what the policy
    said nor another attempt's task."""
    if type(value) is dict:
        return {name: copied(item) for name, item in value.items()}
    return [copied(item) for item in value] if type(value) is list else value


def _from_file(path: Path) -> Any:
    path = path.resolve()
    name = f"_mrl_tools_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
