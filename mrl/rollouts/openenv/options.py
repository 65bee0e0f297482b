"""The options of an OpenEnv source: what goes with what, and the places that come of them."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrl.backends import Backend, Resources
from mrl.errors import ConfigError, DataError
from mrl.rollouts.openenv.places import Dialling, Here, InWorker, Place, Remote, Timing, client_class
from mrl.rollouts.openenv.servers import Container, Subprocess, class_command, shell_command
from mrl.rollouts.tools.functions import described, found
from mrl.types import Task

KINDS = ("base_url", "docker_image", "hub_repo_id", "env_class", "env_command", "env_factory")
"""Options that say what the environment is; one of them is given."""
GOES_WITH = {
    "env_in": ("env_class",),
    "env_args": ("env_class",),
    "env_python": ("env_class",),
    "env_client_cls": ("base_url", "docker_image", "hub_repo_id", "env_command"),
    "headers": ("base_url", "docker_image", "hub_repo_id"),
    "provider": ("docker_image", "hub_repo_id"),
    "servers": ("docker_image", "hub_repo_id", "env_class", "env_command"),
    "env_vars": ("docker_image", "hub_repo_id", "env_class", "env_command"),
}
"""Options that mean something with some of them only."""
DEFAULTS = {"env_in": "process", "servers": 1}
MOST_SESSIONS = 64
"""Sessions at a time, unless `sessions` says otherwise."""
ANSWER_SECONDS = 60.0


@dataclass
class Options:
    """What the source was given, checked."""

    given: dict[str, Any]
    timing: Timing
    kind: str
    env: Any = None
    """The class of `env_class`, or what `env_factory` names."""
    client: Any = None
    """OpenEnv's client class, for servers."""
    typed: bool = False
    """Observations are what a class of the user's makes of them."""
    action_class: Any = None
    tasks: list[Any] = field(default_factory=list)
    task_var: str | None = None

    @classmethod
    def checked(cls, given: dict[str, Any], step_seconds: float | None) -> Options:
        """Raises ConfigError naming the option."""
        kinds = [name for name in KINDS if given[name] is not None]
        if len(kinds) != 1:
            said = "none of these is given" if not kinds else f"{' and '.join(kinds)} are given"
            raise _wrong(f"{said}; rollout_source openenv needs one of {', '.join(KINDS)}")
        _goes_together(given, kinds[0])
        _numbers(given)
        answer = given["request_timeout_s"] or max(ANSWER_SECONDS, (step_seconds or 0) + 5)
        options = cls(given, Timing(answer, given["connect_timeout_s"], given["start_timeout_s"]), kinds[0])
        options._find_class()
        options._take_tasks()
        return options

    # --- what follows from them -------------------------------------------------------------------------------------

    @property
    def task_is_variable(self) -> bool:
        """Whether a task is told to its server, as an environment variable, rather than to `reset`."""
        return bool(self.tasks) and str(self.task_var).isupper()

    @property
    def most(self) -> int:
        """Sessions at a time."""
        return int(self.given["sessions"] or MOST_SESSIONS)

    @property
    def concurrent(self) -> int | None:
        """Sessions of one process with `env_class`: more than one where the class says that it can."""
        return None if getattr(self.env, "SUPPORTS_CONCURRENT_SESSIONS", True) else 1

    def places(self, backend: Backend | None, variables: dict[str, Any]) -> list[Place]:
        """Where environments are, nothing started yet. variables: further environment variables. Raises ConfigError."""
        given = self.given
        env_vars = {name: str(value) for name, value in ((given["env_vars"] or {}) | variables).items()}
        if self.kind == "env_factory":
            return [Here(self.env, None, f"env_factory {_name(self.env)}", self.timing.answer, None, typed=True)]
        if self.kind == "env_class" and given["env_in"] == "process":
            make = functools.partial(self.env, **(given["env_args"] or {}))
            return [Here(make, self.env, _name(self.env), self.timing.answer, self.concurrent, typed=False)]
        return [self._place(number, backend, env_vars) for number in range(self._number)]

    @property
    def _number(self) -> int:
        urls = self.given["base_url"]
        return len(urls) if isinstance(urls, list) else int(self.given["servers"])

    def _place(self, number: int, backend: Backend | None, env_vars: dict[str, str]) -> Place:
        given, which = self.given, f" {number + 1} of {self._number}" if self._number > 1 else ""
        if self.kind == "env_class" and given["env_in"] == "worker":
            return self._worker(backend, env_vars)
        headers = {name: os.path.expandvars(value) for name, value in (given["headers"] or {}).items()}
        dialling = Dialling(self.client, self.typed, self.timing, headers)
        if self.kind == "base_url":
            urls = given["base_url"]
            return Remote(urls[number] if isinstance(urls, list) else urls, dialling)
        if self.kind == "env_class":
            command = class_command(
                self._class_name(), given["env_python"], self.concurrent or self.most, given["env_args"] or {}
            )
            python = given["env_python"]
            name = f"the process of {_name(self.env or given['env_class'])}{which}"
            return Subprocess(dialling, name, command, env_vars, listens=True, other=python is not None)
        if self.kind == "env_command":
            words = shell_command(given["env_command"])
            return Subprocess(dialling, f"env_command{which}", words, env_vars, listens=False, other=False)
        image = given["docker_image"] or _image_of(given["hub_repo_id"])
        return Container(dialling, f"{image}{which}", self._provider(), image, env_vars)

    def _worker(self, backend: Backend | None, env_vars: dict[str, str]) -> Place:
        if backend is None:
            raise _wrong("env_in: worker needs a run's backend; use env_in: process or subprocess")
        if env_vars and backend.shares_memory:
            raise _wrong("env_vars: workers of this backend are in the run's process; use env_in: subprocess")
        place = InWorker(
            backend, self.given["env_class"], self.given["env_args"] or {}, self.env, Resources(env=env_vars),
            self.timing.answer,
        )  # fmt: skip
        place.capacity = self.concurrent
        return place

    def _class_name(self) -> str:
        """Of `env_class`, as another interpreter finds it."""
        given = self.given["env_class"]
        if isinstance(given, str):
            where, _, name = given.rpartition(":")
            return f"{Path(where).expanduser().resolve()}:{name}" if where.endswith(".py") else given
        file, name = inspect.getsourcefile(given), given.__qualname__
        if file is None or "<locals>" in name:
            raise _wrong(f"env_class: {described(given)} cannot be found by another process; put it at a file's top")
        return f"{Path(file).resolve()}:{name}"

    def _provider(self) -> Callable[[], Any]:
        if self.given["provider"] is not None:
            provider: Callable[[], Any] = found(self.given["provider"], "rollout_options: provider")
            return provider
        from openenv.core.containers.runtime import LocalDockerProvider

        return LocalDockerProvider

    # --- rows -------------------------------------------------------------------------------------------------------

    def check_row(self, task: Task) -> None:
        """Raise DataError for a row whose columns cannot travel to `reset`."""
        if self.kind == "env_factory" or (self.kind == "env_class" and self.given["env_in"] == "process"):
            return
        for name, value in task.columns.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"task {task.id!r}, column {name!r}: it is sent to the environment's reset, and cannot be ({error})"
                ) from None

    # --- checks -----------------------------------------------------------------------------------------------------

    def _find_class(self) -> None:
        given = self.given
        if self.kind == "env_factory":
            self.env, self.typed = found(given["env_factory"], "rollout_options: env_factory"), True
            if not callable(self.env):
                raise _wrong(f"env_factory: {self.env!r} cannot be called to make an environment")
            return
        elsewhere = self.kind == "env_class" and given["env_python"] is not None
        if self.kind == "env_class" and not elsewhere:
            self.env = _environment(found(given["env_class"], "rollout_options: env_class"))
            if self.concurrent == 1 and (given["sessions"] or 1) > int(given["servers"]):
                raise _wrong(
                    f"sessions: {described(self.env)} does not have SUPPORTS_CONCURRENT_SESSIONS, so one process has "
                    "one session of it; set it to True in the class if its instances share nothing, or use more "
                    "servers with env_in: subprocess"
                )
        if elsewhere:
            _check_python(given["env_python"])
            if not isinstance(given["env_class"], str):
                raise _wrong("env_class: with env_python it has to be named, file.py:Class")
        if self.kind in ("base_url", "docker_image", "hub_repo_id", "env_command") or given["env_in"] == "subprocess":
            self.client = client_class()
        if given["env_client_cls"] is not None:
            self._typed_client(found(given["env_client_cls"], "rollout_options: env_client_cls"))
        if self.kind in ("docker_image", "hub_repo_id") and given["provider"] is None and not shutil.which("docker"):
            raise _wrong(f"{self.kind}: there is no `docker` on this machine; use base_url for a server that runs")

    def _typed_client(self, client: Any) -> None:
        from openenv.core.env_client import EnvClient

        if not (inspect.isclass(client) and issubclass(client, EnvClient)):
            raise _wrong(f"env_client_cls: {described(client)} is no subclass of openenv's EnvClient")
        if missing := sorted(getattr(client, "__abstractmethods__", ())):
            raise _wrong(f"env_client_cls: {described(client)} lacks {', '.join(missing)}")
        self.client, self.typed = client, True
        for base in client.__mro__:
            for generic in getattr(base, "__orig_bases__", ()):
                types = typing.get_args(generic)
                if types and inspect.isclass(types[0]) and self.action_class is None:
                    self.action_class = types[0]

    def _take_tasks(self) -> None:
        tasks, name = self.given["tasks"], self.given["task_var"]
        if (tasks is None) != (name is None):
            raise _wrong("tasks and task_var go together: the tasks, and the name under which an environment gets them")
        if tasks is None:
            return
        if not isinstance(tasks, list | tuple) or not tasks:
            raise _wrong(f"tasks: {tasks!r} is no list of tasks")
        self.tasks, self.task_var = list(tasks), str(name)
        if self.task_is_variable and self.kind in ("base_url", "env_factory"):
            raise _wrong(
                f"task_var: {name}, in capitals, is an environment variable of a server, and {self.kind} starts none; "
                "an argument of reset has a name in small letters"
            )
        if self.task_is_variable and self.kind == "env_class" and self.given["env_in"] == "process":
            raise _wrong(
                f"task_var: {name}, in capitals, is an environment variable, and this process has one for all; use "
                "env_in: subprocess"
            )


