"""Ports of servers that tests start in processes of their own."""

from __future__ import annotations

import socket
import subprocess
import time


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes], seconds: float = 60, host: str = "127.0.0.1") -> None:
    """Until the process answers there. Raises AssertionError when it has ended, or takes longer."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host, port), timeout=1).close()
        except OSError:
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert time.monotonic() < deadline, f"nothing answers at port {port}"
            time.sleep(0.05)
