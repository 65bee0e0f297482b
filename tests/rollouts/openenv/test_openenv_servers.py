"""Attempts on OpenEnv's own server, over its own client: capacity, restarts, time-outs, other versions."""

from __future__ import annotations

import asyncio
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mrl.errors import ConfigError
from mrl.rollouts import TurnLimits
from tests.rollouts.openenv.attempts import ROWS, outcome, play, source_of
from tests.rollouts.scripted import call

pytestmark = [pytest.mark.openenv, pytest.mark.timeout(90)]

if TYPE_CHECKING:
    from tests.rollouts.openenv.games import Server

LIGHT = str(Path(__file__).parent / "light_server.py")
GAMES = str(Path(__file__).parent / "games.py")
CLIENT = "tests.rollouts.openenv.games:GuessClient"
TURNS = TurnLimits(turns=4)


def secrets(text: str) -> str:
    return str(text.count("wrong"))


@pytest.fixture(scope="module")
def games() -> Any:
    """Imported where they are needed: with openenv that takes seconds."""
    return importlib.import_module("tests.rollouts.openenv.games")


@pytest.fixture
def server(games: Any) -> Iterator[Server]:
    games.Guess.live, games.Guess.most, games.Guess.steps = set(), 0, []
    server = games.Server().start()
    yield server
    server.stop()


def light(dialect: str) -> dict[str, Any]:
    return {"env_command": [sys.executable, LIGHT, "{port}", dialect]}


def typed(text: str) -> Any:
    from tests.rollouts.openenv.games import GuessAction

    return GuessAction(text=text)


