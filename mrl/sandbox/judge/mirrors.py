"""What stands, in the judge's process, for the program's objects.

Classes of the program have classes here, of the same names and bases, so that `isinstance`, `except` and
`type(x).__name__` mean what they say; generators are generators. What is done with an object is decided by the tables
of `operations`.
"""

from __future__ import annotations

import abc
import dis
import operator
from collections.abc import Callable, Iterator
from typing import Any

from .operations import ASKED, COMBINED, COMPARED, FORWARDED, IN_PLACE, MADE_OF_A_NUMBER, SCALED
from .values import Refused

REFUSED = "not judgeable here, because "
LINK: list[Any] = []
"""The `Link` of this process."""


def ask(operation: str, *args: Any) -> Any:
    """Raises Refused for what could tell how far from a test's number an object is that the program made of it."""
    if operation not in MADE_OF_A_NUMBER and args and is_remote(args[0]) and _number_of(args[0]) in LINK[0].tainted:
        raise Refused(f"{REFUSED}{operation} of an object that the program made of the test's own number")
    return LINK[0].ask(operation, *args)


class Mirror(abc.ABCMeta):
    """The class of the program's classes."""

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **more: Any) -> Any:
        """A class of the tests extends one of the program's: it is made there, and its methods are called back."""
        if "__classcell__" in body or more:
            raise Refused(f"{REFUSED}the tests' class {name} uses super() of the program's class")
        methods = {key: value for key, value in body.items() if key not in ("__module__", "__qualname__")}
        return ask("subclass", name, bases, tuple(methods.items()))

    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def make(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        made = abc.ABCMeta.__new__(cls, name, bases, body)
        made.__abstractmethods__ = frozenset()
        return made

    @property
    def __mro__(cls) -> tuple[type, ...]:
        return tuple(kind for kind in type.__dict__["__mro__"].__get__(cls) if kind is not Remote)

    @property
    def __bases__(cls) -> tuple[type, ...]:  # type: ignore[override]
        found = tuple(kind for kind in type.__dict__["__bases__"].__get__(cls) if kind is not Remote)
        return found or (object,)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return ask("call", cls, args, tuple(kwargs.items()))

    def __getattr__(cls, name: str) -> Any:
        if name == "__signature__":
            return signature(cls)
        if name.startswith("__") and name.endswith("__") and name not in _ASKED_DUNDERS:
            raise AttributeError(name)
        return ask("getattr", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith(("__", "_abc_")):
            type.__setattr__(cls, name, value)
        else:
            ask("setattr", cls, name, value)

    def __iter__(cls) -> Iterator[Any]:
        return iter(ask("iter", cls))

    def __len__(cls) -> int:
        return _of_type(int, ask("len", cls))

    def __getitem__(cls, item: Any) -> Any:
        return ask("getitem", cls, item)

    def __contains__(cls, item: Any) -> bool:
        return any(item is mine or item == mine for mine in cls)

    def __dir__(cls) -> list[str]:
        return [str(name) for name in ask("dir", cls)]


_ASKED_DUNDERS = ("__members__", "__dataclass_fields__", "__annotations__", "__match_args__", "__wrapped__")


class Remote:
    """An object of the program. It has no state here."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _ASKED_DUNDERS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") and isinstance(self, BaseException):
            object.__setattr__(self, name, value)  # __traceback__, __cause__, __context__
        else:
            ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        ask("delattr", self, name)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return _of_type(dict, ask("vars", self))

    def __repr__(self) -> str:
        return _of_type(str, ask("repr", self))

    def __str__(self) -> str:
        if isinstance(self, BaseException):
            return LINK[0].texts.get(id(self), "")
        return _of_type(str, ask("str", self))

    def __format__(self, form: str) -> str:
        return _of_type(str, ask("format", self, form))

    def __copy__(self) -> Any:
        return ask("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return ask("deepcopy", self)

    def __dir__(self) -> list[str]:
        return [str(name) for name in ask("dir", self)]

    def __reduce_ex__(self, protocol_: Any) -> Any:
        raise Refused(f"{REFUSED}an object of the program's cannot be pickled by the tests")


class Member:
    """An attribute that the program's class has in the place of a builtin type's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, value: Any, kind: Any) -> Any:
        return ask("getattr", kind if value is None else value, self.name)

    def __set__(self, value: Any, new: Any) -> None:
        ask("setattr", value, self.name, new)


def _of_type(kind: type, value: Any) -> Any:
    if not isinstance(value, kind) or isinstance(type(value), Mirror):
        raise TypeError(f"a {type(value).__name__} in the place of {kind.__name__}")
    return value


def is_mirror(value: Any) -> bool:
    return isinstance(value, Mirror)


def is_remote(value: Any) -> bool:
    return isinstance(type(value), Mirror)


def _number_of(value: Any) -> int:
    return LINK[0].number_by_id[id(value)]


def _asked(name: str, kind: type | None) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        value = ask(name, self, *args)
        return value if kind is None else _of_type(kind, value)

    return method


def _compared(name: str) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        if is_remote(other):
            return _of_type(bool, _truth(ask(name, self, other)))
        return {"eq": False, "ne": True}.get(name, NotImplemented)

    return method


def _truth(value: Any) -> bool:
    return value if type(value) is bool else bool(value)


def _combined(name: str, reflected: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any, *rest: Any) -> Any:
        left, right = (other, self) if reflected else (self, other)
        operation = f"{name}_" if name in ("and", "or") else name
        if is_remote(other):
            result = ask(operation, left, right)
            if is_remote(result) and {_number_of(self), _number_of(other)} & LINK[0].tainted:
                LINK[0].tainted.add(_number_of(result))
            return result
        if type(other) not in _OPERANDS:
            return NotImplemented
        result = ask(operation, left, right)
        if name in SCALED:
            return result
        if not is_remote(result):
            raise Refused(f"{REFUSED}the program's {type(self).__name__} makes a number of the test's own one")
        LINK[0].tainted.add(_number_of(result))
        return result

    return method


_OPERANDS = (int, float, complex, bool)


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    plain = getattr(operator, f"{name}_" if name in ("and", "or") else name)

    def method(self: Any, other: Any) -> Any:
        return ask(f"i{name}", self, other) if is_remote(other) else plain(self, other)

    return method


def _contains(self: Any, item: Any) -> bool:
    if is_remote(item):
        return _truth(ask("contains", self, item))
    return any(item is mine or item == mine for mine in self)


def _exit(self: Any, kind: Any, error: Any, trace: Any) -> bool:
    """The program may swallow what a test raised on purpose; an assertion, what the program raised itself, and what
    its data made of a test's expression are not its to drop."""
    swallowed = ask("exit", self, kind if kind is None else type(error), error)
    return _truth(swallowed) and error is not None and _was_raised_on_purpose(error, trace)


async def _async_exit(self: Any, kind: Any, error: Any, trace: Any) -> bool:
    swallowed = ask("aexit", self, kind if kind is None else type(error), error)
    return _truth(swallowed) and error is not None and _was_raised_on_purpose(error, trace)


def _was_raised_on_purpose(error: BaseException, trace: Any) -> bool:
    if isinstance(error, AssertionError) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return code.co_filename == "<test>" and code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _next(self: Any) -> Any:
    more, item = ask("next", self)
    if more is not True:
        raise StopIteration(item)
    return item


def _iter(self: Any) -> Any:
    return ask("iter", self)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return ask("call", self, args, tuple(kwargs.items()))


def _await(self: Any) -> Any:
    return ask("await", self)
    yield


async def _anext(self: Any) -> Any:
    more, item = ask("anext", self)
    if more is not True:
        raise StopAsyncIteration
    return item


async def _aenter(self: Any) -> Any:
    return ask("aenter", self)


_KINDS = {"int": int, "str": str, "bytes": bytes, "float": float, "complex": complex, "bool": bool, "": None}
OPERATIONS: dict[str, Any] = {f"__{name}__": _asked(name, _KINDS[kind]) for name, kind in ASKED.items()}
OPERATIONS |= {f"__{name}__": _compared(name) for name in COMPARED}
OPERATIONS |= {f"__{name}__": _combined(name, False) for name in COMBINED}
OPERATIONS |= {f"__r{name}__": _combined(name, True) for name in COMBINED}
OPERATIONS |= {f"__{name}__": _in_place(name[1:]) for name in IN_PLACE}
OPERATIONS |= {
    "__contains__": _contains,
    "__exit__": _exit,
    "__aexit__": _async_exit,
    "__next__": _next,
    "__iter__": _iter,
    "__call__": _call,
    "__await__": _await,
    "__anext__": _anext,
    "__aenter__": _aenter,
}
assert set(FORWARDED) <= set(OPERATIONS), set(FORWARDED) - set(OPERATIONS)


def generator(link: Any, number: int) -> Any:
    """A generator that goes on where the program's does."""
    me = link.objects[number]
    operation, given = "next", tuple[Any, ...]()
    while True:
        more, item = link.ask(operation, me, *given)
        if more is not True:
            return item
        try:
            sent = yield item
            operation, given = ("next", ()) if sent is None else ("send", (sent,))
        except GeneratorExit:
            link.ask("close", me)
            raise
        except BaseException as error:
            operation, given = "throw", (error,)


async def coroutine(link: Any, number: int) -> Any:
    return link.ask("await", link.objects[number])


async def async_generator(link: Any, number: int) -> Any:
    while True:
        more, item = link.ask("anext", link.objects[number])
        if more is not True:
            return
        yield item


def signature(value: Any) -> Any:
    """`inspect.signature` of something of the program."""
    import inspect

    parameters, returns = ask("signature", value)
    empty = inspect.Parameter.empty
    made = [
        inspect.Parameter(
            name,
            inspect._ParameterKind(kind),
            default=default[0] if default else empty,
            annotation=annotation[0] if annotation else empty,
        )
        for name, kind, default, annotation in parameters
    ]
    return inspect.Signature(made, return_annotation=returns[0] if returns else empty)
