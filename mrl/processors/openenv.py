"""Rollouts in environments that speak OpenEnv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mrl.errors import ConfigError, EngineError
from mrl.evaltests.rows import EvaluationRow
from mrl.processors.base import Attempts, RolloutProcessorConfig, SourceProcessor
from mrl.rollouts import MessagePolicy, PolicyClient, SourceSetup
from mrl.rollouts.base import Reply
from mrl.rollouts.chat import ToolSpec
from mrl.rollouts.endpoint import UNBOUNDED, read_reply, wire_message
from mrl.rollouts.openenv.source import OpenEnvSource
from mrl.types import Message, SamplingParams, Task

IMAGE = "browsergym-env:latest"
"""The container that is started where only a client's class is given."""


class OpenEnvRolloutProcessor(SourceProcessor):
    """The model acts in an environment, step by step: observation, text, action.

    env_factory: makes an environment: a client of OpenEnv's, connected or not, or any object with `reset` and `step`.
    prompt_builder: (observation, step, history) → what the model is told; None = the observation's text.
    action_parser: text → action; None where the environment's actions are one text, or calls of its tools.
    policy_factory: makes another model for each processor: called with model, temperature, max_tokens, base_url and the
        other completion_params; what it returns has `async _make_llm_call(messages, tools)`.

    Instead of env_factory: env_base_url, a server that runs; hub_repo_id or docker_image, containers that are started.
    env_client_cls: the client's class for those. tasks, task_var: tasks that rows take in turn (a row's own in its
    `dataset_info` goes before), and what tells the environment: an environment variable of its server, in capitals, or
    an argument of `reset`. Attempts at one row have the same task, however many there are, so num_generations changes
    nothing here. request_timeout_s: for an answer. default_headers, provider, docker_port, env_vars: of the connection
    and the container. benchmark, headless, viewport_width, viewport_height, timeout_ms, miniwob_url: told to a
    BrowserGym container by its environment variables.

    Environments are used again for the next row, and reset. A step is never repeated. Raises ConfigError.
    """

    def __init__(
        self,
        env_factory: Callable[..., Any] | None = None,
        prompt_builder: Callable[[Any, int, list[str]], Any] | None = None,
        action_parser: Callable[[str], Any] | None = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        env_client_cls: type[Any] | None = None,
        tasks: list[str] | None = None,
        task_var: str | None = None,
        miniwob_url: str | None = None,
        docker_image: str = IMAGE,
        env_base_url: str | None = None,
        hub_repo_id: str | None = None,
        request_timeout_s: float = 15.0,
        default_headers: dict[str, str] | None = None,
        provider: Any | None = None,
        docker_port: int | None = None,
        env_vars: dict[str, str] | None = None,
        benchmark: str = "miniwob",
        headless: bool = True,
        viewport_width: int = 1280,
        viewport_height: int = 720,
        timeout_ms: int = 10000,
        num_generations: int | None = None,
    ) -> None:
        super().__init__()
        if tasks and not task_var:
            raise ConfigError(
                "OpenEnvRolloutProcessor: tasks need task_var, the name under which an environment gets them"
            )
        given = {"env_factory": env_factory, "env_base_url": env_base_url, "hub_repo_id": hub_repo_id}
        if len([name for name, value in given.items() if value is not None]) > 1:
            raise ConfigError(f"OpenEnvRolloutProcessor: give one of {', '.join(given)}")
        if not any(value is not None for value in given.values()) and env_client_cls is None and docker_image == IMAGE:
            raise ConfigError(
                "OpenEnvRolloutProcessor: nothing says where the environment is; give env_factory, env_base_url, "
                "hub_repo_id, docker_image or env_client_cls"
            )
        self.prompt_builder, self.action_parser, self.policy_factory = prompt_builder, action_parser, policy_factory
        self.task_var = task_var if tasks else None
        self.options: dict[str, Any] = {
            "prompt_builder": prompt_builder,
            "action_parser": action_parser,
            "tasks": list(tasks) if tasks else None,
            "task_var": self.task_var,
            "request_timeout_s": request_timeout_s,
        }
        if env_factory is not None:
            self.options["env_factory"] = env_factory
            return
        self.options |= {"env_client_cls": env_client_cls, "headers": default_headers}
        if env_base_url is not None:
            self.options["base_url"] = env_base_url
            return
        told = {
            "BROWSERGYM_BENCHMARK": benchmark,
            "BROWSERGYM_HEADLESS": str(headless).lower(),
            "BROWSERGYM_VIEWPORT_WIDTH": str(viewport_width),
            "BROWSERGYM_VIEWPORT_HEIGHT": str(viewport_height),
            "BROWSERGYM_TIMEOUT": str(timeout_ms),
        } | ({"MINIWOB_URL": miniwob_url} if miniwob_url else {})
        image = hub_repo_id or docker_image
        self.options |= {
            "hub_repo_id" if hub_repo_id is not None else "docker_image": image,
            "provider": _at_port(provider, docker_port),
            "env_vars": (told if "browsergym" in image.lower() or miniwob_url else {}) | dict(env_vars or {}),
        }

    def source(self, setup: SourceSetup, config: RolloutProcessorConfig) -> Attempts:
        return OpenEnvSource.create(setup, **self.options)

    def task(self, row: EvaluationRow, task: Task) -> Task:
        """`reset` gets the row's own seed and task, where its `dataset_info` has them; else a seed made of its id."""
        info = row.input_metadata.dataset_info or {}
        names = {"seed", *([self.task_var] if self.task_var else [])}
        return Task(
            task.id,
            [message.plain() for message in row.messages],
            {name: info[name] for name in names if info.get(name) is not None},
        )

    def policy(self, config: RolloutProcessorConfig) -> PolicyClient | MessagePolicy:
        if self.policy_factory is None or config.policy is not None:
            return super().policy(config)
        params = dict(config.completion_params)
        named = {name: params.pop(name, None) for name in ("model", "temperature", "max_tokens", "base_url")}
        return MadePolicy(self.policy_factory(**named, **params))


class MadePolicy:
    """What a policy_factory made."""

    max_model_len = UNBOUNDED

    def __init__(self, made: Any) -> None:
        if not callable(getattr(made, "_make_llm_call", None)):
            raise ConfigError(
                f"policy_factory: made {made!r:.80}, which has no `_make_llm_call(messages, tools)` to be asked with"
            )
        self.made = made

    async def reply(self, messages: list[Message], tools: list[ToolSpec], sampling: SamplingParams, seed: int) -> Reply:
        answer = await self.made._make_llm_call(messages=[wire_message(message) for message in messages], tools=tools)
        if not isinstance(answer, dict):
            raise EngineError(f"policy_factory: _make_llm_call returned {type(answer).__name__}, no dict")
        return read_reply(answer)


def _at_port(provider: Any, port: int | None) -> Any:
    """A container provider that publishes its server at a port of this machine's; None = any that is free."""
    if port is None:
        return None if provider is None else (lambda: provider) if not callable(provider) else provider

    def make() -> Any:
        from openenv.core.containers.runtime import LocalDockerProvider

        made = LocalDockerProvider() if provider is None else provider() if callable(provider) else provider
        start = made.start_container

        def start_container(*args: Any, **kwargs: Any) -> Any:
            return start(*args, **{**kwargs, "port": port})

        made.start_container = start_container
        return made

    return make
