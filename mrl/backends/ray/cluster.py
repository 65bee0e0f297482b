"""The connection of this process to a Ray cluster. A process has one at most."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mrl.backends import base
from mrl.errors import ConfigError

LOCAL = "local"
ROLES = ("actor", "rollout", "reward")

HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""With these a machine that is cut off counts as lost after 8 s, not 62. Read when the head of a cluster starts."""


@dataclass
class Connection:
    """Of all backends of this process."""

    backends: set[int] = field(default_factory=set)
    """Those that use it, by id."""
    ours: bool = False
    """Whether it was made here; one that was there before stays."""
    session: str | None = None
    """Of a cluster that was started here: the folder that its processes name in their command lines."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set once it is given up."""


_connection = Connection()


def require_ray() -> None:
    """Raise ConfigError when ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("backend: ray needs the package ray: pip install 'mrl[ray]'")


def check_options(address: str, runtime_env: Any, placement_timeout: Any, shared_disk: Any, autoscaling: Any) -> None:
    """Raise ConfigError for bad `backend_options`; asks neither ray nor a cluster."""
    if not isinstance(address, str) or not address:
        raise ConfigError(
            f"backend_options: address is {address!r}; give local, auto, or HOST:PORT of a cluster's head"
        )
    if "://" in address:
        raise ConfigError(
            f"backend_options: address {address} is Ray's client protocol, through which weights cannot go; start the "
            "run on a machine of the cluster (`ray job submit -- mrl train …`) with address: auto"
        )
    if isinstance(placement_timeout, bool) or not isinstance(placement_timeout, (int, float)) or placement_timeout <= 0:
        raise ConfigError(f"backend_options: placement_timeout is {placement_timeout!r}; give seconds above 0")
    for name, value in (("shared_disk", shared_disk), ("autoscaling", autoscaling)):
        if value not in (None, True, False):
            raise ConfigError(f"backend_options: {name} is {value!r}; give true or false")
    if runtime_env is not None and not isinstance(runtime_env, Mapping):
        raise ConfigError(
            f"backend_options: runtime_env is {runtime_env!r}; give a mapping, e.g. {{pip: [math-verify]}}"
        )


def check_environments(runtime_env: Mapping[str, Any] | None) -> None:
    """Raise ConfigError without ray, and for what it takes for no environment."""
    require_ray()
    from ray.runtime_env import RuntimeEnv

    for role in (None, *ROLES):
        fields = environment(runtime_env, role)
        try:
            unknown = set(fields) - RuntimeEnv.known_fields
            if unknown:
                raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
            RuntimeEnv(**fields)
        except Exception as error:
            where = "" if role is None else f" of {role}"
            raise ConfigError(f"backend_options: runtime_env{where} is refused by Ray: {error}") from error


def environment(runtime_env: Mapping[str, Any] | None, role: str | None) -> dict[str, Any]:
    """Ray's runtime environment. role: of the workers of a role alone; None = of all."""
    given = runtime_env or {}
    if role is None:
        return {name: value for name, value in given.items() if name not in ROLES}
    return dict(given.get(role) or {})


async def connected(backend: object, address: str, runtime_env: Mapping[str, Any]) -> bool:
    """`connect`, on a thread that stays until `disconnect`: the kernel ends a cluster's processes with the thread that
    has started them."""
    answer: Future[bool] = Future()

    def work() -> None:
        try:
            joined = connect(backend, address, runtime_env)
        except BaseException as error:
            answer.set_exception(error)
            return
        answer.set_result(joined)
        if not joined:
            _connection.over.wait()

    threading.Thread(target=work, name="mrl-ray", daemon=True).start()
    return await asyncio.wrap_future(answer)


def connect(backend: object, address: str, runtime_env: Mapping[str, Any]) -> bool:
    """Connect this process, unless it is; `local` starts a cluster on this machine, which ends with this process at the
    latest. Returns whether it was connected before, with another `runtime_env`. Raises ConfigError."""
    import ray

    if ray.is_initialized():
        _connection.backends.add(id(backend))
        return True
    if address == LOCAL:
        for name, value in HEALTH.items():
            os.environ.setdefault(name, value)
    options: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    try:
        context: Any = ray.init(
            address=address,  # `local` even where a file of a cluster that is gone names another address
            runtime_env=dict(runtime_env) or None,
            logging_level=logging.ERROR,  # it warns of what is meant, such as a thread that is not the main one
            **options,
        )
    except Exception as error:
        raise ConfigError(f"backend_options: no Ray cluster at address {address}: {error}") from error
    _connection.ours, _connection.over = True, threading.Event()
    _connection.session = str(context.address_info["session_dir"]) if address == LOCAL else None
    _connection.backends.add(id(backend))
    return False


def disconnect(backend: object) -> None:
    """Once no backend uses it: end a connection that was made here. A cluster that was started here ends, and all its
    processes have when this returns."""
    import psutil
    import ray

    _connection.backends.discard(id(backend))
    if _connection.backends or not _connection.ours:
        return
    processes = []
    if _connection.session is not None:
        for child in psutil.Process().children():
            if _connection.session in _command(child):
                processes += [child, *child.children(recursive=True)]
    ray.shutdown()
    _connection.over.set()
    _connection.ours, _connection.session = False, None
    _, running = psutil.wait_procs(processes, timeout=base.ENDING_SECONDS)
    for process in running:
        process.kill()
    psutil.wait_procs(running, timeout=base.ENDING_SECONDS)


def nodes() -> list[dict[str, Any]]:
    """The cluster's machines that are up, as Ray describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _command(process: Any) -> str:
    import psutil

    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
