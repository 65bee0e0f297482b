"""Tools and environments as TRL takes them: functions, objects whose methods are tools, and MCP servers."""

from mrl.rollouts.tools.mcp_servers import MCPServer

__all__ = ["MCPServer"]
