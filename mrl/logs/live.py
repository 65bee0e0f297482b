"""The logs page while a run trains, in a process of its own: the run gives it nothing to do and waits for nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mrl.logs.serve import TOKEN, take_address

END_SECONDS = 5.0


@contextlib.contextmanager
def live_page(run: Path, host: str = "127.0.0.1", port: int = 8000) -> Iterator[str]:
    """Serves the page of `run`, which need not exist yet, while the block runs. Yields the link to open.

    Takes another port where that one is taken. Ends with this process, however that ends. Raises ConfigError.
    """
    address = take_address(host, port, any_port=True)
    environment = {**os.environ, TOKEN: address.token or ""}
    command = [sys.executable, "-m", "mrl.logs", str(address.socket.fileno()), str(run.absolute())]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, pass_fds=[address.socket.fileno()], env=environment, start_new_session=True
    )
    address.socket.close()
    try:
        yield f"{address.link.split('?')[0]}run/{run.name}{'' if address.token is None else f'?token={address.token}'}"
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
