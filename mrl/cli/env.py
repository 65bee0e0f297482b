"""`mrl env`: the shipped environments: which there are, tasks for them, and serving one to others."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any

from mrl.cli.flags import argument, parse
from mrl.errors import ConfigError

USAGE = """usage: mrl env COMMAND

  list     the environments there are by name
  tasks    print tasks for one of them, as a dataset (JSON lines)
  serve    serve one to others, as an OpenEnv server

`mrl env serve --help` explains it."""


def env(argv: list[str]) -> int:
    """The subcommand. Exit code 0, or 2 for what can be mended."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    action, *rest = argv
    if action not in _ACTIONS:
        raise ConfigError(f"mrl env: {action!r} is none of {', '.join(_ACTIONS)}")
    return _ACTIONS[action](rest)


def list_environments(argv: list[str]) -> int:
    """List the environments that have a name."""
    parse("mrl env list", list_environments.__doc__ or "", argv, options=[])
    from mrl.environments import ENVIRONMENTS

    for name in ENVIRONMENTS.names():
        said = inspect.getdoc(ENVIRONMENTS.get(name)) or ""
        print(f"{name:16} {said.splitlines()[0] if said else ''}".rstrip())
    return 0


def tasks(argv: list[str]) -> int:
    """Print tasks for an environment, one JSON object a line: `mrl env tasks echo > tasks.jsonl`."""
    given = parse(
        "mrl env tasks",
        tasks.__doc__ or "",
        argv,
        options=[],
        extra={
            "name": argument("Which environment.", positional=True, required=True, metavar="NAME"),
            "count": argument("How many.", default="100", kind=int),
            "seed": argument("Another seed is other tasks.", default="0", kind=int),
        },
    )
    kind = _shipped(given["name"])
    if not hasattr(kind, "tasks"):
        raise ConfigError(f"name: {given['name']} makes no tasks; write a dataset for it")
    if given.get("count", 100) < 1:
        raise ConfigError(f"count: {given['count']} is not at least 1")
    for row in kind.tasks(given.get("count", 100), given.get("seed", 0)):
        print(json.dumps(row))
    return 0


def serve(argv: list[str]) -> int:
    """Serve an environment as an OpenEnv server: one by its name, or a class of yours, `file.py:Class`.

    A session has an environment of its own; a browser or a sandbox is shared by all.
    """
    given = parse(
        "mrl env serve",
        serve.__doc__ or "",
        argv,
        options=[],
        extra={
            "name": argument("A name, or file.py:Class.", positional=True, required=True, metavar="NAME"),
            "host": argument("Where to listen.", default="127.0.0.1"),
            "port": argument("0 = a free one, which is printed.", default="8000", kind=int),
            "max_sessions": argument("At a time; one more is refused.", default="64", kind=int),
            "options": argument(
                "Arguments of the environment, each as `key=value` (values as in YAML).", default="none", kind=list[str]
            ),
        },
    )
    from mrl.environments.serve import serve as serve_environment

    if given.get("max_sessions", 1) < 1:
        raise ConfigError(f"max_sessions: {given['max_sessions']} is not at least 1")
    serve_environment(
        _maker(given["name"], given.get("options", [])),
        given["name"].rpartition(":")[2],
        host=given.get("host", "127.0.0.1"),
        port=given.get("port", 8000),
        max_sessions=given.get("max_sessions", 64),
    )
    return 0


_ACTIONS: dict[str, Callable[[list[str]], int]] = {"list": list_environments, "tasks": tasks, "serve": serve}


def _maker(name: str, options: list[str]) -> Callable[[], Any]:
    from mrl.cli.flags import key_values

    if ":" in name:
        from mrl.rollouts.tools.functions import found

        kind = found(name, "name")
    else:
        kind = _shipped(name)
    given = key_values("options", options, "game=TowerOfHanoi-v0")
    try:
        inspect.signature(kind).bind(**given)
    except TypeError as error:
        raise ConfigError(f"options: {name}: {error}; it takes {inspect.signature(kind)}") from None
    return functools.partial(kind, **given)


def _shipped(name: str) -> Any:
    from mrl.environments import ENVIRONMENTS

    if name not in ENVIRONMENTS.names():
        raise ConfigError(f"NAME: there is no environment {name!r}; there are {', '.join(ENVIRONMENTS.names())}")
    return ENVIRONMENTS.get(name)
