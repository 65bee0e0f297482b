"""Options of the attempts: who makes them, and within which limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from mrl.config.section import Section, changed_options
from mrl.errors import ConfigError

LIMITS = ("max_turns", "max_rollout_tokens", "step_timeout")
"""Limits of attempts of several turns."""
SERVE_AT = "127.0.0.1:8000"
"""Where TRL's first documentation has rollout functions ask for completions."""


class RolloutConfig(Section):
    """The attempts: which source makes rollouts of tasks, how long one may take, how many run at a time, who else may
    ask the policy."""

    rollout_source: str = "single_turn"
    """What makes a rollout of a task: `single_turn` (a prompt, a completion), `tools` (docs/environments.md), `openenv`
    (docs/openenv.md), `rollout_func` (docs/rollout-func.md), or one that a package registers (docs/extending.md)."""
    rollout_options: dict[str, Any] = Field(default_factory=dict)
    """The source's own options, by name."""
    tools: Any = None
    """Functions that the policy may call, as TRL takes them: typed, with a docstring; or their names,
    `file.py:function`; or MCP servers, `mcp:http://…/mcp`, `mcp:COMMAND` (docs/mcp.md). Selects the source `tools`."""
    environment_factory: Any = None
    """What makes an environment, as TRL takes it: a class with `reset` whose other methods are tools, or a dict of
    them by the column `environment`; or names: `file.py:Class`, or a shipped one's
    (docs/shipped-environments.md). Selects the source `tools`."""
    rollout_func: Any = None
    """A function that makes all rollouts of a step, as TRL takes it: `(prompts, trainer)` or `(prompts, args,
    processing_class)`; or its name, `file.py:function`. Selects the source `rollout_func`."""
    evaluation_test: Any = None
    """A test with `@evaluation_test` that brings the rows, how they are attempted, and the score
    (docs/evaluation-tests.md): its module, `my_eval.py`, `my_eval.py:name`, or the function. Selects the source
    `evaluation_test`."""
    serve: str | None = None
    """Where other programs may ask the policy, with its newest weights: `host:port`, port 0 = any that is free, `off`.
    None = 127.0.0.1:8000 with a `rollout_func`, else off. The route is `POST /generate/` (docs/rollout-func.md)."""
    serve_token_env: str = "MRL_SERVE_TOKEN"
    """The environment variable with the token that requests to `serve` have to bring, as `Authorization: Bearer`.
    Without one, only this machine may ask."""
    max_turns: int | None = Field(None, ge=1)
    """Completions of one attempt. This limit and the next three end an attempt with the reward that it has by then, as
    truncated. None = no limit."""
    max_rollout_tokens: int | None = Field(None, ge=1)
    """Tokens that the policy may sample in one attempt of several turns, in each of which `max_tokens` holds, if it is
    given. None = `max_completion_length`."""
    step_timeout: float | None = Field(None, gt=0)
    """Seconds that an environment, or the tools of a turn, may take for one step. None = as long as they like."""
    rollout_timeout: float | None = Field(None, gt=0)
    """Seconds one attempt may take. A `single_turn` that takes longer is a failed rollout. None = no limit."""
    max_concurrent_rollouts: int | None = Field(None, ge=1)
    """Attempts under way at a time; None = all of a step. With a limit, sampling is not repeatable to the last bit."""

    @field_validator("evaluation_test", mode="before")
    @classmethod
    def _a_path_is_a_name(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @model_validator(mode="after")
    def _tools_have_their_source(self) -> Self:
        given = [name for name in ("tools", "environment_factory") if getattr(self, name) is not None]
        if given and self.rollout_func is not None:
            raise ConfigError(f"{given[0]}: a rollout_func makes the rollouts and calls tools itself; leave one out")
        if self.evaluation_test is not None:
            other = [*given, *(["rollout_func"] if self.rollout_func is not None else [])]
            if other:
                raise ConfigError(f"{other[0]}: the evaluation_test says how its rows are attempted; leave one out")
            if self.source != "evaluation_test":
                raise ConfigError(
                    f"evaluation_test: rollout_source {self.rollout_source} takes none; leave one of the two out"
                )
        if given and self.source != "tools":
            raise ConfigError(f"{given[0]}: rollout_source {self.rollout_source} takes none; leave one of the two out")
        if self.rollout_func is not None and self.source != "rollout_func":
            raise ConfigError(
                f"rollout_func: rollout_source {self.rollout_source} takes none; leave one of the two out"
            )
        if self.source == "rollout_func" and (useless := changed_options(self, LIMITS)):
            raise ConfigError(f"{useless[0]}: a rollout_func decides by itself when an attempt ends; leave it out")
        if self.source == "single_turn" and (useless := changed_options(self, LIMITS)):
            raise ConfigError(
                f"{useless[0]} has an effect only in attempts of several turns, and rollout_source single_turn makes "
                "one: leave it out, or give tools or an environment_factory"
            )
        return self

    @property
    def source(self) -> str:
        """The source's name, which tools, environments and rollout functions imply."""
        if self.rollout_func is not None and self.rollout_source == "single_turn":
            return "rollout_func"
        if self.evaluation_test is not None and self.rollout_source == "single_turn":
            return "evaluation_test"
        given = self.tools is not None or self.environment_factory is not None
        return "tools" if given and self.rollout_source == "single_turn" else self.rollout_source

    @property
    def source_options(self) -> dict[str, Any]:
        """What the source is made with."""
        own: dict[str, dict[str, Any]] = {
            "tools": {"tools": self.tools, "environment_factory": self.environment_factory},
            "rollout_func": {"rollout_func": self.rollout_func},
            "evaluation_test": {} if self.evaluation_test is None else {"test": self.evaluation_test},
        }
        return self.rollout_options | own.get(self.source, {})

    @property
    def serve_at(self) -> str | None:
        """The address to serve the policy at, if any."""
        default = SERVE_AT if self.source == "rollout_func" else None
        return default if self.serve is None else None if self.serve == "off" else self.serve