def _goes_together(given: dict[str, Any], kind: str) -> None:
    for name, kinds in GOES_WITH.items():
        if given[name] not in (None, DEFAULTS.get(name)) and kind not in kinds:
            raise _wrong(f"{name} goes with {' or '.join(kinds)}, not with {kind}; leave it out")
    places = ("process", "subprocess", "worker")
    if given["env_in"] not in places:
        raise _wrong(f"env_in: {given['env_in']!r} is none of {', '.join(places)}")
    if given["env_python"] is not None and given["env_in"] != "subprocess":
        raise _wrong("env_python: another interpreter is another process; use env_in: subprocess")
    if given["env_in"] == "process" and kind == "env_class" and (given["env_vars"] or given["servers"] != 1):
        raise _wrong("env_vars and servers need processes of their own; use env_in: subprocess")
    if "{port}" not in str(given["env_command"] or "{port}"):
        raise _wrong("env_command: say where the port goes, e.g. uvicorn my_env.server.app:app --port {port}")
    urls = given["base_url"] or []
    for url in urls if isinstance(urls, list) else [urls]:
        if not re.match(r"(https?|wss?)://[^/]+", str(url)):
            raise _wrong(f"base_url: {url!r} is no address of a server, e.g. http://127.0.0.1:8000")


def _numbers(given: dict[str, Any]) -> None:
    for name in ("sessions", "servers"):
        value = given[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise _wrong(f"{name}: {value!r} is no number of them; use 1 or more")
    for name in ("request_timeout_s", "connect_timeout_s", "start_timeout_s"):
        value = given[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise _wrong(f"{name}: {value!r} is no number of seconds above 0")


def _environment(env: Any) -> Any:
    for method in ("reset", "step"):
        if not inspect.isclass(env) or not callable(getattr(env, method, None)):
            raise _wrong(f"env_class: {described(env)} is no environment: it has no method `{method}`")
    if missing := sorted(getattr(env, "__abstractmethods__", ())):
        raise _wrong(f"env_class: {described(env)} lacks {', '.join(missing)}")
    return env


def _check_python(python: str) -> None:
    try:
        asked = subprocess.run(
            [python, "-c", "import importlib.util as u; print(u.find_spec('openenv') is not None)"],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    except OSError as error:
        raise _wrong(f"env_python: {python} does not start ({error.strerror})") from None
    if asked.stdout.strip() != "True":
        raise _wrong(f"env_python: {python} has no openenv; pip install openenv there, or name another interpreter")


def _image_of(repo: str) -> str:
    from openenv.core.utils import hf_space_subdomain

    return f"registry.hf.space/{hf_space_subdomain(repo)}:latest"


def _name(env: Any) -> str:
    return str(getattr(env, "__qualname__", env))


def _wrong(message: str) -> ConfigError:
    return ConfigError(f"rollout_options: {message}")
