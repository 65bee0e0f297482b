"""Agents: what they call is carried out, and what came of it is in the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import ConfigError
from mrl.evals import AgentRolloutProcessor, EvaluateResult, EvaluationRow, Message, evaluation_test, run_test
from mrl.processors.agent import mcp_servers
from tests.evals.chat_server import ChatServer


def double(number: int) -> int:
    """
    Doubles a number.

    Args:
        number: Which.
    """
    return 2 * number


def calls_then_says(body: dict[str, Any]) -> Any:
    """Calls the first tool it is shown, once, and then repeats what that said."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return f"It is {last['content']}."
    name = body["tools"][0]["function"]["name"]
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": '{"number": 21}'}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


async def test_functions_are_called_until_none_is() -> None:
    @evaluation_test(
        input_messages=[[[Message(role="user", content="Double 21.")]]],
        completion_params=[{"model": "m"}],
        rollout_processor=AgentRolloutProcessor(tools=[double]),
        steps=5,
    )
    def right(row: EvaluationRow) -> EvaluationRow:
        row.evaluation_result = EvaluateResult(score=float("42" in row.messages[-1].text))
        return row

    with ChatServer(calls_then_says).running() as server:
        (report,) = await run_test(right, model=server.url, record=False)
    assert report.found.score == 1.0, report.unscored_because
    (row,) = report.done
    assert [message.role for message in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert row.messages[1].tool_calls[0].function.arguments == '{"number": 21}'
    assert row.messages[2].tool_call_id == "c1"
    assert row.execution_metadata.tool_call_count == 1
    assert server.asked[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"number": 21}'


def test_servers_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTES_KEY", "k")
    file = tmp_path / "mcp.json"
    stdio = {"command": "python", "args": ["notes server.py"], "env": ["NOTES_KEY"]}
    http = {"url": "http://127.0.0.1:1/mcp", "authorization": "Bearer x"}
    file.write_text(json.dumps({"mcpServers": {"notes": stdio, "web": http}}), encoding="utf-8")
    notes, web = mcp_servers(str(file))
    assert (notes.where, notes.env) == ("python 'notes server.py'", {"NOTES_KEY": "k"})
    assert (web.where, web.headers) == ("http://127.0.0.1:1/mcp", {"Authorization": "Bearer x"})
    monkeypatch.delenv("NOTES_KEY")
    with pytest.raises(ConfigError, match="notes: the environment variable NOTES_KEY is not set"):
        mcp_servers(str(file))
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="no servers under mcpServers"):
        mcp_servers(str(file))


@pytest.mark.openenv
async def test_tools_of_a_server(tmp_path: Path) -> None:
    import sys

    file = tmp_path / "mcp.json"
    server_file = Path(__file__).parents[1] / "rollouts" / "notes_server.py"
    stdio = {"command": sys.executable, "args": [str(server_file)]}
    file.write_text(json.dumps({"mcpServers": {"notes": stdio}}), encoding="utf-8")

    @evaluation_test(
        input_messages=[[[Message(role="user", content="Go.")]]],
        completion_params=[{"model": "m"}],
        rollout_processor=AgentRolloutProcessor(),
        mcp_config_path=str(file),
    )
    def answered(row: EvaluationRow) -> EvaluationRow:
        row.evaluation_result = EvaluateResult(score=float(any(message.role == "tool" for message in row.messages)))
        return row

    with ChatServer(calls_then_says).running() as server:
        (report,) = await run_test(answered, model=server.url, record=False)
    assert report.found.score == 1.0, report.unscored_because
    assert len(server.asked[0]["tools"]) > 1
