"""Proxies, in the tester's process, for what lives in the program's.

The rule that keeps a program from forging a result: no value it has not produced itself is compared, or combined, with
one of its objects by its own methods. `==`, `<`, `-` and `in` between an object and plain data work on the plain data
under the object (an int under an IntEnum, a tuple under a namedtuple), read as data, and compared here. Two objects of
the program are compared by the program: that is its own `__eq__`, which the test asks for.
"""

from __future__ import annotations

import builtins
import json
import operator
import secrets
from collections.abc import Callable
from typing import Any

from .. import plain
from . import frames

LOCAL_DUNDERS = ("__name__", "__doc__", "__dict__", "__qualname__", "__annotations__", "__wrapped__", "__slots__")


class Gone(BaseException):
    """The program's process sent what no honest one sends. No test can catch it by accident."""


class Link:
    """The tester's end of the way to the program."""

    def __init__(self, channel: int) -> None:
        self.channel = channel
        self.proxies: dict[int, Any] = {}
        self.functions: list[Callable[..., Any]] = []
        self.failed: AssertionError | None = None
        """Raised by a function of the tests that the program called, and not yet seen to come back."""

    def ask(self, operation: str, *args: Any) -> Any:
        """The result, plain data or a proxy. Raises what the program raised, or Gone."""
        token = secrets.token_hex(8)
        texts = [plain.dumps(value, self.keep) for value in args]
        request = json.dumps({"id": token, "op": operation, "args": texts})
        frames.write(self.channel, frames.pack(b"P", request.encode()))
        while True:
            kind, body = frames.read(self.channel)
            if kind == b"K":
                self.serve_callback(body)
                continue
            try:
                if not body.startswith(token.encode()):
                    raise ValueError("an answer to something else")
                data = json.loads(body[len(token) :])
                changed = [(at, plain.loads(text, self.restore)) for at, text in data[-1]]
                error: BaseException | None = None
                if kind == b"V":
                    result = plain.loads(data[0], self.restore)
                    error = self.failed  # the program may catch it, but not make it undone
                else:
                    error = self.exception_class(data[0])(str(data[1]))
                self.update(args, changed)
            except (ValueError, TypeError, LookupError, AttributeError) as problem:
                raise Gone(f"the program sent what cannot be read: {problem}") from None
            self.failed = None
            if error is not None:
                raise error
            return result

    def update(self, args: tuple[Any, ...], changed: list[tuple[int, Any]]) -> None:
        """Arguments the program changed in place change here too."""
        for at, value in changed:
            mine = args[1][at]
            if type(mine) is not type(value):
                raise ValueError("an argument changed its type")
            if type(mine) is list:
                mine[:] = value
            else:
                mine.clear()
                mine.update(value)

    def serve_callback(self, body: bytes) -> None:
        try:
            number, args, kwargs = json.loads(body)
            function = self.functions[number]
            given, named = plain.loads(args, self.restore), plain.loads(kwargs, self.restore)
        except (ValueError, TypeError, LookupError) as problem:
            raise Gone(f"the program sent what cannot be read: {problem}") from None
        try:
            answer = [True, plain.dumps(function(*given, **named), self.keep)]
        except Exception as error:
            if isinstance(error, AssertionError):
                self.failed = error
            answer = [False, plain.dumps((type(error).__name__, str(error)[:500]))]
        frames.write(self.channel, frames.pack(b"L", json.dumps(answer).encode()))

    def keep(self, value: Any) -> plain.Opaque:
        if type(value) is Remote:
            return plain.Opaque("", f"#{value._number}")
        number = getattr(value, "_mrl_number", None)
        if isinstance(value, type) and number is not None:
            return plain.Opaque("", f"#{number}")
        if not callable(value):
            raise TypeError(f"a {type(value).__name__} of the test cannot be given to the program")
        self.functions.append(value)
        return plain.Opaque("", f"@{len(self.functions) - 1}")

    def restore(self, opaque: plain.Opaque) -> Any:
        if opaque.reason[:1] != "#":
            raise ValueError(f"a value that is {opaque.reason or 'not plain data'}")
        number = int(opaque.reason[1:])
        if number not in self.proxies:
            self.proxies[number] = Remote(self, number, opaque.type_name)
        return self.proxies[number]

    def exception_class(self, mro: list[list[Any]]) -> type[BaseException]:
        """A local class with the same name and bases, so that `except` and `pytest.raises` work."""
        (number, name), *rest = mro
        if number < 0:
            found = getattr(builtins, name, None)
            if not isinstance(found, type) or not issubclass(found, BaseException):
                raise ValueError("not an exception")
            if issubclass(found, StopIteration | StopAsyncIteration):
                return Stopped
            return found if issubclass(found, Exception) else Exited
        if not isinstance(self.proxies.get(number), type):
            base = self.exception_class(rest)
            self.proxies[number] = type(str(name), (base,), {"_mrl_number": int(number)})
        return self.proxies[number]


