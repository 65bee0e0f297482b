"""Any environment in the form of `environment_factory` as an OpenEnv server: a session has an instance of its own.

An action's fields are the parameters of the tool; with several tools, `tool` says which. An observation's `text` is
what the tool returned, or what the prompt would have been given. A step's reward is what it added to `get_reward`, and
`step_reward` where there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from mrl.environments.base import closes, tool_methods
from mrl.errors import ConfigError, EnvError, MRLError

if TYPE_CHECKING:
    from fastapi import FastAPI


def serve(make: Callable[[], Any], name: str, *, host: str, port: int, max_sessions: int) -> None:
    """Serves until it is ended. port: 0 = a free one; the address is printed. Raises ConfigError."""
    import uvicorn

    app = make_app(make, name, max_sessions=max_sessions)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen(128)  # from here on clients may come
        except (OSError, OverflowError) as error:  # in use; beyond what ports there are
            raise ConfigError(f"port: {host}:{port} cannot be listened on: {error}; give another one") from error
        print(f"{name} is served at http://{host}:{listening.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])


def make_app(make: Callable[[], Any], name: str, *, max_sessions: int = 64) -> FastAPI:
    """The server's application. make: an environment. Raises ConfigError for one that cannot be served."""
    try:
        from openenv.core.env_server import create_app
    except ImportError as error:
        raise ConfigError(f"openenv: {error}; install it with `pip install 'mrl[openenv]'`") from error
    kind = type(make())
    action, observation = action_type(kind), observation_type(kind)
    served = _served(make, observation, name)
    return create_app(served, action, observation, env_name=name, max_concurrent_envs=max_sessions)


def action_type(kind: type) -> type[Any]:
    """What a client sends. Raises ConfigError for a class without tools, or with such as do not fit together."""
    from openenv.core.env_server import Action
    from pydantic import create_model

    tools = tool_methods(kind)
    if not tools:
        raise ConfigError(f"{kind.__qualname__} has no tool that a client could call")
    fields: dict[str, Any] = {}
    if len(tools) > 1:
        fields["tool"] = (Literal[tuple(tools)], ...)
    for tool, method in tools.items():
        types = get_type_hints(method)
        for name, parameter in _parameters(kind, tool):
            everywhere = all(name in inspect.signature(other).parameters for other in tools.values())
            required = everywhere and parameter.default is parameter.empty
            field = (types.get(name, Any), ...) if required else (types.get(name, Any) | None, None)
            if name in ("metadata", "tool") or fields.setdefault(name, field) != field:
                raise ConfigError(f"{kind.__qualname__}.{tool}: the parameter {name!r} needs another name to be served")
    return create_model(f"{kind.__name__}Action", __base__=Action, **fields)


def _parameters(kind: type, method: str) -> list[tuple[str, inspect.Parameter]]:
    """Without `self`."""
    static = isinstance(inspect.getattr_static(kind, method), staticmethod)
    return list(inspect.signature(getattr(kind, method)).parameters.items())[0 if static else 1 :]


def observation_type(kind: type) -> type[Any]:
    """What a client gets: `text`, and what the class names in `fields`."""
    from openenv.core.env_server import Observation
    from pydantic import create_model

    return create_model(
        f"{kind.__name__}Observation", __base__=Observation, text=(str, ""), **getattr(kind, "fields", {})
    )


def _served(make: Callable[[], Any], observation_kind: type[Any], name: str) -> type[Any]:
    from openenv.core.env_server import Environment, State
    from openenv.core.env_server.types import EnvironmentMetadata

    class Served(Environment):
        """An environment of ours as OpenEnv's server calls it: each session from one thread of its own."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.inner = make()
            self.tools = tool_methods(self.inner)
            self.rewards_steps = hasattr(self.inner, "step_reward")
            self.now = State()
            self.reward = 0.0
            self.begun = False

        def reset(self, seed: int | None = None, episode_id: str | None = None, **columns: Any) -> Any:
            """Without a seed, where one is taken, it draws one, and says which in the state."""
            taken = inspect.signature(self.inner.reset).parameters
            if "seed" in taken:
                columns["seed"] = secrets.randbelow(2**31) if seed is None else seed
            if not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
                columns = {key: value for key, value in columns.items() if key in taken}
            self.begun = False
            text = _finished(self.inner.reset(**columns))
            self.begun, self.reward = True, self._total()
            self.now = State(episode_id=episode_id or secrets.token_hex(8), step_count=0, seed=columns.get("seed"))
            return self._observation("" if text is None else str(text).strip(), None)

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            """A tool that raises is answered with the error, as the policy is told it."""
            if not self.begun:
                raise EnvError("there is no episode: reset first")
            given = action.model_dump(exclude={"metadata"}, exclude_none=True)
            method = self.tools[given.pop("tool", next(iter(self.tools)))]
            accepted = inspect.signature(method).parameters
            if self.rewards_steps:
                self.inner.step_reward = 0.0
            try:
                text = _finished(method(**{key: given[key] for key in given if key in accepted}))
            except MRLError:
                raise
            except Exception as error:
                text = f"error: {error}"
            self.now.step_count += 1
            before, self.reward = self.reward, self._total()
            step_reward = float(self.inner.step_reward) if self.rewards_steps else 0.0
            return self._observation(str(text), self.reward - before + step_reward)

        @property
        def state(self) -> Any:
            return self.now

        def get_metadata(self) -> Any:
            told = "\n\n".join(inspect.getdoc(one) or "" for one in (type(self.inner), *self.tools.values()))
            return EnvironmentMetadata(name=name, description=told)

        def close(self) -> None:
            if hasattr(self.inner, "__exit__"):
                self.inner.__exit__(None, None, None)
            elif closes(type(self.inner)):
                _finished(self.inner.close())

        def _total(self) -> float:
            reward = getattr(self.inner, "get_reward", None)
            return float(_finished(reward()) or 0.0) if reward else 0.0

        def _observation(self, text: str, reward: float | None) -> Any:
            further = {key: getattr(self.inner, key) for key in getattr(type(self.inner), "fields", {})}
            done = bool(getattr(self.inner, "done", False))
            return observation_kind(text=text, reward=reward, done=done, **further)

    return Served


def _finished(result: Any) -> Any:
    """Of a method that may be asynchronous."""
    if not inspect.isawaitable(result):
        return result

    async def waited() -> Any:
        return await result

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        return loop.run_until_complete(waited())
