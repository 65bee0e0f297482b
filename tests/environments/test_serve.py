"""Environments as OpenEnv servers, with OpenEnv's own client."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mrl.environments.coding import Coding
from mrl.environments.echo import Echo
from mrl.environments.number_guessing import NumberGuessing
from mrl.environments.serve import action_type, make_app, serve
from mrl.environments.text_game import TextGame
from mrl.errors import ConfigError
from tests.environments.test_shipped import Answers, Fails

pytestmark = pytest.mark.openenv


@contextlib.contextmanager
def served(make: Callable[[], Any], name: str, max_sessions: int = 8) -> Iterator[str]:
    """Its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(make_app(make, name, max_sessions=max_sessions), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def client(url: str) -> Any:
    from openenv.core import GenericEnvClient

    return GenericEnvClient(base_url=url).sync()


def test_a_number_is_guessed_over_the_network() -> None:
    with served(lambda: NumberGuessing(high=8, partial=0.5), "number_guessing") as url, client(url) as game:
        first = game.reset(seed=3)
        assert first.observation["text"].startswith("Find the number from 1 to 8")
        assert (first.reward, first.done) == (None, False)
        low, high, rewards = 1, 8, []
        done = False
        while not done:
            middle = (low + high) // 2
            result = game.step({"number": middle})
            rewards.append(result.reward)
            done, text = result.done, result.observation["text"]
            low, high = (middle + 1, high) if "small" in text else (low, middle - 1)
        assert sum(rewards) == pytest.approx(1.0)
        assert text == "right"
        assert "over" in game.step({"number": 1}).observation["text"]
        assert game.reset(seed=3).observation == first.observation
        state = game.state()
        assert (state["seed"], state["step_count"]) == (3, 0)
        game.reset(secret=7, low=5)
        assert game.step({"number": 7}).reward == 1.0


def test_without_a_seed_one_is_drawn_and_told() -> None:
    with served(Echo, "echo") as url, client(url) as echo:
        text = echo.reset().observation["text"]
        seed = echo.state()["seed"]
        assert echo.reset().observation["text"] != text
        assert echo.reset(seed=seed).observation["text"] == text


def test_what_is_wrong_is_told_and_the_session_goes_on() -> None:
    with served(NumberGuessing, "number_guessing") as url, client(url) as game:
        for wrong in ({"nummer": 3}, {"number": "three"}):
            game.reset(seed=1)
            with pytest.raises(RuntimeError, match="Invalid message"):
                game.step(wrong)
        with pytest.raises(RuntimeError, match="not from 1 to 100"):
            game.reset(secret=1000)
        with pytest.raises(RuntimeError, match="reset first"):
            game.step({"number": 3})
        game.reset(secret=3)
        assert game.step({"number": 3}).done


def test_sessions_are_apart_and_no_more_than_were_allowed() -> None:
    def play(number: int) -> tuple[int, str]:
        with client(url) as game:
            game.reset(secret=number)
            together.wait()
            return number, game.step({"number": number}).observation["text"]

    together = threading.Barrier(8)
    with served(NumberGuessing, "number_guessing", max_sessions=8) as url, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, range(1, 9))) == [(number, "right") for number in range(1, 9)]
    with served(Echo, "echo", max_sessions=1) as url, client(url) as first:
        first.reset(seed=1)
        with pytest.raises(Exception, match=r"(?i)capacity|closed"), client(url) as second:
            second.reset(seed=1)


def test_several_tools() -> None:
    schema = action_type(Coding).model_json_schema()
    assert schema["properties"]["tool"]["enum"] == ["run_code", "submit"]
    assert set(schema["required"]) == {"tool", "code"}
    with served(lambda: Coding(sandbox=Answers()), "coding") as url, client(url) as coding:
        coding.reset(testcases=["assert f(1) == 1"])
        assert coding.step({"tool": "run_code", "code": "x", "stdin": "y"}).observation["text"] == "[nothing printed]"
        result = coding.step({"tool": "submit", "code": "x"})
        assert (result.reward, result.done) == (1.0, True)
        assert httpx.get(f"{url}/schema").json()["action"]["properties"].keys() == {"metadata", "tool", "code", "stdin"}
        assert "Hands in the solution" in httpx.get(f"{url}/metadata").json()["description"]