@pytest.mark.parametrize(
    "client",
    [
        {},
        {"env_client_cls": CLIENT},
        {"env_client_cls": f"{GAMES}:GuessClient", "action_parser": lambda text: {"text": text}},
        {"env_client_cls": CLIENT, "action_parser": typed},
    ],
)
async def test_a_server_is_played(client: dict[str, Any], server: Server, games: Any) -> None:
    rollouts = await outcome([secrets], base_url=server.url, limits=TURNS, **client)
    if client.get("env_client_cls") == f"{GAMES}:GuessClient":  # its parser makes no GuessAction
        assert "_step_payload" in str(rollouts[0].error)
        assert "action_parser has to give" in str(rollouts[0].error)
        return
    assert [r.step_rewards for r in rollouts] == [[1.0], [0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    assert rollouts[0].messages[0]["content"] == "Play.\n\nGuess."
    for _ in range(500):  # the server closes them when it notices
        if not games.Guess.live:
            break
        await asyncio.sleep(0.01)
    assert not games.Guess.live


async def test_a_full_server_is_waited_for(server: Server, games: Any) -> None:
    server.stop()
    server.start(sessions=2)
    said: list[str] = []
    source = source_of(base_url=server.url, limits=TURNS)
    await source.start(None, said.append)
    rollouts = await play(source, [secrets], n=4)
    assert [r.rewards["environment"] for r in rollouts] == [1.0] * 16
    assert games.Guess.most == 2
    assert len(said) == 1
    assert "at capacity: 2/2" in said[0]
    await source.close()


async def test_somebody_else_has_the_only_session(server: Server) -> None:
    from openenv.core.generic_client import GenericEnvClient

    server.stop()
    server.start(sessions=1)
    other = GenericEnvClient(base_url=server.url)
    await other.connect()
    await other.reset()
    source = source_of(base_url=server.url, limits=TURNS)
    attempts = asyncio.create_task(play(source, [secrets]))
    await asyncio.sleep(0.3)
    assert not attempts.done()
    await other.close()
    assert [r.status for r in await attempts] == ["ok"] * 4
    await source.close()


async def test_a_server_that_restarts_ends_those_rollouts_only(server: Server, games: Any) -> None:
    source = source_of(base_url=server.url, limits=TURNS)
    await source.start(None)
    running = asyncio.create_task(play(source, ["sleep"], n=2))
    while len(games.Guess.steps) < 8:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(server.stop)
    broken = await running
    assert [r.status for r in broken] == ["failed"] * 8
    assert "the connection was lost during step" in str(broken[0].error)
    next_ones = asyncio.create_task(play(source, [secrets], n=2))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(server.start)
    assert [r.status for r in await next_ones] == ["ok"] * 8
    assert games.Guess.steps.count("sleep") == 8, "no step was repeated"
    await source.close()


async def test_a_server_that_restarts_between_two_steps_ends_the_attempt(server: Server, games: Any) -> None:
    """The client would connect anew, to an environment that nobody has reset."""

    async def meanwhile(text: str) -> str:
        if text == "again":
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
        return text

    says = ["wrong", "again"]
    rollouts = await outcome(says, rows=ROWS[:1], base_url=server.url, limits=TURNS, action_parser=meanwhile)
    assert (rollouts[0].status, games.Guess.steps) == ("failed", ["wrong"])
    assert "the connection was lost before step" in str(rollouts[0].error)


async def test_a_server_that_is_gone_fails_attempts_in_the_end(server: Server) -> None:
    source = source_of(base_url=server.url, connect_timeout_s=0.5)
    await source.start(None)
    server.stop()
    rollouts = await play(source, ["0"])
    assert {r.status for r in rollouts} == {"failed"}
    assert "Failed to connect" in str(rollouts[0].error)
    await source.close()
    with pytest.raises(ConfigError, match="the environment cannot be used: http://127"):
        await outcome(["0"], base_url=server.url, connect_timeout_s=0.3)


async def test_no_answer_in_time_ends_that_attempt_and_its_session(server: Server, games: Any) -> None:
    def slow_once(text: str) -> str:
        return "sleep" if "third" in text else "0"

    rows = [{"prompt": word, "secret": 0} for word in ("first", "second", "third")]
    rollouts = await outcome([slow_once], rows=rows, base_url=server.url, request_timeout_s=0.4)
    assert [r.status for r in rollouts] == ["ok", "ok", "failed"]
    assert "no answer to step within 0.4 s (request_timeout_s)" in str(rollouts[2].error)
    limits = TurnLimits(step_seconds=0.4)
    (rollout,) = await outcome(["sleep"], rows=rows[:1], base_url=server.url, limits=limits)
    assert (rollout.status, rollout.limit, rollout.error) == ("ok", "step_timeout", None)
    assert games.Guess.steps.count("sleep") == 2


def unknown_field(text: str) -> dict[str, Any]:
    return {"word": text}


@pytest.mark.parametrize(
    ("says", "options", "message"),
    [
        ("raise", {}, r"step failed on the server: no such move \(EXECUTION_ERROR\)"),
        ("0", {"action_parser": unknown_field}, "the server's action class refuses the action.*/schema"),
        ("0", light("string"), r"AnyEnv._parse_result \(.*:\d+\) read it, gave the reward '1.0', of type str"),
    ],
)
async def test_bad_answers_say_who_gave_them(says: str, options: dict[str, Any], message: str, server: Server) -> None:
    where = {} if "env_command" in options else {"base_url": server.url}
    (rollout,) = await outcome([says], rows=ROWS[:1], **where, **options)
    assert rollout.status == "failed"
    assert re.search(message, str(rollout.error)), rollout.error


@pytest.mark.parametrize(
    ("dialect", "message"),
    [
        ("old", r"it has no sessions at /ws \(.*HTTP 404\): it is no OpenEnv server, or one of a version before"),
        ("unknown", "the server does not know the message 'reset'.*speaks another version"),
        (
            "fields",
            r"AnyEnv._parse_result \(.*:\d+\) cannot read the server's answer to reset \(KeyError: 'obs",
        ),
    ],
)
async def test_a_server_of_another_version_is_known_before_a_run(dialect: str, message: str) -> None:
    source = source_of(**light(dialect))
    with pytest.raises(ConfigError, match=message):
        await source.start(None)
    await source.close()


async def test_an_observation_of_ten_megabytes_is_known_before_a_run(server: Server) -> None:
    rows = [{"prompt": "Play.", "fill": 10_000_000}]
    with pytest.raises(ConfigError, match=r"PromptBuilder \(.*\) returned 10,000,006 characters, more than 1,000,000"):
        await outcome(["0"], rows=rows, base_url=server.url)
    (rollout,) = await outcome(
        ["0"], rows=rows, base_url=server.url, prompt_builder=lambda o, step, history: o.text[:9], limits=TURNS
    )
    assert rollout.messages[0]["content"].endswith("Guess.xxx")


async def test_tools_of_an_environment_are_offered(games: Any) -> None:
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    server = games.Server(games.Tooled, CallToolAction, CallToolObservation).start()
    says = [call("double", '{"number": 21}'), call("nothing"), "That is 42."]
    for where in ({"base_url": server.url}, {"env_class": games.Tooled}):
        (rollout,) = await outcome(says, rows=[{"prompt": "Double 21."}], **where)
        results = [m["content"] for m in rollout.messages if m["role"] == "tool"]
        assert results[0] == "42"
        assert "error" in results[1]
        assert rollout.rewards == {"environment": 0.5}
        assert (rollout.metrics["tool_calls"], rollout.metrics["tool_errors"]) == (2.0, 1.0)
    server.stop()


# --- started for the run ----------------------------------------------------------------------------------------------


async def test_a_process_with_a_class_is_started_anew_when_it_died() -> None:
    source = source_of(
        env_class=f"{GAMES}:Guess", env_in="subprocess", env_args={"greeting": "Hello!"}, limits=TURNS, sessions=4
    )
    await source.start(None)
    rollouts = await play(source, [secrets])
    assert [r.rewards["environment"] for r in rollouts] == [1.0] * 4
    assert rollouts[0].messages[0]["content"] == "Play.\n\nHello!"
    first = source.pools[""].rooms[0].place.process  # type: ignore[attr-defined]
    (broken,) = await play(source, ["die"], rows=ROWS[:1])
    assert "the connection was lost during step" in str(broken.error)
    assert first.wait(10) == 7
    assert [r.status for r in await play(source, [secrets])] == ["ok"] * 4
    assert source.metrics() == {"environment_restarts": 1.0}
    assert source.metrics() == {"environment_restarts": 0.0}
    second = source.pools[""].rooms[0].place.process  # type: ignore[attr-defined]
    await source.close()
    assert second.poll() is not None


async def test_a_process_that_does_not_come_up_says_why() -> None:
    broken = {"env_command": [sys.executable, "-c", "import sys; sys.exit('no licence, {port}')"]}
    with pytest.raises(ConfigError, match=r"env_command: it ended with code 1 while it started. It said:\nno licence"):
        await outcome(["0"], **broken)


async def test_tasks_may_be_variables_of_servers_of_their_own() -> None:
    rows = [{"prompt": str(number)} for number in range(3)]
    options = {"tasks": ["chess", "go"], "task_var": "TASK", "env_vars": {"COLOUR": "red"}}
    rollouts = await outcome(["x"], n=2, rows=rows, **light(""), **options)
    shown = [r.messages[0]["content"].partition("\n\n")[2] for r in rollouts]
    assert shown == [f"task {task}, colour red" for task in ("chess", "chess", "go", "go", "chess", "chess")]


async def test_a_commands_process_ends_with_who_started_it() -> None:
    """Also when that is killed and can say nothing: its end of the pipe is closed then."""
    from mrl.rollouts.openenv import serve

    command = [sys.executable, str(serve.__file__), "--", sys.executable, LIGHT, "0"]
    watching = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert watching.stdin is not None
    assert watching.stdout is not None
    assert watching.stdout.readline() == b"up\n"
    watching.stdin.close()
    assert watching.wait(10) == 0
    assert watching.stdout.read() == b"", "nobody has the other end any more"


async def test_an_image_is_run_as_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for `docker`: it runs the server without a container, which is not available here."""
    docker = tmp_path / "docker"
    docker.write_text(
        f"""#!{sys.executable}
import os, subprocess, sys
if sys.argv[1] == "run":
    port = sys.argv[sys.argv.index("-p") + 1].split(":")[0]
    env = dict(pair.split("=") for flag, pair in zip(sys.argv, sys.argv[1:]) if flag == "-e")
    env["TASK"] = sys.argv[-1]
    quiet = {{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}}
    process = subprocess.Popen([sys.executable, {LIGHT!r}, port], env=os.environ | env, **quiet)
    print(process.pid)
elif sys.argv[1] == "stop":
    os.kill(int(sys.argv[2]), 15)
"""
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    rows = [{"prompt": "0"}]
    for given, image in (
        ({"docker_image": "game:latest"}, "game:latest"),
        ({"hub_repo_id": "Some/my_game"}, "registry.hf.space/some-my-game:latest"),
    ):
        (rollout,) = await outcome(["x"], rows=rows, **given, env_vars={"COLOUR": "blue"})
        assert rollout.messages[0]["content"].endswith(f"task {image}, colour blue")
        assert rollout.rewards == {"environment": 1.0}
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="docker_image: there is no `docker` on this machine"):
        source_of(docker_image="game:latest")
