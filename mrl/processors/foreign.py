"""Processors of eval_protocol, each as ours of the same name; others are called as they are."""

from __future__ import annotations

import os
from typing import Any

from mrl.processors.agent import AgentRolloutProcessor
from mrl.processors.openenv import OpenEnvRolloutProcessor
from mrl.processors.remote import RemoteRolloutProcessor
from mrl.processors.single_turn import NoOpRolloutProcessor, SingleTurnRolloutProcessor

OPENENV = {
    "env_factory": "_provided_env_factory",
    "prompt_builder": "prompt_builder",
    "action_parser": "action_parser",
    "policy_factory": "policy_factory",
    **{
        name: f"_{name}"
        for name in (
            *("env_client_cls", "tasks", "task_var", "miniwob_url", "docker_image", "env_base_url", "hub_repo_id"),
            *("request_timeout_s", "default_headers", "provider", "docker_port", "env_vars", "benchmark", "headless"),
            *("viewport_width", "viewport_height", "timeout_ms", "num_generations"),
        )
    },
}
"""Arguments of its constructor → where it keeps them."""


def own_processor(given: Any) -> Any:
    """Ours with the same options, where there is one; else what was given. Raises ConfigError."""
    kind = type(given)
    if not kind.__module__.startswith("eval_protocol."):
        return given
    if kind.__name__ == "SingleTurnRolloutProcessor":
        return SingleTurnRolloutProcessor(drop_trailing_assistant_messages=given.drop_trailing_assistant_messages)
    if kind.__name__ == "NoOpRolloutProcessor":
        return NoOpRolloutProcessor()
    if kind.__name__ == "AgentRolloutProcessor":
        return AgentRolloutProcessor()
    if kind.__name__ == "OpenEnvRolloutProcessor":
        options = {name: getattr(given, place) for name, place in OPENENV.items()}
        return OpenEnvRolloutProcessor(**options | {"tasks": options["tasks"] or None})
    if kind.__name__ == "RemoteRolloutProcessor":
        own = {name: getattr(given, f"_{name}") for name in ("remote_base_url", "poll_interval", "timeout_seconds")}
        theirs = "tracing.fireworks.ai" in given._model_base_url and not os.environ.get("FIREWORKS_API_KEY")
        base = None if theirs else given._model_base_url  # without a key that gateway answers nobody
        return RemoteRolloutProcessor(**own, model_base_url=base, include_payloads=given._include_payloads)
    return given
