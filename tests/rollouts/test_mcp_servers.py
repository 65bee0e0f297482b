"""MCP servers as sets of tools, with the real library: version 1 here, version 2 in the environment of vLLM."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError, EnvError
from mrl.rollouts import TurnLimits
from mrl.rollouts.runner import Runner
from mrl.rollouts.tools import MCPServer, mcp_servers
from mrl.rollouts.tools.mcp_servers import Session
from mrl.rollouts.tools.source import ToolSource
from mrl.types import Rollout, Task
from tests.ports import free_port, wait_for
from tests.rollouts.scripted import Scripted, call, setup

pytestmark = pytest.mark.openenv
FILE = Path(__file__).parent / "notes_server.py"
COMMAND = f"{sys.executable} {FILE}"
NAMES = ["note", "fail", "die", "wait", "who", "picture"]
ASK = [{"role": "user", "content": "go"}]


def start(port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, str(FILE), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(port, process)
    return process


@pytest.fixture
def url() -> Iterator[str]:
    port = free_port()
    process = start(port)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def note(text: str) -> str:
    return call("note", f'{{"text": "{text}"}}')


def results(rollout: Rollout) -> list[str]:
    return [m["content"] for m in rollout.messages if m["role"] == "tool"]


async def test_by_address(url: str) -> None:
    source = ToolSource.create(setup(), tools=[f"mcp:{url}"])
    assert list(source.tools) == NAMES
    policy = Scripted([note("a"), call("fail", '{"why": "too bad"}'), call("note", '{"wrong": 1}'), "done"])
    rollout = await source.run(Task("t", ASK), 0, policy, 1)
    first, failed, wrong = results(rollout)
    assert first == "1 notes"
    assert "Error executing tool fail" in failed  # version 1 adds what was raised
    assert failed.startswith("{'error': ")
    assert wrong.startswith("{'error': ")
    assert (rollout.status, rollout.metrics["tool_calls"], rollout.metrics["tool_errors"]) == ("ok", 3, 2)
    assert "Takes a note, and says how many there are." in policy.prompts()[0]
    assert await source.close() == []


async def test_by_command_each_attempt_has_a_session() -> None:
    own = ToolSource.create(setup(), tools=[MCPServer(COMMAND, env={"NOTES_OWNER": "me"}, only=["note", "who"])])
    assert list(own.tools) == ["note", "who"]
    policy = Scripted([f"{note('a')}\n{note('b')}\n{call('who')}", "done"])
    (group,) = await Runner(own, policy).run([Task("t", ASK)], 2, seed=0)
    assert [sorted(results(rollout)) for rollout in group.rollouts] == [["1 notes", "2 notes", "me"]] * 2
    shared = ToolSource.create(setup(), tools=[{"mcp": COMMAND, "shared": True}])
    (group,) = await Runner(shared, Scripted([note("a"), "done"])).run([Task("t", ASK)], 3, seed=0)
    assert sorted(results(rollout)[0] for rollout in group.rollouts) == ["1 notes", "2 notes", "3 notes"]
    assert await shared.close() == []


async def test_a_server_that_dies_fails_the_attempt_and_is_started_again() -> None:
    source = ToolSource.create(setup(), tools=[MCPServer(COMMAND, shared=True)])
    (group,) = await Runner(source, Scripted([call("die"), "done"])).run([Task("t", ASK)], 1, seed=0)
    assert group.rollouts[0].status == "failed"
    assert "notes_server.py' is gone" in group.rollouts[0].error
    rollout = await source.run(Task("t", ASK), 0, Scripted([note("a"), "done"]), 1)
    assert results(rollout) == ["1 notes"]
    await source.close()


async def test_a_remote_server_that_dies_fails_the_attempt(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "LOOK_SECONDS", 0.1)
    source = ToolSource.create(setup(), tools=[MCPServer(url)])
    runner = Runner(source, Scripted([call("die"), "done"]))
    for reason in ("is gone", "cannot be reached"):
        (group,) = await runner.run([Task("t", ASK)], 1, seed=0)
        assert group.rollouts[0].status == "failed"
        assert f"EnvError: MCP server '{url}' {reason}" in group.rollouts[0].error


async def test_a_call_that_takes_too_long_ends_the_attempt(url: str) -> None:
    source = ToolSource.create(setup(TurnLimits(step_seconds=1.5)), tools=[MCPServer(url)])
    rollout = await source.run(Task("t", ASK), 0, Scripted([note("a"), call("wait", '{"seconds": 60}')]), 1)
    assert (rollout.limit, results(rollout)) == ("step_timeout", ["1 notes"])


async def test_images_come_as_parts() -> None:
    session = Session(MCPServer(COMMAND))
    (part,) = await session.call("picture", {})
    await session.close()
    assert part["type"] == "image"
    assert part["image"].size == (1, 1)


def double(text: str) -> str:
    """
    Doubles.

    Args:
        text: What.
    """
    return text * 2


double.__name__ = "note"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (["mcp:http://127.0.0.1:9/mcp"], "MCP server 'http://127.0.0.1:9/mcp' cannot be reached: ConnectError"),
        (["mcp:no-such-command"], "MCP server 'no-such-command' cannot be reached: FileNotFoundError"),
        (["mcp:python -c pass"], "MCP server 'python -c pass' cannot be reached"),
        (["mcp:"], "'mcp:' names no server"),
        ([MCPServer(COMMAND, only=["read"])], "has no tool 'read'; it has note, fail"),
        ([MCPServer(COMMAND, headers={"a": "b"})], "is a command, which has no use for headers"),
        ([f"mcp:{COMMAND}", double], r"two tools are called 'note': note of MCP server .* and double \(.*:\d+\)"),
    ],
)
def test_servers_that_will_not_do_are_named_before_the_run(tools: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"tools: .*{message}"):
        ToolSource.create(setup(), tools=tools)


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "OPEN_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=r"did not answer within 0\.5 s"):
        MCPServer("sleep 60").tools()


def test_a_server_that_never_lists_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(mcp_servers, "OPEN_SECONDS", 0.01)
    monkeypatch.setattr(mcp_servers.Session, "tools", never)
    monkeypatch.setattr(mcp_servers._Connection, "open", lambda server: asyncio.sleep(0))
    monkeypatch.setattr(mcp_servers.Session, "close", lambda session: asyncio.sleep(0))
    with pytest.raises(ConfigError, match=r"MCP server 'x' did not list its tools within 0\.01 s"):
        MCPServer("x").tools()


def test_servers_are_in_the_record() -> None:
    given = [
        "mcp:http://a/mcp",
        {"mcp": "python b.py", "shared": True},
        MCPServer("c", headers={"Authorization": "$KEY"}),
    ]
    config = OrchestratorConfig.from_flat(tools=given)
    recorded = config.to_dict()["rollout"]["tools"]
    assert recorded == [given[0], given[1], {"mcp": "c", "headers": {"Authorization": "$KEY"}}]
    assert [MCPServer.named(one) for one in recorded] == [MCPServer.named(one) for one in given[:2]] + [given[2]]
    with pytest.raises(ConfigError, match="a server has no 'port', but mcp, shared, only, env, headers"):
        ToolSource.create(setup(), tools=[{"mcp": "x", "port": 3}])


def test_variables_of_the_environment_are_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTES_KEY", "secret")
    assert mcp_servers._expanded({"Authorization": "Bearer $NOTES_KEY"}) == {"Authorization": "Bearer secret"}


async def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package mcp; pip install 'mrl\[mcp\]'"):
        MCPServer("x").tools()


async def test_a_closed_session_opens_anew() -> None:
    session = Session(MCPServer(COMMAND))
    assert await session.call("note", {"text": "a"}) == "1 notes"
    await session.close()
    assert await session.call("note", {"text": "a"}) == "1 notes"
    await session.close()
    with pytest.raises(EnvError, match="cannot be reached"):
        await Session(MCPServer("no-such-command")).call("note", {})
