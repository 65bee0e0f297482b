"""Environments as TRL's `environment_factory` makes them: objects with `reset`, whose other methods are tools."""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, get_origin, get_type_hints

from mrl.environments import ENVIRONMENTS
from mrl.environments.base import closes, tool_methods
from mrl.errors import ConfigError, EnvError, MRLError
from mrl.rollouts.tools.functions import Tool, described, distinct, found

_STEP_REWARD = "step_reward"
"""Attribute of environments that reward each step."""
CLOSE_SECONDS = 10.0
"""What an environment may take to close."""
_RETURNS = {"reset": (int, float, bool, dict, tuple), "get_reward": (str, bytes, list, dict, tuple)}
"""Types that these methods cannot return, where they say so themselves."""
_ENDS_WHO_AWAITS = (StopIteration, SystemExit, asyncio.CancelledError)


class OwnThread:
    """Runs an object's functions, all on one thread of its own: browsers and databases insist on that.

    The thread lives as long as the object is used, and keeps no process from ending.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What it returns or raises. Cancelled, it is not waited for any more, and runs to its end all the same.

        RuntimeError for what an awaiting task takes as its own end, or the event loop as its.
        """
        return await asyncio.wrap_future(self.begin(function, *args, **kwargs))

    def begin(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have it run after what has begun, whether or not anybody waits for it."""
        answer: Future[Any] = Future()
        self._work.put((lambda: function(*args, **kwargs), answer))
        return answer

    def end(self) -> None:
        """After what has begun."""
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            function, answer = item
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except _ENDS_WHO_AWAITS as error:  # a factory's list of servers has run out, code calls `exit()`, e.g.
                answer.set_exception(_raised(error))
            except BaseException as error:  # raised again where the answer is awaited
                answer.set_exception(error)
            else:
                answer.set_result(result)
            del function, answer, item


@dataclass(eq=False)
class Environment:
    """An instance, with the thread that it lives on."""

    instance: Any
    thread: OwnThread
    tools: dict[str, Tool] = field(default_factory=dict)
    """Its methods, and the tools that every task has."""

    @property
    def name(self) -> str:
        """Of its class, under which its reward is recorded."""
        return type(self.instance).__name__

    @property
    def gives_reward(self) -> bool:
        """Whether it has `get_reward`."""
        return hasattr(type(self.instance), "get_reward")

    @property
    def rewards_steps(self) -> bool:
        """Whether it has `step_reward`, of its class or, once it was made or reset, its own."""
        kind = type(self.instance)
        return hasattr(kind, _STEP_REWARD) or _STEP_REWARD in getattr(self.instance, "__dict__", {})

    def begin_step(self) -> None:
        """Nothing is earned yet by the calls of this turn: what an earlier one earned is not given again."""
        if self.rewards_steps:
            self.instance.step_reward = 0.0

    def step_reward(self) -> float | None:
        """What the turn's calls earned; None where steps are not rewarded. Raises EnvError for what is no number."""
        if not self.rewards_steps:
            return None
        value = self.instance.step_reward
        if (number := _number(value)) is None:
            raise EnvError(f"step_reward of {described(type(self.instance))} is {value!r}, not a finite number")
        return number

    async def call(self, function: Callable[..., Any], /, **kwargs: Any) -> Any:
        """One of its methods, which may be asynchronous."""
        if inspect.iscoroutinefunction(function):
            return await _until_it_ends(function(**kwargs))
        try:
            result = await self.thread.call(function, **kwargs)
        except asyncio.CancelledError:
            # It may run on for as long as it likes; the reward by now is asked for on another thread.
            self.thread.end()
            self.thread = OwnThread("mrl-environment")
            raise
        return await _until_it_ends(result) if inspect.isawaitable(result) else result

    async def close(self) -> str | None:
        """Call its `close()`, if it has one, and end its thread. Returns what went wrong, if anything did."""
        try:
            if closes(type(self.instance)):
                await asyncio.wait_for(self.call(self.instance.close), CLOSE_SECONDS)
        except TimeoutError:
            return f"{described(self.instance.close)} took longer than {CLOSE_SECONDS:g} s, and was left alone"
        except Exception as error:  # nothing depends on it any more
            return f"{described(self.instance.close)} raised {type(error).__name__}: {error}"
        finally:
            self.thread.end()
        return None

    async def reward(self) -> float | None:
        """What `get_reward` gives. Raises EnvError for what is no number."""
        value = await self.call(self.instance.get_reward)
        if value is None:
            return None
        if (number := _number(value)) is None:
            raise EnvError(f"{described(self.instance.get_reward)} gave {value!r}, not a finite number")
        return number


class Environments:
    """The instances of a run's environments: made when none is free, and reset for each attempt.

    factory: a callable, a dict of them by the column `environment`, or names of these. common: tools of every task.
    Raises ConfigError for what is no environment, naming class and line: an instance of each is made to look at it.
    """

    def __init__(self, factory: Any, common: list[Tool]) -> None:
        self.by_column = isinstance(factory, dict)
        given = factory if isinstance(factory, dict) else {None: factory}
        self.factories: dict[str | None, Callable[[], Any]] = {
            name: factory_of(one, _option(name)) for name, one in given.items()
        }
        self.common = common
        self.free: dict[str | None, list[Environment]] = {}
        self.at_most: int | None = None
        """Instances of each factory; who needs one more waits."""
        self._live: list[Environment] = []
        """Those that were made and not closed."""
        self._counts = dict.fromkeys(self.factories, 0)
        """Of each factory, those that are being made included."""
        self._waiting: list[asyncio.Future[None]] = []
        self._closing: set[asyncio.Future[None]] = set()
        self._problems: list[str] = []
        for name, make in self.factories.items():
            if not callable(make):
                raise ConfigError(f"{_option(name)}: {make!r} cannot be called to make an environment; give a class")
            self.free[name] = [self._checked(name, make)]
            self._counts[name] = 1

    def scores(self) -> bool:
        """Whether every environment gives rewards itself, at the end or by step."""
        return all(one.gives_reward or one.rewards_steps for free in self.free.values() for one in free)

    def key_of(self, columns: dict[str, Any]) -> str | None:
        """Which of the factories a task wants. Raises ConfigError."""
        if not self.by_column:
            return None
        name = columns.get("environment")
        if name not in self.factories:
            raise ConfigError(
                f"environment_factory: the column 'environment' has {name!r}, and there is no such environment; it "
                f"has {', '.join(map(repr, self.factories))}"
            )
        return str(name)

    async def take(self, key: str | None) -> Environment:
        """One that nobody else uses, not reset yet."""
        while not self.free[key] and self.at_most is not None and self._counts[key] >= self.at_most:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]
        if self.free[key]:
            return self.free[key].pop()
        self._counts[key] += 1
        try:
            return await self._new(key)
        except BaseException:
            self._released(key)
            raise

    async def _new(self, key: str | None) -> Environment:
        thread = OwnThread("mrl-environment")
        try:
            instance = await thread.call(self.factories[key])
        except BaseException as error:
            thread.end()
            if isinstance(error, Exception):
                raise EnvError(self._not_made(key, error)) from error
            raise
        if any(instance is environment.instance for environment in self._live):
            thread.end()
            raise EnvError(
                f"{_option(key)}: {described(self.factories[key])} gave an object that another attempt has: it has to "
                "make a new one each time"
            )
        return self._live_one(key, instance, thread)

    def give_back(self, key: str | None, environment: Environment, *, usable: bool) -> None:
        """usable: nothing of an attempt is still running on it, and nothing has gone wrong."""
        if usable:
            self.free[key].append(environment)
            self._wake()
        else:
            self._released(key)
            closing = asyncio.ensure_future(self._close(environment))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> list[str]:
        """Close all. Returns what could not be closed. New ones are made if more are needed."""
        for key, free in self.free.items():
            free.clear()
            self._counts[key] = 0
        await asyncio.gather(*self._closing, *map(self._close, [*self._live]))
        problems, self._problems = list(dict.fromkeys(self._problems)), []
        return problems

    async def _close(self, environment: Environment) -> None:
        if environment not in self._live:
            return
        self._live.remove(environment)
        if problem := await environment.close():
            self._problems.append(problem)

    def _released(self, key: str | None) -> None:
        """An instance less."""
        self._counts[key] = max(self._counts[key] - 1, 0)
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)

    def _not_made(self, name: str | None, error: Exception) -> str:
        made = described(self.factories[name])
        if isinstance(error, MRLError):  # says what is missing and what to do
            return f"{_option(name)}: {error}"
        return f"{_option(name)}: {made} could not be made: {type(error).__name__}: {error}"

    def _checked(self, name: str | None, make: Callable[[], Any]) -> Environment:
        thread = OwnThread("mrl-environment")
        try:
            instance = thread.begin(make).result()
        except Exception as error:
            thread.end()
            raise ConfigError(self._not_made(name, error)) from error
        if not callable(getattr(type(instance), "reset", None)):
            thread.end()
            raise ConfigError(
                f"{_option(name)}: {described(type(instance))} has no method `reset`, which begins an attempt"
            )
        attribute = getattr(type(instance), _STEP_REWARD, 0.0)
        if callable(attribute) or isinstance(attribute, property):
            thread.end()
            raise ConfigError(
                f"{_option(name)}: step_reward of {described(type(instance))} is a method; it is a number, 0 before "
                "each turn, to which the tools add what they are worth"
            )
        for method, kinds in _RETURNS.items():
            _check_annotation(getattr(instance, method, None), method, kinds, _option(name))
        return self._live_one(name, instance, thread)

    def _live_one(self, name: str | None, instance: Any, thread: OwnThread) -> Environment:
        environment = Environment(instance, thread, distinct(self._tools(name, instance), _option(name)))
        self._live.append(environment)
        return environment

    def _tools(self, name: str | None, instance: Any) -> list[Tool]:
        own = [Tool.of(method, _option(name)) for method in tool_methods(instance).values()]
        return [*self.common, *own]