class Paid:
    """An environment as TRL's users write them: it rewards steps, and is closed."""

    step_reward = 0.0

    def reset(self) -> str:
        return "earn"

    def earn(self, much: float) -> str:
        """Earns."""
        self.step_reward += much
        return "paid"


def test_steps_have_rewards() -> None:
    with served(Paid, "paid") as url, client(url) as game:
        game.reset()
        assert [game.step({"much": much}).reward for much in (0.5, 0.25)] == [0.5, 0.25]


def test_a_sandbox_that_fails_is_an_error_and_no_zero() -> None:
    with served(lambda: Coding(sandbox=Fails()), "coding") as url, client(url) as coding:
        coding.reset(testcases=["assert f(1) == 1"])
        with pytest.raises(RuntimeError, match="the sandbox failed: gone"):
            coding.step({"tool": "submit", "code": "x"})


def test_a_game_of_textarena() -> None:
    with served(lambda: TextGame("TowerOfHanoi-v0"), "textarena") as url, client(url) as game:
        assert "Tower of Hanoi" in game.reset(seed=1).observation["text"]
        assert "moved disk 1" in game.step({"message": "[A C]"}).observation["text"]


class Asynchronous:
    """A user's own: asynchronous, no reward, takes no seed."""

    def reset(self, city: str = "Ulm") -> None:
        self.city = city

    async def look(self, at: str) -> str:
        return f"{at} in {self.city}"


class TwoTypes:
    def reset(self) -> None: ...

    def one(self, x: int) -> str:
        return str(x)

    def two(self, x: str) -> str:
        return x


class Closes:
    """Has a `close`, and a tool that is a function of the class."""

    closed = 0

    def reset(self) -> None: ...

    @staticmethod
    def double(x: int) -> str:
        return str(2 * x)

    def close(self) -> None:
        Closes.closed += 1


def test_close_ends_a_session_and_is_no_tool() -> None:
    with served(Closes, "closes") as url:
        with client(url) as env:
            env.reset()
            before = Closes.closed
            assert env.step({"x": 4}).observation["text"] == "8"
        assert "tool" not in httpx.get(f"{url}/schema").json()["action"]["properties"]
        for _ in range(500):
            if Closes.closed > before:
                break
            time.sleep(0.01)
    assert Closes.closed == before + 1


def test_environments_of_others() -> None:
    with served(Asynchronous, "look") as url, client(url) as env:
        env.reset(seed=3, city="Rome", further=1)
        result = env.step({"at": "a church"})
        assert (result.observation["text"], result.done, result.reward) == ("a church in Rome", False, 0.0)
    with pytest.raises(ConfigError, match=r"TwoTypes.two: the parameter 'x' needs another name"):
        make_app(TwoTypes, "two")


def test_a_port_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match=r"port: 127\.0\.0\.1:99999 cannot be listened on"):
        serve(Echo, "echo", host="127.0.0.1", port=99999, max_sessions=1)


def test_the_command_serves_without_torch() -> None:
    """As installed, in a process of its own, on a free port that it names."""
    code = (
        "import sys, threading; from mrl.cli.main import main; import mrl.environments.serve as s\n"
        "import uvicorn; run = uvicorn.Server.run\n"
        "def checked(*a): assert 'torch' not in sys.modules; return run(*a)\n"
        "uvicorn.Server.run = checked\n"
        "main(['env', 'serve', 'number_guessing', '--port', '0', '--max-sessions', '2', '--options', 'high=4'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        url = re.fullmatch(r"number_guessing is served at (http://127\.0\.0\.1:\d+)\n", said)
        assert url, said
        with client(url[1]) as game:
            assert "from 1 to 4" in game.reset(seed=1).observation["text"]
    finally:
        process.terminate()
        process.wait(20)
