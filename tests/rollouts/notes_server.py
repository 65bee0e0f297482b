"""A small MCP server, by input and output, or with a port by HTTP. With version 1 or 2 of the library."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from typing import Any

try:
    from mcp.server.mcpserver import Image, MCPServer
except ImportError:  # before 2
    from mcp.server.fastmcp import FastMCP, Image

    MCPServer: Any = FastMCP  # type: ignore[no-redef]

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
port = int(sys.argv[1]) if len(sys.argv) > 1 else None
old = MCPServer.__name__ == "FastMCP"
server = MCPServer("notes", port=port, log_level="ERROR") if old and port else MCPServer("notes")
taken: list[str] = []


@server.tool()
def note(text: str) -> str:
    """Takes a note, and says how many there are."""
    taken.append(text)
    return f"{len(taken)} notes"


@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ValueError(why)


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
async def wait(seconds: float) -> str:
    """Takes a while."""
    await asyncio.sleep(seconds)
    return "late"


@server.tool()
def who() -> str:
    """Says what it was started with."""
    return os.environ.get("NOTES_OWNER", "nobody")


@server.tool()
def picture() -> Image:
    """Draws."""
    return Image(data=base64.b64decode(PIXEL), format="png")


if __name__ == "__main__":
    if port is None:
        server.run("stdio")
    elif old:
        server.run("streamable-http")
    else:
        server.run("streamable-http", port=port)