def factory_of(given: Any, option: str = "environment_factory") -> Any:
    """What makes an environment: as it was given, by the name of a shipped or registered one, or imported by that of
    its file or module. Raises ConfigError."""
    return ENVIRONMENTS.get(given) if isinstance(given, str) and given.isidentifier() else found(given, option)


async def _until_it_ends(work: Awaitable[Any]) -> Any:
    """What it returns or raises. RuntimeError for `exit()`, which the event loop would take as its own end."""
    try:
        return await work
    except SystemExit as error:
        raise _raised(error) from error


def _raised(error: BaseException) -> RuntimeError:
    """The same, as what ends nobody who awaits it."""
    raised = RuntimeError(f"{type(error).__name__}: {error}".rstrip(": "))
    raised.__cause__ = error
    return raised.with_traceback(error.__traceback__)


def _number(value: Any) -> float | None:
    """A finite number, numpy's too; None for anything else."""
    if hasattr(value, "item") and getattr(value, "size", None) == 1:
        value = value.item()
    return float(value) if isinstance(value, bool | int | float) and math.isfinite(value) else None


def _option(name: str | None) -> str:
    return "environment_factory" if name is None else f"environment_factory, {name!r}"


def _check_annotation(method: Any, name: str, kinds: tuple[type, ...], option: str) -> None:
    """Raise ConfigError where a method says that it returns what it cannot."""
    if method is None:
        return
    try:
        said = get_type_hints(method).get("return")
    except (NameError, TypeError):  # names that only type checkers see
        return
    if (get_origin(said) or said) in kinds:
        wanted = "a number, or None" if name == "get_reward" else "text, or None"
        raise ConfigError(f"{option}: {described(method)} says that it returns {_shown(said)}: it has to be {wanted}")


def _shown(said: Any) -> str:
    return said.__name__ if isinstance(said, type) and get_origin(said) is None else str(said)
