"""Speaks OpenEnv's protocol without the package, in one of several dialects: `light_server.py PORT [DIALECT]`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection, serve

DIALECT = sys.argv[2] if len(sys.argv) > 2 else ""


def answer(message: dict[str, Any]) -> dict[str, Any]:
    if DIALECT == "unknown":
        return {
            "type": "error",
            "data": {"message": f"Unknown message type: {message['type']}", "code": "UNKNOWN_TYPE"},
        }
    if DIALECT == "fields":
        return {"type": "observation", "data": {"obs": {"text": "hello"}}}
    text = message.get("data", {}).get("text", "")
    if text == "die":
        os._exit(7)
    if text == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
    reward: Any = ("1.0" if DIALECT == "string" else 1.0) if message["type"] == "step" else None
    seen = {"text": f"task {os.environ.get('TASK')}, colour {os.environ.get('COLOUR')}"}
    return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": message["type"] == "step"}}


async def session(connection: ServerConnection) -> None:
    async for raw in connection:
        message = json.loads(raw)
        if message["type"] == "close":
            return
        await connection.send(json.dumps(answer(message)))


def page(connection: ServerConnection, request: Any) -> Any:
    """HTTP: whatever is not the sessions' address."""
    if request.path == "/ws" and DIALECT != "old":
        return None
    if request.path == "/health":
        return connection.respond(HTTPStatus.OK, '{"status": "healthy"}')
    if request.path == "/schema":
        schema = {"properties": {"text": {"type": "string"}}, "required": ["text"]}
        return connection.respond(HTTPStatus.OK, json.dumps({"action": schema}))
    return connection.respond(HTTPStatus.NOT_FOUND, "")


async def main() -> None:
    async with serve(session, "127.0.0.1", int(sys.argv[1]), process_request=page):
        print("up", flush=True)
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main())
