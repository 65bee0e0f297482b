"""Small OpenEnv environments with the actions and observations of those that TRL's scripts play with, and clients.

python -m tests.trl.games PORT    serves all of them, each below its name
"""

from __future__ import annotations

import base64
import io
import random
import sys
from types import ModuleType
from typing import Any, ClassVar

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import BaseModel


class Game(Environment):
    """reset and step give an observation; `do` says what an action comes to."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.random, self.steps = random.Random(0), 0

    @property
    def state(self) -> State:
        return State(step_count=self.steps)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Observation:
        self.steps = 0
        return self.begin(**options)

    def step(self, action: Any, timeout_s: float | None = None, **options: Any) -> Observation:
        self.steps += 1
        return self.do(action)

    def begin(self, **options: Any) -> Observation:
        raise NotImplementedError

    def do(self, action: Any) -> Observation:
        raise NotImplementedError


class GameClient(EnvClient[Any, Any, State]):
    """Talks to one of them."""

    seen: ClassVar[type[Observation]]

    def _step_payload(self, action: Action) -> dict[str, Any]:
        return action.model_dump(exclude={"metadata"})

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Any]:
        reward, done = payload.get("reward"), payload.get("done", False)
        observation = self.seen(**payload.get("observation", {}) | {"reward": reward, "done": done})
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    echoed_message: str = ""


class Echo(Game):
    def begin(self, **options: Any) -> Observation:
        return EchoObservation(reward=0.0)

    def do(self, action: EchoAction) -> Observation:
        return EchoObservation(echoed_message=action.message, reward=len(action.message) / 10)


class EchoEnv(GameClient):
    seen = EchoObservation


class OpenSpielAction(Action):
    action_id: int
    game_name: str = "catch"
    game_params: dict[str, Any] = {}  # noqa: RUF012


class OpenSpielObservation(Observation):
    info_state: list[float] = []  # noqa: RUF012


class Catch(Game):
    def begin(self, **options: Any) -> Observation:
        self.ball, self.paddle = self.random.randrange(5), 2
        return self._seen()

    def do(self, action: OpenSpielAction) -> Observation:
        self.paddle = min(max(self.paddle + action.action_id - 1, 0), 4)
        return self._seen()

    def _seen(self) -> Observation:
        grid = [0.0] * 50
        grid[min(self.steps, 8) * 5 + self.ball] = grid[45 + self.paddle] = 1.0
        done = self.steps >= 9
        reward = (1.0 if self.ball == self.paddle else -1.0) if done else 0.0
        return OpenSpielObservation(info_state=grid, done=done, reward=reward)


class OpenSpielEnv(GameClient):
    seen = OpenSpielObservation


class TextArenaAction(Action):
    message: str


class TextArenaMessage(BaseModel):
    sender_id: int = 0
    content: str = ""
    category: str = "MESSAGE"


class TextArenaObservation(Observation):
    messages: list[TextArenaMessage] = []  # noqa: RUF012


class Wordle(Game):
    def begin(self, **options: Any) -> Observation:
        self.text = "Guess a word of five letters."
        return self._seen(0.0)

    def do(self, action: TextArenaAction) -> Observation:
        right = sum(a == b for a, b in zip(action.message.strip("[]"), "crane", strict=False))
        self.text += f"\n{action.message}: {right} letters are right."
        return self._seen(right / 5)

    def _seen(self, reward: float) -> Observation:
        messages = [TextArenaMessage(content=self.text)]
        return TextArenaObservation(messages=messages, reward=reward, done=reward == 1.0 or self.steps == 6)


class Sudoku(Game):
    def begin(self, **options: Any) -> Observation:
        self.cells = [["." if row == column else str((3 * row + row // 3 + column) % 9 + 1) for column in range(9)]
                      for row in range(9)]  # fmt: skip
        self.text = "Fill the grid.\n" + self._board()
        return self._seen(0.0)

    def do(self, action: TextArenaAction) -> Observation:
        row, column, number = (int(part) for part in action.message.strip("[]").split())
        free = self.cells[row - 1][column - 1] == "."
        if free:
            self.cells[row - 1][column - 1] = str(number)
            self.text += "\n" + self._board()
        else:
            self.text += "\nThat is an invalid move."
        return self._seen(float(free))

    def _board(self) -> str:
        lines = [f"R{number} " + " ".join(row) + " |" for number, row in enumerate(self.cells, 1)]
        return "\n".join(["C1 C2 C3 C4 C5 C6 C7 C8 C9", *lines])

    def _seen(self, reward: float) -> Observation:
        return TextArenaObservation(messages=[TextArenaMessage(content=self.text)], reward=reward)


class TextArenaEnv(GameClient):
    seen = TextArenaObservation


class BrowserGymAction(Action):
    action_str: str


class BrowserGymObservation(Observation):
    goal: str = ""
    axtree_txt: str = ""
    last_action_error: bool = False
    error: str = ""
    screenshot: list[list[list[int]]] | None = None


class Browser(Game):
    def begin(self, **options: Any) -> Observation:
        return self._seen(False)

    def do(self, action: BrowserGymAction) -> Observation:
        return self._seen(action.action_str == "click('13')")

    def _seen(self, clicked: bool) -> Observation:
        tree = "[13] button 'Click Me!'"
        picture = [[[200, 30, 30]] * 16] * 16
        return BrowserGymObservation(
            goal="Click the button.", axtree_txt=tree, screenshot=picture, done=clicked, reward=float(clicked)
        )


class BrowserGymEnv(GameClient):
    seen = BrowserGymObservation


class CarlaAction(Action):
    action_type: str
    lane_direction: str | None = None


class CarlaObservation(Observation):
    speed_kmh: float = 0.0
    nearby_actors: list[dict[str, Any]] = []  # noqa: RUF012
    collision_detected: bool = False
    collided_with: str | None = None
    rubric_reward: float | None = None
    camera_image: str | None = None


class Carla(Game):
    def begin(self, **options: Any) -> Observation:
        self.distance, self.speed, self.lane = 30.0, 10.0, 0
        return self._seen()

    def do(self, action: CarlaAction) -> Observation:
        if action.action_type == "emergency_stop":
            self.speed /= 2
        elif action.action_type == "lane_change":
            self.lane = 1
        elif action.action_type == "observe":
            self.distance -= self.speed / 20
        return self._seen(picture=action.action_type == "capture_image")

    def _seen(self, *, picture: bool = False) -> Observation:
        hit = self.distance <= 0 and not self.lane
        return CarlaObservation(
            speed_kmh=self.speed * 3.6,
            nearby_actors=[{"type": "walker", "distance": round(self.distance, 1)}],
            collision_detected=hit,
            rubric_reward=-1.0 if hit else float(self.lane),
            camera_image=_jpeg() if picture else None,
            done=hit,
        )


class CarlaEnv(GameClient):
    seen = CarlaObservation


SERVED: dict[str, tuple[type[Game], type[Action], type[Observation]]] = {
    "echo": (Echo, EchoAction, EchoObservation),
    "catch": (Catch, OpenSpielAction, OpenSpielObservation),
    "wordle": (Wordle, TextArenaAction, TextArenaObservation),
    "sudoku": (Sudoku, TextArenaAction, TextArenaObservation),
    "browser": (Browser, BrowserGymAction, BrowserGymObservation),
    "carla": (Carla, CarlaAction, CarlaObservation),
}
CLIENTS: dict[str, list[type]] = {
    "echo_env": [EchoEnv, EchoAction],
    "openspiel_env": [OpenSpielEnv, OpenSpielAction],
    "textarena_env": [TextArenaEnv, TextArenaAction],
    "browsergym_env": [BrowserGymEnv, BrowserGymAction],
    "carla_env": [CarlaEnv, CarlaAction],
}
"""By the package that scripts import them from."""


def install_clients() -> None:
    """Make the packages importable in this process."""
    for name, members in CLIENTS.items():
        package, models = ModuleType(name), ModuleType(f"{name}.models")
        package.__path__ = []
        for member in members:
            setattr(package, member.__name__, member)
            setattr(models, member.__name__, member)
        sys.modules |= {name: package, f"{name}.models": models}


def serve(port: int) -> None:
    """Until the process ends."""
    import uvicorn
    from fastapi import FastAPI
    from openenv.core.env_server.http_server import create_fastapi_app

    every = FastAPI()
    for name, (game, action, observation) in SERVED.items():
        every.mount(f"/{name}", create_fastapi_app(game, action, observation, max_concurrent_envs=64))
    uvicorn.run(every, port=port, log_level="warning")


def _jpeg() -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (16, 16), (30, 30, 200)).save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
