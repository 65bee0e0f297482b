"""Environments of the real OpenEnv. Import it only where the package is."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, ClassVar

from fastmcp import FastMCP
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    text: str


class GuessObservation(Observation):
    text: str


class Guess(Environment[GuessAction, GuessObservation, State]):
    """A number is guessed; other words do what they say."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    live: ClassVar[set[int]] = set()
    most: ClassVar[int] = 0
    steps: ClassVar[list[str]] = []

    def __init__(self, greeting: str = "Guess.") -> None:
        super().__init__()
        self.greeting = greeting
        Guess.live.add(id(self))
        Guess.most = max(Guess.most, len(Guess.live))

    def reset(self, seed: int | None = None, secret: int | None = None, fill: int = 0, **_: Any) -> GuessObservation:
        self.secret = secret if secret is not None else (seed or 0) % 10
        return GuessObservation(text=self.greeting + "x" * fill)

    def step(self, action: GuessAction, timeout_s: float | None = None, **_: Any) -> GuessObservation:
        Guess.steps.append(action.text)
        if "raise" in action.text:
            raise ValueError("no such move")
        if "die" in action.text:
            os._exit(7)
        if "sleep" in action.text:
            time.sleep(1)
        found = str(self.secret) in action.text
        return GuessObservation(text="right" if found else "wrong", reward=float(found), done=found)

    @property
    def state(self) -> State:
        return State()

    def close(self) -> None:
        Guess.live.discard(id(self))


class GuessClient(EnvClient[GuessAction, GuessObservation, State]):
    def _step_payload(self, action: GuessAction) -> dict[str, Any]:
        return {"text": action.text}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[GuessObservation]:
        seen = GuessObservation(text=payload["observation"]["text"])
        return StepResult(seen, payload["reward"], payload["done"])

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


class Tooled(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tooled")

        @server.tool
        def double(number: int) -> int:
            """Twice the number."""
            return 2 * number

        super().__init__(server)

    def reset(self, seed: int | None = None, **_: Any) -> Observation:
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        return Observation()

    async def step_async(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        seen = await super().step_async(action, timeout_s=timeout_s)
        seen.reward = 0.25
        return seen

    @property
    def state(self) -> State:
        return State()


class Server:
    """A real server in a thread of this process."""

    def __init__(self, env: Any = Guess, action: Any = GuessAction, observation: Any = GuessObservation) -> None:
        self.env, self.action, self.observation = env, action, observation
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, sessions: int = 16) -> Server:
        import socket

        import uvicorn
        from openenv.core.env_server.http_server import create_app

        app = create_app(self.env, self.action, self.observation, max_concurrent_envs=sessions)
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", self.port))
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
