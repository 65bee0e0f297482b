"""An agent: the model calls tools, sees what they return, and goes on until it calls none."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError
from mrl.processors.base import Attempts, RolloutProcessorConfig, SourceProcessor
from mrl.rollouts import SourceSetup
from mrl.rollouts.tools import MCPServer
from mrl.rollouts.tools.source import ToolSource


class AgentRolloutProcessor(SourceProcessor):
    """Tools of MCP servers (the test's `mcp_config_path`), and functions.

    tools: functions, typed and with a docstring, or `file.py:name`, or MCP servers; beside those of the test.
    """

    def __init__(self, *, tools: Sequence[Any] = ()) -> None:
        super().__init__()
        self.tools = list(tools)

    def source(self, setup: SourceSetup, config: RolloutProcessorConfig) -> Attempts:
        servers = mcp_servers(config.mcp_config_path) if config.mcp_config_path else []
        if not self.tools and not servers:
            raise ConfigError(
                "AgentRolloutProcessor: there are no tools; give the test mcp_config_path, or AgentRolloutProcessor("
                "tools=[search])"
            )
        return ToolSource.create(setup, tools=[*self.tools, *servers])


def mcp_servers(path: str) -> list[MCPServer]:
    """Of a file `{"mcpServers": {NAME: {"command", "args", "env"} or {"url", "authorization"}}}`.

    `env` names variables that the server needs (a list, as Eval Protocol has it), or has their values. Raises
    ConfigError.
    """
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"mcp_config_path: {path} cannot be read ({error.strerror}; looked in {Path.cwd()})"
        ) from None
    except ValueError as error:
        raise ConfigError(f"mcp_config_path: {path} is no JSON ({error})") from None
    servers = found.get("mcpServers") if isinstance(found, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f"mcp_config_path: {path} has no servers under mcpServers")
    return [_server(path, name, given) for name, given in servers.items()]


def _server(path: str, name: str, given: Any) -> MCPServer:
    who = f"mcp_config_path: {path}: {name}"
    if not isinstance(given, dict) or ("command" in given) == ("url" in given):
        raise ConfigError(f"{who}: a server has a command or a url")
    if "url" in given:
        headers = {"Authorization": str(given["authorization"])} if given.get("authorization") else {}
        return MCPServer(str(given["url"]), headers=headers | dict(given.get("headers") or {}))
    env = given.get("env") or {}
    if isinstance(env, list):
        if missing := [variable for variable in env if variable not in os.environ]:
            raise ConfigError(f"{who}: the environment variable {missing[0]} is not set, and the server needs it")
        env = {variable: os.environ[variable] for variable in env}
    return MCPServer(shlex.join([str(given["command"]), *map(str, given.get("args") or [])]), env=env)
