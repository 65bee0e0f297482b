"""The judge's end of the link to the program: questions, and what is believed of the answers."""

from __future__ import annotations

import abc
import functools
import inspect
import os
import sys
import types
from _thread import RLock
from collections.abc import Callable
from typing import Any

from .. import protocol
from . import library
from .faults import is_ours
from .instances import instances
from .mirrors import (
    OPERATIONS,
    Member,
    Mirror,
    Remote,
    async_generator,
    coroutine,
    generator,
    is_mirror,
    is_remote,
)
from .operations import BASES
from .values import FILLING, KINDS_BY_TYPE, UNKNOWN, Kind, Node, Refused, Side, Unreadable

MAX_CLASS_NAMES = 2000


class Gone(BaseException):
    """The program ended, or sent what no honest one sends. No test catches it by accident."""

    def __init__(self, detail: str, broke: bool = True) -> None:
        super().__init__(detail)
        self.broke = broke
        """Whether it broke the protocol, rather than ended."""


class Stopped(RuntimeError):
    """The program raised StopIteration, GeneratorExit or SkipTest when it was called. As itself it would end a loop of
    the tests over `map(f, …)` early, without a comparison, or the test; what a generator makes of it does not."""


class Link(Side):
    """One program, asked."""

    def __init__(self, channel: int, surroundings: Callable[[Link], dict[str, Any]]) -> None:
        """surroundings: what of this process the program is to have too, for one question."""
        super().__init__(0)
        self.channel, self.surroundings = channel, surroundings
        self.lock = RLock()
        self.objects: dict[int, Any] = {}
        self.number_by_id: dict[int, int] = {}
        self.tainted: set[int] = set()
        self.lent: list[Any] = []
        self.lent_numbers: dict[int, int] = {}
        self.own_classes: dict[type, Kind] = {}
        self.failed: AssertionError | None = None
        """Raised by a function of the tests that the program called, and not yet seen to come back."""
        self.emptied: dict[int, Any] = {}
        """Containers of the tests that the program left empty."""
        self.printed: Callable[[list[Any]], None] = lambda printed: None
        self.texts: dict[int, str] = {}
        """What `str` of the program's exceptions is."""
        self.details: dict[int, tuple[Any, str]] = {}
        """What the program's process said of an exception, with its line. (Kept, so that its id stays its own.)"""
        self.bound: set[int] = set()
        """Ids of functions that are methods of the program's objects."""
        self.given: list[tuple[Any, ...]] = []
        """Arguments of the questions that are open."""
        self.gone: Gone | None = None

    # --- questions

    def names(self) -> tuple[dict[str, Any], list[str]]:
        """The first message: values of names that the tests use, and names the program has not. Raises Gone."""
        kind, body = self.receive()
        with self.reading():
            if kind is not protocol.Kind.NAMES:
                raise Unreadable("a message out of turn")
            found, missing = protocol.parse(body)
            return {str(name): self.decode(node) for name, node in found}, list(map(str, missing))

    def ask(self, operation: str, *args: Any) -> Any:
        """The result, data or what stands for an object. Raises what the program raised, or Gone."""
        with self.lock:
            if self.gone is not None:  # a test may have caught it
                raise Gone(str(self.gone), self.gone.broke)
            self.given.append(args)
            try:
                return self._ask(operation, args)
            except Gone as gone:
                self.gone = gone
                raise
            finally:
                self.given.pop()

    def _ask(self, operation: str, args: tuple[Any, ...]) -> Any:
        token = os.urandom(8).hex()
        changes = self.changes()
        nodes = self.encode_items(args)
        around = self.surroundings(self)
        message = [token, operation, changes, nodes, self.forget_unheld(), around]
        self.send(protocol.Kind.ASK, message)
        while True:
            kind, body = self.receive()
            if kind is protocol.Kind.CALLBACK:
                self.serve_callback(body)
                continue
            with self.reading():
                said, changes, node, forgotten, printed, text = protocol.parse(body)
                if said != token or kind not in (protocol.Kind.ANSWER, protocol.Kind.RAISE):
                    raise Unreadable("an answer to nothing that was asked")
                if changes:
                    self.take_changes(changes)
                value = self.decode(node)
                self.forget(forgotten)
                if printed:
                    self.printed(printed)
                raise_it: BaseException | None
                if kind is protocol.Kind.RAISE:
                    self.failed = None
                    raise_it = self.to_raise(value, operation, str(text))
                else:
                    raise_it = self.failed  # the program may catch it, but not make it undone
                    self.failed = None
            if raise_it is not None:
                raise raise_it
            return value

    def take_changes(self, changes: Any) -> None:
        """What the program did to values: to its own, and to those of the tests that this question gave it. A method
        of an object may have kept others."""
        reachable: set[int] | None = None
        anything = any(given and self.is_object(given[0]) for given in self.given)
        for number, content in changes:
            entry = self.shared[number]
            if entry.ours and not anything:
                reachable = self.reachable() if reachable is None else reachable
                if id(entry.value) not in reachable:
                    entry.seen = UNKNOWN  # the tests' state of it is sent again
                    continue
            had = len(entry.kind.state(entry.value))
            self.update(number, content)
            if entry.ours and had and not entry.kind.state(entry.value):
                self.emptied[id(entry.value)] = entry.value

    def reachable(self) -> set[int]:
        """Ids of what the open questions gave to the program."""
        found: set[int] = set()
        stack: list[Any] = list(self.given)
        while stack:
            value = stack.pop()
            if id(value) in found:
                continue
            number = self.numbers.get(id(value))
            if number is not None:
                found.add(id(value))
                stack += self.shared[number].kind.read(value)
            elif type(value) is tuple:
                stack += value
        return found

    def is_object(self, value: Any) -> bool:
        return is_remote(value) or id(value) in self.bound

    def to_raise(self, error: Any, operation: str, text: str) -> BaseException:
        if not isinstance(error, BaseException):
            raise Unreadable("no exception")
        skips = type(error).__module__.partition(".")[0] in ("unittest", "pytest")
        if skips or isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit):
            return Stopped(f"{type(error).__name__}: {error}")
        if text:
            self.details[id(error)] = (error, text[:2000])
        return error

    def reading(self) -> _Reading:
        return _READING

    def receive(self) -> tuple[protocol.Kind, bytes]:
        try:
            return protocol.receive(self.channel)
        except (protocol.Closed, OSError):
            raise Gone("the program ended", broke=False) from None
        except ValueError as error:
            raise Gone(str(error)) from None

    def send(self, kind: protocol.Kind, said: Any) -> None:
        try:
            protocol.send(self.channel, kind, protocol.dump(said))
        except OSError:
            raise Gone("the program ended", broke=False) from None

    def serve_callback(self, body: bytes) -> None:
        with self.reading():
            target, changes, nodes, forgotten = protocol.parse(body)
            self.take_changes(changes)
            function = self.method_of(target)
            args, pairs = self.decode_items(nodes)
            kwargs = dict(pairs)
            self.forget(forgotten)
        try:
            result, good = function(*args, **kwargs), True
            if isinstance(result, types.CoroutineType) and id(result) not in self.number_by_id:
                result = _run_apart(result)
        except Exception as error:
            if isinstance(error, AssertionError):
                self.failed = error
            result, good = error, False
        del args, kwargs, pairs, function
        changes = self.changes()
        node = self.encode(result)
        self.send(protocol.Kind.RETURN, [good, changes, node, self.forget_unheld()])

    def method_of(self, target: Any) -> Callable[..., Any]:
        """A function that was lent, or a method of a class of the tests that was. Raises LookupError."""
        if type(target) is int and target >= 0:
            found = self.lent[target]
            if isinstance(found, BaseException):
                raise Unreadable("an exception is not called")
            return found
        number, name = target
        kind = self.lent[number]
        if not isinstance(kind, type):
            if not (_is_mock(kind) and type(name) is str and not name.startswith(_MOCKS_OWN)):
                raise Unreadable("no class")
            return functools.partial(getattr, kind, name)
        found = next(vars(base)[name] for base in kind.__mro__ if name in vars(base) and base in self.own_classes)
        if isinstance(found, staticmethod):
            return found.__func__
        if isinstance(found, classmethod):
            return found.__func__
        if isinstance(found, property | functools.cached_property):
            return found.fget if isinstance(found, property) else found.func  # type: ignore[return-value]
        if not isinstance(found, types.FunctionType):
            raise Unreadable("no method")
        return found

    # --- the tests' objects, going out

    def encode_object(self, value: Any) -> Node:
        number = self.number_by_id.get(id(value))
        if number is not None:
            return ["O", number]
        kind = type(value)
        if id(value) in self.lent_numbers and not isinstance(value, BaseException | type):
            return ["f", self.lent_numbers[id(value)], "", False]
        if isinstance(value, BaseException):
            args = [argument if _is_data(argument) else str(argument) for argument in value.args]
            return ["e", self.lend(value), self.encode_object(kind), self.encode_items(args)]
        name = library.name_of(value)
        if name is not None and name[0].partition(".")[0] not in ("mrl_sandbox", "pytest", "unittest"):
            return ["L", *name]
        if isinstance(value, type):
            return self.encode_own_class(value)
        if kind.__module__ == "__main__" and isinstance(value, BASES):
            if isinstance(value, tuple) and hasattr(kind, "_fields"):
                return ["u", self.encode_own_class(kind), self.encode_items(tuple(value))]
            base: Any = next(base for base in BASES if isinstance(value, base))
            return self.encode(base(value))
        if kind.__module__ == "__main__" and not callable(value):
            self.own_kind(kind)
            return self.share(value, self.own_classes[kind])
        if _is_mock(value):
            return ["m", self.lend(value)]
        if callable(value):
            later = inspect.iscoroutinefunction(value)
            return ["f", self.lend(value), str(getattr(value, "__name__", kind.__name__)), later]
        if isinstance(value, types.GeneratorType | map | filter | zip) or hasattr(value, "__next__"):
            return self.encode(list(value))
        raise Refused(f"not judgeable here, because a {kind.__name__} of the tests cannot be given to the program")

    def lend(self, value: Any) -> int:
        number = self.lent_numbers.get(id(value))
        if number is None:
            number = self.lent_numbers[id(value)] = len(self.lent)
            self.lent.append(value)
        return number

    def encode_own_class(self, kind: type) -> Node:
        if id(kind) in self.lent_numbers:
            return ["K", self.lent_numbers[id(kind)], "", [], [], []]
        if kind.__module__ != "__main__":
            raise Refused(f"not judgeable here, because the class {kind.__name__} cannot be given to the program")
        number = self.lend(kind)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return ["U", number, kind.__name__, list(kind._fields)]
        self.own_kind(kind)
        methods, values = [], []
        for name, item in vars(kind).items():
            if name in _CLASS_NAMES:
                continue
            style = {staticmethod: "s", classmethod: "c", property: "p"}.get(type(item))
            if style is None and isinstance(item, types.FunctionType):
                style = "f"
            if style is not None:
                methods.append([name, style])
            elif not isinstance(item, types.MemberDescriptorType | types.GetSetDescriptorType):
                values.append([name, self.encode(item)])
        bases = [self.encode_object(base) for base in kind.__bases__ if base is not object]
        return ["K", number, kind.__name__, bases, methods, values]

    def own_kind(self, kind: type) -> None:
        if kind not in self.own_classes:
            self.own_classes[kind] = instances(kind)

    # --- the program's objects, coming in

    def decode_object(self, node: list[Node]) -> Any:
        tag = node[0]
        if tag == "o":
            return self.object(node)
        if tag == "c":
            return self.kind(node)
        if tag == "L":
            return library.named(node[1], node[2])
        if tag == "O":
            return self.lent[node[1]]
        if tag == "I":
            return self.decode_shared(self.own_classes[self.decode(node[3])], node[:3])
        if tag == "u":
            kind = self.decode(node[1])
            if not issubclass(kind, tuple) or kind.__module__ != "__main__":
                raise Unreadable("no named tuple of the tests")
            return tuple.__new__(kind, self.decode_items(node[2]))
        raise Unreadable("an unknown tag")

    def object(self, node: list[Node]) -> Any:
        number = node[1]
        if type(number) is not int:
            raise Unreadable("a number that is none")
        found = self.objects.get(number, UNKNOWN)
        if found is not UNKNOWN:
            return found
        flavour = node[2]
        if flavour == "f":
            made = self.function(*node[3:])
            if node[4] == "m":
                self.bound.add(id(made))
        elif flavour == "g":
            made = generator(self, number)
        elif flavour == "y":
            made = coroutine(self, number)
        elif flavour == "Y":
            made = async_generator(self, number)
        elif flavour == "e":
            made = self.error(*node[3:])
        elif flavour == "x":
            made = self.instance(*node[3:])
        else:
            raise Unreadable("an unknown flavour")
        return self.enter(number, made)

    def enter(self, number: int, made: Any) -> Any:
        self.objects[number], self.number_by_id[id(made)] = made, number
        return made

    def function(self, name: Any, flavour: Any, document: Any = None) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            return self.ask("call", function, args, tuple(kwargs.items()))

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await self.ask("call", coroutine, args, tuple(kwargs.items()))

        made = coroutine if flavour == "y" else function
        made.__name__ = made.__qualname__ = str(name)[:200]
        made.__doc__ = document if type(document) is str else None
        return made

    def error(self, kind: Node, args: Node, text: Any, more: Node) -> BaseException:
        made = self.decode(kind)
        values = tuple(self.decode_items(args))
        if not isinstance(made, type) or not issubclass(made, BaseException):
            raise Unreadable("no exception")
        error = made.__new__(made, *values)
        if isinstance(made, Mirror):
            self.texts[id(error)] = str(text)  # it is kept, and so its id stays its own
        elif issubclass(made, SystemExit | StopIteration | OSError | UnicodeError | ImportError):
            error = made(*values)
        error.args = values
        attributes = self.decode(more)
        if type(attributes) is dict and not isinstance(made, Mirror):
            error.__dict__.update({str(name): value for name, value in attributes.items()})
        return error

    def instance(self, kind: Node, content: Node = None) -> Any:
        made: Any = self.decode(kind)
        if not is_mirror(made):
            raise Unreadable("an object of no class of the program")
        base: Any = next((base for base in BASES if issubclass(made, base)), None)
        if base is None:
            return object.__new__(made)
        shared = KINDS_BY_TYPE.get(base)
        if shared is None:
            value = self.decode(content)
            if type(value) is not base:
                raise Unreadable("other data than its class holds")
            return base.__new__(made, value)
        number, items = content
        if type(number) is not int or number in self.shared or number % 2 == self.next % 2:
            raise Unreadable("a number that is not free")
        value = base.__new__(made)
        entry = self.keep(number, value, shared, False)
        entry.seen = FILLING
        shared.fill(value, self.decode_items(items))
        entry.seen = shared.state(value)
        return value

    def kind(self, node: list[Node]) -> Any:
        number = node[1]
        if type(number) is not int:
            raise Unreadable("a number that is none")
        found = self.objects.get(number)
        if found is not None:
            return found
        _, _, name, qualname, bases, dunders, methods, hashable, document, lent = node
        if len(methods) + len(dunders) > MAX_CLASS_NAMES:
            raise Unreadable("a class with too many names")
        parents = [base for base in map(self.decode, bases) if _may_extend(base)]
        if not any(isinstance(base, Mirror) for base in parents):
            parents.insert(0, Remote)
        body: dict[str, Any] = {item: OPERATIONS[item] for item in dunders if item in OPERATIONS}
        body |= {str(item): Member(str(item)) for item in methods if not str(item).startswith("_mrl")}
        body |= {"__doc__": document if type(document) is str else None, "__module__": "__main__"}
        body["__qualname__"] = str(qualname)
        if any(issubclass(base, (*BASES, BaseException)) for base in parents):
            for item in ("__hash__", "__eq__"):
                body.pop(item, None)
        else:
            body["__slots__"] = ()
            if not hashable and "__hash__" not in body:
                body["__hash__"] = None
            elif "__eq__" in body and hashable and "__hash__" not in body:
                body["__hash__"] = OPERATIONS["__hash__"]
        if lent is not None:  # `isinstance` looks there
            real = library.named(*lent)
            body["__class__"] = property(lambda _: real)
        made = Mirror.make(str(name), tuple(parents), body)
        return self.enter(number, made)


