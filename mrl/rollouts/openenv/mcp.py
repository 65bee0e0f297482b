"""Environments whose actions are calls of tools (OpenEnv's MCPEnvironment): their tools are offered to the policy."""

from __future__ import annotations

from typing import Any

from mrl.errors import EnvError
from mrl.rollouts.chat import ToolCall, ToolSpec
from mrl.rollouts.openenv.places import Schema
from mrl.rollouts.openenv.results import plain
from mrl.rollouts.openenv.sessions import Session
from mrl.rollouts.tools.functions import MOST_OF_ERROR, as_text


def has_tools(schema: Schema) -> bool:
    """Whether the environment's actions are calls of tools."""
    fields = ((schema.action or {}).get("properties") or {}) if schema.action else {}
    return {"tool_name", "arguments"} <= set(fields)


async def list_tools(session: Session) -> list[ToolSpec]:
    """What the environment offers, as chat templates take it. Raises EnvError."""
    observation = plain((await session.step({"type": "list_tools"})).observation)
    tools = observation.get("tools") if isinstance(observation, dict) else None
    if not isinstance(tools, list) or not tools:
        raise EnvError("the environment's actions are calls of tools, and it lists none")
    if unnamed := [tool for tool in map(plain, tools) if not isinstance(tool, dict) or not tool.get("name")]:
        raise EnvError(f"the environment lists a tool without a name: {str(unnamed[0])[:80]}")
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            },
        }
        for tool in map(plain, tools)
    ]


def call_action(call: ToolCall) -> dict[str, Any]:
    """The action that carries out a call."""
    return {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}


def result_text(observation: Any) -> tuple[str, bool]:
    """What a call returned, as text, and whether it failed. Raises EnvError for what is too long, or no answer."""
    fields = plain(observation)
    if not isinstance(fields, dict):
        raise EnvError(f"a call of a tool was answered with an observation of type {type(fields).__name__}")
    if error := fields.get("error"):
        said = str(error.get("message", error) if isinstance(error, dict) else error)
        return str({"error": said[:MOST_OF_ERROR]}), True
    result = plain(fields.get("result"))
    if not isinstance(result, dict):
        return as_text(result, result_text), False
    parts = result.get("content")
    failed = bool(result.get("is_error"))
    return as_text(parts if parts else result.get("data"), result_text), failed
