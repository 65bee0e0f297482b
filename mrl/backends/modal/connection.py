"""The running app. A process runs one at most, whatever the number of its backends."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from mrl.backends.modal.settings import VARIABLE, Settings, require_modal
from mrl.errors import ConfigError

_MODULE = "mrl.backends.modal.app"


class _Connection:
    users: set[int] = set()  # noqa: RUF012
    """Backends that use the app which runs here, by id."""
    closing: contextlib.AsyncExitStack | None = None
    spent = False
    """Whether the app has run: its classes cannot be used again, and are made anew for the next time."""


def load_app(settings: Settings) -> Any:
    """The module of the app with these settings. Raises ConfigError while one with others runs in this process."""
    require_modal()
    module = sys.modules.get(_MODULE)
    if module is not None and module.settings == settings and not _Connection.spent:
        return module
    if module is not None and (_runs(module) or _Connection.users):
        raise ConfigError(
            f"backend_options: the Modal app that runs here has {module.settings}, and the run asks for {settings}; "
            f"give the app's settings in the environment as {VARIABLE}='{settings.environ()[VARIABLE]}' "
            "(`modal run` reads them as it starts), or leave them out"
        )
    _Connection.spent = False
    before = os.environ.get(VARIABLE)
    os.environ.update(settings.environ())
    try:
        return importlib.import_module(_MODULE) if module is None else importlib.reload(module)
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


async def connect(backend: object, settings: Settings, *, made: Sequence[str], detach: bool, output: bool) -> Any:
    """Run the app unless it runs: as in `modal run`, or in a container. Returns its module.

    made: names of settings whose object at Modal is made when it is missing.
    detach: it outlives this process. output: show what containers print.
    Raises ConfigError, before anything is started, for what is missing at Modal.
    """
    import modal

    if _Connection.users:
        module = sys.modules[_MODULE]
        if module.settings != settings:
            load_app(settings)  # which says why not
    else:
        module = load_app(settings)
        if _runs(module):
            return module
        stack = contextlib.AsyncExitStack()
        try:
            await _check(settings, made)
            if output:
                stack.enter_context(modal.enable_output())
            await stack.enter_async_context(module.app.run(detach=detach))
        except modal.exception.AuthError as error:
            raise ConfigError(f"backend: Modal does not know who you are: {error}; run `modal setup`") from error
        except modal.exception.Error as error:
            raise ConfigError(f"backend: Modal does not start the app {settings.app}: {error}") from error
        _Connection.closing, _Connection.spent = stack, True
    _Connection.users.add(id(backend))
    return module


async def disconnect(backend: object) -> None:
    """The last of its users ends the app, and with it every container of it."""
    if id(backend) not in _Connection.users:
        return
    _Connection.users.discard(id(backend))
    if not _Connection.users:
        stack, _Connection.closing = _Connection.closing, None
        assert stack is not None
        await stack.aclose()


def _runs(module: Any) -> bool:
    """Whether somebody else has started it: `modal run`, or Modal, in a container."""
    return module.app.app_id is not None and not _Connection.spent


async def _check(settings: Settings, made: Sequence[str]) -> None:
    import modal

    for name in settings.secrets:
        try:
            await modal.Secret.from_name(name).hydrate.aio()
        except modal.exception.NotFoundError:
            raise ConfigError(
                f"backend_options: secrets: there is no secret {name!r} in your Modal workspace; make it with "
                f"`modal secret create {name} KEY=VALUE`, or leave it out"
            ) from None
    if "volume" not in made:
        try:
            await modal.Volume.from_name(settings.volume).hydrate.aio()
        except modal.exception.NotFoundError:
            raise ConfigError(
                f"backend_options: volume: there is no Volume {settings.volume!r} in your Modal workspace; make it "
                f"with `modal volume create {settings.volume} --version 2`, or leave volume out for one that is made"
            ) from None
