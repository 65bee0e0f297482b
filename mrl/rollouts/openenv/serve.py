"""Serves an environment class, or watches over a command that does, until whoever started it is gone.

Run as a file by any interpreter that has openenv and uvicorn; nothing of mrl is imported. With a class it listens on
the socket that it was given. Its standard input is a pipe that nobody writes to: when that ends, so does this, and all
it started with it.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [entry for entry in sys.path if entry != _HERE]  # files beside this one are no modules of their own

import argparse  # noqa: E402
import contextlib  # noqa: E402
import functools  # noqa: E402
import importlib  # noqa: E402
import importlib.util  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import threading  # noqa: E402
import typing  # noqa: E402
from typing import Any  # noqa: E402

ENDING_SECONDS = 5.0
"""How long a command may take over ending when it is asked to."""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env")
    parser.add_argument("--socket", type=int)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--arguments", default="{}")
    parser.add_argument("command", nargs="*")
    given = parser.parse_args()
    if given.command:
        return watch(given.command)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(found(given.env), json.loads(given.arguments), given.sessions, given.socket)
    return 0


def serve(env: Any, arguments: dict[str, Any], sessions: int, descriptor: int) -> None:
    """Answer OpenEnv's protocol on a listening socket."""
    import uvicorn
    from openenv.core.env_server.http_server import create_app

    action, observation = (parameter(env, place) for place in (0, 1))
    if action is None or observation is None:
        sys.exit(
            f"{env.__qualname__} does not say which actions and observations it has: "
            f"class {env.__name__}(Environment[MyAction, MyObservation, State])"
        )
    make = functools.partial(env, **arguments)
    app = create_app(make, action, observation, env_name=env.__name__, max_concurrent_envs=sessions)
    # Who asks may be busy with other things for longer than a ping waits.
    config = uvicorn.Config(app, log_level="warning", ws_ping_interval=None, ws_max_size=1 << 30)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


def parameter(env: Any, place: int) -> Any:
    """The class of actions (0) or observations (1) of an environment: a parameter of `Environment[…]`, else what the
    types of `step` say; None = neither does."""
    for base in inspect.getmro(env):
        for generic in getattr(base, "__orig_bases__", ()):
            types = typing.get_args(generic)
            if len(types) > place and inspect.isclass(types[place]):
                return types[place]
    if hasattr(env, "mcp_session"):  # its actions are calls of tools
        from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

        return (CallToolAction, CallToolObservation)[place]
    try:
        hints = typing.get_type_hints(env.step)
    except (NameError, TypeError, AttributeError):
        return None
    hint = hints.get("return") if place else next((t for name, t in hints.items() if name == "action"), None)
    return hint if inspect.isclass(hint) else None


def found(name: str) -> Any:
    """`file.py:Class` or `package.module:Class`."""
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(f"_mrl_tools_{Path(where).stem}", where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(where)
    return functools.reduce(getattr, attribute.split("."), module)


def watch(command: list[str]) -> int:
    """Run it in a process group of its own, and end that when our standard input ends."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    ending = threading.Event()
    thread = threading.Thread(target=_end_command, args=(process, ending), daemon=True)
    thread.start()
    code = process.wait()
    if ending.is_set():
        thread.join()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind
    return code


def _end_command(process: subprocess.Popen[bytes], ending: threading.Event) -> None:
    _until_alone()
    ending.set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(ENDING_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    os._exit(0)


def _end_with_parent() -> None:
    _until_alone()
    if os.getpgrp() == os.getpid():  # what environments started, a browser, goes with it
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _until_alone() -> None:
    while os.read(0, 4096):  # unbuffered: the interpreter may end meanwhile
        pass


if __name__ == "__main__":
    sys.exit(main())
