"""Between observations, text and actions: the user's `prompt_builder` and `action_parser`, or what fits plain text.

observation ─ prompt_builder(observation, step, history) ─▶ messages … the policy's text ─ action_parser ─▶ action
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mrl.errors import ConfigError, EnvError
from mrl.rollouts.openenv.places import Schema
from mrl.rollouts.openenv.results import AnswerFields, plain
from mrl.rollouts.tools.functions import as_text, described, found
from mrl.types import Message

MADE_UP = ("hello", '{"guess": 1}')
"""What a parser is tried with before a run."""
BROKEN = (NameError, AttributeError, TypeError, ImportError)
"""What a function raises that is wrong, whatever it is given."""


class PromptBuilder:
    """What the policy sees of an observation. given: the user's function, its name, or None for the only text of it.

    Raises ConfigError for what cannot be called so.
    """

    def __init__(self, given: Any) -> None:
        self.function = _callable(given, "prompt_builder", ("observation", "step", "history"))

    async def __call__(self, observation: Any, step: int, history: list[str]) -> list[Message]:
        """step: from 1. history: a line for each step before. Raises EnvError naming the function and its line."""
        if self.function is None:
            return [{"role": "user", "content": as_text(only_text(observation), PromptBuilder)}]
        who = f"prompt_builder: {described(self.function)}"
        try:
            said = self.function(observation, step, history)
            said = await said if inspect.isawaitable(said) else said
        except Exception as error:
            raise EnvError(f"{who} raised {type(error).__name__}: {error} (step {step})") from error
        try:
            return _messages(said, self.function)
        except ValueError as error:
            raise EnvError(f"{who}: {error}") from error


class ActionParser:
    """What the policy's text does. given: the user's function, its name, or None where the action is one text."""

    def __init__(self, given: Any) -> None:
        self.function = _callable(given, "action_parser", ("text",))
        self.field = ""
        """Of the action, that a text is put into."""
        self.made: Any = dict
        """What an action of that field is."""

    def fit(self, schema: Schema) -> None:
        """Find the field that takes a text, by the environment's schema. Raises ConfigError where the default cannot
        do."""
        texts = _text_fields(schema.action)
        if len(texts) == 1:
            self.field = texts[0]
        elif self.function is None:
            known = "are not known" if schema.action is None else f"are {_listed(schema.action)}"
            raise ConfigError(
                f"rollout_options: the fields of the environment's actions {known}; without an action_parser there has "
                "to be one text. Give action_parser: a function of the policy's text that returns an action or a dict"
            )

    def fit_class(self, kind: Any) -> None:
        """The same for a client with a class of actions."""
        if not hasattr(kind, "model_json_schema"):
            raise ConfigError("rollout_options: this client does not say what its actions are; give action_parser")
        self.fit(Schema(kind.model_json_schema()))
        self.made = kind

    async def __call__(self, text: str) -> Any:
        """An action, or None. Raises EnvError naming the function and its line."""
        action: Any = text
        if self.function is not None:
            try:
                action = self.function(text)
                action = await action if inspect.isawaitable(action) else action
            except Exception as error:
                shown = text if len(text) <= 80 else text[:79] + "…"
                raise EnvError(
                    f"action_parser: {described(self.function)} raised {type(error).__name__}: {error}, given "
                    f"{shown!r}; for a text without an action it can return None, which ends the attempt"
                ) from error
        return self.made(**{self.field: action}) if isinstance(action, str) and self.field else action

    def broken(self) -> str | None:
        """What is doubtful about it, found by trying made-up texts. Raises ConfigError where it cannot ever work."""
        if self.function is None or inspect.iscoroutinefunction(self.function):
            return None
        errors = []
        for text in MADE_UP:
            try:
                self.function(text)
            except Exception as error:  # whatever it is, it is told
                errors.append(error)
        if len(errors) < len(MADE_UP):
            return None
        said = f"action_parser: {described(self.function)} raised {type(errors[0]).__name__}: {errors[0]}"
        if all(isinstance(error, BROKEN) for error in errors):
            raise ConfigError(f"rollout_options: {said}, given {MADE_UP[0]!r} to try it, and so for {MADE_UP[1]!r}")
        return f"{said}, given a made-up text. Attempts where it raises fail; return None for a text without an action."


def only_text(observation: Any) -> str:
    """The text of an observation that has one. Raises EnvError."""
    if isinstance(observation, str):
        return observation
    fields = plain(observation)
    if not isinstance(fields, dict):
        raise EnvError(f"an observation of type {type(observation).__name__} has no text; {_BUILDER}")
    texts = {name: value for name, value in fields.items() if isinstance(value, str) and name not in AnswerFields}
    if len(texts) != 1:
        listed = ", ".join(f"{name} ({type(value).__name__})" for name, value in fields.items()) or "none"
        raise EnvError(f"the observation has {len(texts)} texts (its fields: {listed}); {_BUILDER}")
    return next(iter(texts.values()))


def shown(action: Any) -> str:
    """An action for a history's line."""
    fields = plain(action)
    if isinstance(fields, dict):
        fields = {name: value for name, value in fields.items() if name != "metadata"}
        if len(fields) == 1:
            return str(next(iter(fields.values())))
    return str(fields)


