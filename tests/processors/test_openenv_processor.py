"""Rows attempted in environments: what the model is told, what comes back, and that rows do not wait for each other."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.errors import ConfigError
from mrl.evals import EvaluationRow, Message, OpenEnvRolloutProcessor, RolloutProcessorConfig
from tests.evals.chat_server import ChatServer


class Countdown:
    """Ends after three steps; the second one earns. Blocks as long as it is told, as clients over a network do."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def reset(self) -> Any:
        self.left = 3
        return SimpleNamespace(observation=SimpleNamespace(text="3 left"), reward=None, done=False)

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        self.left -= 1
        observation = SimpleNamespace(text=f"{self.left} left after {action['say']}")
        return SimpleNamespace(observation=observation, reward=float(self.left == 1), done=self.left == 0)


class Parrot:
    """A model that says how often it was asked."""

    def __init__(self, **params: Any) -> None:
        self.params = params

    async def _make_llm_call(self, messages: list[dict[str, Any]], tools: list[Any]) -> dict[str, Any]:
        said = sum(message["role"] == "assistant" for message in messages)
        usage = {"prompt_tokens": len(messages), "completion_tokens": 1, "total_tokens": len(messages) + 1}
        return {"choices": [{"message": {"content": f"move {said}"}}], "usage": usage}


def processor(seconds: float = 0.0, **options: Any) -> OpenEnvRolloutProcessor:
    return OpenEnvRolloutProcessor(
        env_factory=lambda: Countdown(seconds),
        prompt_builder=lambda observation, step, history: f"{step}: {observation.text} {len(history)}",
        action_parser=lambda text: {"say": text},
        policy_factory=Parrot,
        **options,
    )


def rows(count: int) -> list[EvaluationRow]:
    return [EvaluationRow(messages=[Message(role="user", content=f"Play {n}.")]) for n in range(count)]


def config(**changes: Any) -> RolloutProcessorConfig:
    return RolloutProcessorConfig(completion_params={"model": "m"}, semaphore=asyncio.Semaphore(8), steps=8, **changes)


async def played(made: OpenEnvRolloutProcessor, given: list[EvaluationRow]) -> list[EvaluationRow]:
    made.setup()
    try:
        return list(await asyncio.gather(*made(given, config())))
    finally:
        await made.acleanup()


async def test_a_row_is_played_to_its_end() -> None:
    (row,) = await played(processor(), rows(1))
    assert [(message.role, message.text) for message in row.messages] == [
        ("user", "Play 0.\n\n1: 3 left 0"),
        ("assistant", "move 0"),
        ("user", "2: 2 left after move 0 1"),
        ("assistant", "move 1"),
        ("user", "3: 1 left after move 1 2"),
        ("assistant", "move 2"),
    ]
    assert row.execution_metadata.extra["step_rewards"] == [0.0, 1.0, 0.0]
    assert row.execution_metadata.usage.total_tokens == 1 + 3 + 5 + 3
    assert row.rollout_status.get_termination_reason() == "stop"


async def test_steps_bound_a_rollout() -> None:
    made = processor()
    (row,) = await asyncio.gather(*made(rows(1), RolloutProcessorConfig({"model": "m"}, steps=2)))
    await made.acleanup()
    assert len(row.get_assistant_messages()) == 2
    assert row.rollout_status.get_termination_reason() == "max_steps"


async def test_rows_are_played_at_the_same_time() -> None:
    """Eight rows are in their second step before any has ended: a barrier that only eight together can pass."""
    import threading

    together = threading.Barrier(8, timeout=20)

    class Waits(Countdown):
        def step(self, action: Any) -> Any:
            if self.left == 2:
                together.wait()
            return super().step(action)

    made = OpenEnvRolloutProcessor(Waits, lambda o, s, h: o.text, lambda text: {"say": text}, policy_factory=Parrot)
    done = await played(made, rows(8))
    assert [row.get_assistant_messages()[-1].text for row in done] == ["move 2"] * 8


async def test_against_an_endpoint_with_the_runs_own_parameters() -> None:
    with ChatServer(lambda body: "go").running() as server:
        made = OpenEnvRolloutProcessor(Countdown, lambda o, s, h: o.text, lambda text: {"say": text})
        params = {"model": "m", "base_url": server.url, "temperature": 0.25, "max_tokens": 9}
        await asyncio.gather(*made(rows(1), RolloutProcessorConfig(params, steps=5)))
        await made.acleanup()
    assert len(server.asked) == 3
    assert {(body["temperature"], body["max_tokens"]) for body in server.asked} == {(0.25, 9)}
    assert server.asked[2]["messages"][3] == {"role": "assistant", "content": "go"}


async def test_tasks_take_turns_and_reach_reset() -> None:
    seen = []

    class Named(Countdown):
        def reset(self, task: str = "", seed: int | None = None) -> Any:
            seen.append((task, seed))
            return super().reset()

    given = rows(3)
    given[2].input_metadata.dataset_info = {"task": "own", "seed": 5}
    made = OpenEnvRolloutProcessor(
        Named,
        lambda o, s, h: o.text,
        lambda text: {"say": text},
        policy_factory=Parrot,
        tasks=["a", "b"],
        task_var="task",
    )
    await played(made, given)
    tasks = {task for task, _ in seen}
    assert tasks == {"a", "b", "own"}
    assert ("own", 5) in seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing says where the environment is"),
        ({"env_factory": Countdown, "tasks": ["a"]}, "tasks need task_var"),
        ({"env_factory": Countdown, "env_base_url": "http://127.0.0.1:1"}, "give one of env_factory"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenEnvRolloutProcessor(action_parser=str, **options)


def test_a_container_is_told_its_options() -> None:
    made = OpenEnvRolloutProcessor(
        action_parser=str, docker_image="browsergym-env:latest", env_client_cls=Countdown, headless=False,
        miniwob_url="http://pages/", env_vars={"MORE": 1}, docker_port=8123, request_timeout_s=3.0,
    )  # fmt: skip
    assert made.options["docker_image"] == "browsergym-env:latest"
    assert made.options["env_vars"] == {
        "BROWSERGYM_BENCHMARK": "miniwob",
        "BROWSERGYM_HEADLESS": "false",
        "BROWSERGYM_VIEWPORT_WIDTH": "1280",
        "BROWSERGYM_VIEWPORT_HEIGHT": "720",
        "BROWSERGYM_TIMEOUT": "10000",
        "MINIWOB_URL": "http://pages/",
        "MORE": 1,
    }
    assert callable(made.options["provider"])
