"""Environments in the form of OpenEnv's, without the package: to run in this process and in workers takes no more."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from pydantic import BaseModel


class Saying(BaseModel):
    text: str


class Seen(BaseModel):
    text: str
    done: bool = False
    reward: Any = None
    metadata: dict[str, Any] = {}


class Guess:
    """A number is guessed; other words do what they say."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    made: ClassVar[list[Guess]] = []

    def __init__(self, limit: int = 10) -> None:
        self.limit, self.steps, self.resets = limit, 0, []
        Guess.made.append(self)

    def reset(self, seed: int | None = None, secret: int | None = None, task: str = "") -> Seen:
        self.secret = secret if secret is not None else (seed or 0) % self.limit
        self.resets.append({"seed": seed, "secret": secret, "task": task})
        return Seen(text=f"Guess a number below {self.limit}.{task}")

    def step(self, action: Saying) -> Seen:
        self.steps += 1
        if "raise" in action.text:
            raise ValueError("no such move")
        if "exit" in action.text:
            raise SystemExit(3)
        if "string" in action.text:
            return Seen(text="?", reward="1.0")
        if "long" in action.text:
            return Seen(text="x" * 10_000_000)
        if "parts" in action.text:
            return Seen(
                text="so so", reward=1.0 if "more" in action.text else None, metadata={"rewards": {"style": 0.25}}
            )
        if "sleep" in action.text:
            time.sleep(1)
        found = action.text.strip() == str(self.secret)
        return Seen(text="right" if found else "wrong", reward=float(found), done=found)

    def close(self) -> None:
        self.closed = True


class Alone(Guess):
    SUPPORTS_CONCURRENT_SESSIONS = False


class Asynchronous(Guess):
    async def step_async(self, action: Saying) -> Seen:
        return self.step(action)


class Scene(BaseModel):
    picture: str
    caption: str
    done: bool = False
    reward: float | None = None


class TwoTexts:
    def reset(self) -> Scene:
        return Scene(picture="a", caption="b")

    def step(self, action: Saying) -> Scene:
        return Scene(picture="c", caption="d", reward=0.5)


class Words(BaseModel):
    text: str
    done: bool = False
    reward: str | None = None


class WordyReward:
    def reset(self) -> Words:
        return Words(text="hello")

    def step(self, action: Saying) -> Words:
        return Words(text="hello", reward="1.0")


class Broken:
    def reset(self) -> Seen:
        raise KeyError("level")

    def step(self, action: Saying) -> Seen:
        return Seen(text="")


def both(observation: Any, step: int, history: list[str]) -> str:
    return f"{step}. {observation.picture}{observation['caption']} {history}"


def parse(text: str) -> dict[str, str] | None:
    return {"text": text.strip()} if text.strip() else None


def strict(text: str) -> str:
    return str(int(text))


def wrong(text: str) -> str:
    return text.strp()