class Stopped(RuntimeError):
    """The program raised StopIteration when it was called. As itself it would end a loop of the tests over `map(f, …)`
    early, without a comparison; what a generator makes of it does not."""


class Exited(Exception):
    """The program raised SystemExit, KeyboardInterrupt or the like when it was called."""


def _plain_under(value: Any) -> Any:
    """The data under a proxy; NotImplemented when there is none."""
    if type(value) is not Remote:
        return value
    found = value._link.ask("base", value)
    if type(found) is not list or len(found) > 1:
        raise Gone("the program sent what cannot be read")
    return found[0] if found else NotImplemented


def _compare(name: str) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if type(other) is Remote:
            return _boolean(self._link.ask(name, self, other))
        mine = _plain_under(self)
        if mine is NotImplemented:
            return {"eq": False, "ne": True}.get(name, NotImplemented)
        return function(mine, other)

    return method


def _combine(name: str, reflected: bool = False) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        left, right = (other, self) if reflected else (self, other)
        if type(other) is Remote:
            return self._link.ask(name, left, right)
        mine = _plain_under(self)
        if mine is not NotImplemented:
            return function(other, mine) if reflected else function(mine, other)
        if name == "mul":  # scaling; what could tell the program a distance to an expected value is not asked of it
            return self._link.ask(name, left, right)
        return NotImplemented

    return method


def _boolean(value: Any) -> bool:
    if type(value) is bool:
        return value
    return bool(value)


def _forward(operation: str, *kinds: type) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        value = self._link.ask(operation, self, *args)
        if kinds and type(value) not in kinds:
            raise TypeError(f"{operation}() gave a {type(value).__name__}")
        return value

    return method


class Remote:
    """An object of the program."""

    __slots__ = ("_link", "_number", "_type_name")

    def __init__(self, link: Link, number: int, type_name: str) -> None:
        for name, value in (("_link", link), ("_number", number), ("_type_name", type_name)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in LOCAL_DUNDERS:
            raise AttributeError(name)
        return self._link.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._link.ask("delattr", self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask("call", self, list(args), kwargs)

    def __iter__(self) -> Any:
        iterator = self._link.ask("iter", self)
        while items := self._link.ask("next", iterator):
            yield items[0]

    def __next__(self) -> Any:
        items = self._link.ask("next", self)
        if not items:
            raise StopIteration
        return items[0]

    def __reversed__(self) -> Any:
        return iter(self._link.ask("reversed", self))

    def __contains__(self, item: Any) -> bool:
        if type(item) is Remote:
            return _boolean(self._link.ask("contains", self, item))
        return any(item == mine for mine in self)

    def __hash__(self) -> int:
        return hash(("remote", self._number))

    def __bool__(self) -> bool:
        return self._link.ask("bool", self) is True

    def __instancecheck__(self, instance: Any) -> bool:
        return type(instance) is Remote and self._link.ask("isinstance", instance, self) is True

    def __subclasscheck__(self, kind: Any) -> bool:
        return type(kind) is Remote and self._link.ask("issubclass", kind, self) is True

    def __exit__(self, *_: Any) -> None:
        self._link.ask(
            "exit", self
        )  # whatever it answers: an assertion that failed inside is not the program's to drop

    def __await__(self) -> Any:
        return self._link.ask("await", self)
        yield

    def __round__(self, digits: int | None = None) -> Any:
        value = _plain_under(self)
        return round(value, digits) if value is not NotImplemented else self._link.ask("round", self, digits)

    __enter__ = _forward("enter")
    __len__ = _forward("len", int)
    __str__ = _forward("str", str)
    __repr__ = _forward("repr", str)
    __format__ = _forward("format", str)
    __int__ = _forward("int", int)
    __float__ = _forward("float", float)
    __complex__ = _forward("complex", complex)
    __index__ = _forward("index", int)
    __abs__ = _forward("abs")
    __neg__, __pos__, __invert__ = _forward("neg"), _forward("pos"), _forward("invert")
    __getitem__, __setitem__, __delitem__ = _forward("getitem"), _forward("setitem"), _forward("delitem")
    __eq__, __ne__ = _compare("eq"), _compare("ne")
    __lt__, __le__, __gt__, __ge__ = _compare("lt"), _compare("le"), _compare("gt"), _compare("ge")


_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul lshift rshift and_ or_ xor"
for _name in _ARITHMETIC.split():
    _dunder = _name.rstrip("_")
    setattr(Remote, f"__{_dunder}__", _combine(_name))
    setattr(Remote, f"__r{_dunder}__", _combine(_name, reflected=True))
