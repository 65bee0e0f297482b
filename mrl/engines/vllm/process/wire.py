"""Messages between an engine and its vLLM process: length-prefixed JSON over a local socket.

Plain data, so that the two sides may run different versions of Python and of every package.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

LENGTH = struct.Struct(">Q")


async def read(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises asyncio.IncompleteReadError when the other side is gone."""
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return json.loads(await reader.readexactly(size))


def write(writer: asyncio.StreamWriter, message: Any) -> None:
    """Send a message; the writer buffers what the socket does not accept yet."""
    data = json.dumps(message, separators=(",", ":")).encode()
    writer.write(LENGTH.pack(len(data)) + data)