def check_reward_type(schema: Schema) -> None:
    """Raise ConfigError for observations whose reward is no number."""
    reward = ((schema.observation or {}).get("properties") or {}).get("reward") or {}
    kinds = {part["type"] for part in [reward, *reward.get("anyOf", [])] if "type" in part}
    if kinds and not kinds & {"number", "integer", "boolean"}:
        raise ConfigError(
            f"rollout_options: the environment's observations have a reward of type {' or '.join(sorted(kinds))}; it "
            "has to be a number"
        )


_BUILDER = (
    "without a prompt_builder it needs to have one: give prompt_builder(observation, step, history), which returns "
    "what the policy sees"
)


def _callable(given: Any, option: str, names: tuple[str, ...]) -> Any:
    if given is None:
        return None
    function = found(given, f"rollout_options: {option}")
    signature = f"{option}({', '.join(names)})"
    if not callable(function):
        raise ConfigError(f"rollout_options: {option}: {function!r} is no function; it is called as {signature}")
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise ConfigError(f"rollout_options: {described(function)} is called as {signature}: {error}") from None
    except ValueError:  # a builtin's signature may not be known
        pass
    return function


def _messages(said: Any, who: Callable[..., Any]) -> list[Message]:
    """Text, parts of text, a message or messages."""
    given = [said] if isinstance(said, dict) and "role" in said else said
    if isinstance(given, list) and given and all(isinstance(part, dict) and "role" in part for part in given):
        for message in given:
            if message["role"] == "assistant":
                raise ValueError("it returned a message of the assistant, whose turns are the policy's own")
        return [{**message, "content": as_text(message.get("content", ""), who)} for message in given]
    if isinstance(given, str) or (isinstance(given, list) and given):
        return [{"role": "user", "content": as_text(given, who)}]
    raise ValueError(f"it returned {given!r}, of type {type(given).__name__}; it returns text, or messages")


def _text_fields(schema: dict[str, Any] | None) -> list[str]:
    """Fields of text that an action has to have; where it has to have none, those that it may have."""
    fields = (schema or {}).get("properties") or {}
    texts = [name for name, field in fields.items() if field.get("type") == "string" and "const" not in field]
    needed = [name for name in fields if name in (schema or {}).get("required", [])]
    if any(name not in texts for name in needed):
        return []
    return [name for name in texts if name in needed] or texts


def _listed(schema: dict[str, Any]) -> str:
    fields = {name: field for name, field in (schema.get("properties") or {}).items() if name != "metadata"}
    return ", ".join(f"{name} ({field.get('type', 'any')})" for name, field in fields.items()) or "none"