class _Reading:
    """Whatever reading the program's message raises, the program wrote it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, _READING_RAISES) and not is_ours(error):
            raise Gone(f"the program sent what cannot be read: {type(error).__name__}: {str(error)[:300]}") from None


_READING = _Reading()
_READING_RAISES = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    ImportError,
    RuntimeError,
)
_NOT_GIVEN = """
__dict__ __weakref__ __module__ __qualname__ __doc__ __annotations__ __slots__ __dataclass_fields__ __dataclass_params__
__match_args__ __hash__ __static_attributes__ __firstlineno__ __abstractmethods__ _abc_impl
"""
_CLASS_NAMES = frozenset(_NOT_GIVEN.split())
"""What is not given with a class of the tests."""


def _is_data(value: Any) -> bool:
    return type(value) in (int, float, str, bool, bytes, tuple, list, dict, type(None))


def _is_mock(value: Any) -> bool:
    mock = sys.modules.get("unittest.mock")
    return mock is not None and isinstance(value, mock.NonCallableMock)


_MOCKS_OWN = ("_", "assert", "configure", "attach", "reset", "mock_", "side_effect", "return_value")
"""What the program may not ask of a mock object."""


def _may_extend(base: Any) -> bool:
    """Whether a class here may have it as a base; otherwise its instances are not instances of it."""
    if not isinstance(base, type):
        raise Unreadable("a base that is no class")
    return isinstance(base, Mirror) or type(base) in (type, abc.ABCMeta)


def _run_apart(coroutine: Any) -> Any:
    """A coroutine of the tests that the program waits for, while this thread's loop waits for the program."""
    import asyncio  # where it is used: what the fork-server has loaded costs every fork

    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append((True, asyncio.run(coroutine)))
        except BaseException as error:
            outcome.append((False, error))

    import threading  # where it is used: what the fork-server has loaded costs every fork

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    good, value = outcome[0]
    if good:
        return value
    raise value
