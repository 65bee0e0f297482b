"""The program's end of the link to its judge: its objects stay here, under numbers, and are asked from there.

Runs in the program's process and is in its hands. The judge takes what comes from here as data, whatever it says.
"""

from __future__ import annotations

import abc
import builtins
import collections
import copy
import inspect
import io
import operator
import random
import sys
import types
from collections.abc import Callable
from typing import Any, Generic

from .. import protocol
from . import library
from .instances import instances
from .operations import ARITHMETIC, BASES, FORWARDED
from .values import KINDS_BY_TYPE, Kind, Node, Side, Unreadable

_NAME = type.__dict__["__name__"].__get__
_MRO = type.__dict__["__mro__"].__get__
_DICT = type.__dict__["__dict__"].__get__
PLAIN_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class Asked(Side):
    """Numbers of the program's objects, of the tests' objects that were given to it, and what is done with both."""

    def __init__(self, names: dict[str, Any], channel: int, describe: Callable[[BaseException, str], str]) -> None:
        """describe: what is said of an exception, given the program's code."""
        super().__init__(1)
        self.names, self.channel, self.describe = names, channel, describe
        self.code = ""
        self.objects: list[Any] = []
        self.number_by_id: dict[int, int] = {}
        self.theirs: dict[int, Any] = {}
        self.their_number: dict[int, int] = {}
        self.their_classes: dict[type, Kind] = {}
        self.flush: Callable[[], Any] = bool
        self.loop: Any = None

    # --- questions

    def open(self) -> None:
        """Once the program is loaded: tell the judge what it has of the names that the tests use, and which of the
        names that the tests define it uses and has not."""
        _, body = protocol.receive(self.channel)
        wanted, offered = protocol.parse(body)
        kinds = type, types.FunctionType
        found = {name: self.names[name] for name in wanted if type(self.names.get(name)) in kinds}
        nodes = [[name, self.encode(value)] for name, value in found.items()]
        missing = sorted(self.missing_names() & set(offered)) if offered else []
        protocol.send(self.channel, protocol.Kind.NAMES, protocol.dump([nodes, missing]))

    def serve(self, flush: Callable[[], Any]) -> None:
        """Until the judge is gone. flush: what is printed is written before an answer goes."""
        self.flush = flush
        while True:
            kind, body = protocol.receive(self.channel)
            if kind is protocol.Kind.ASK:
                self.answer(protocol.parse(body))

    def answer(self, message: list[Any]) -> None:
        token, operation, changes, nodes, forgotten, around = message
        restore: Callable[[], list[Any]] = list
        given: list[Any] | None = None
        kind = protocol.Kind.ANSWER
        try:
            if changes:
                self.take_changes(changes)
            given = self.decode_items(nodes)
            if around:
                restore = self.surround(around)
            if forgotten:
                self.forget(forgotten)
            own = OWN_OPERATIONS.get(operation)
            result = own(self, *given) if own is not None else OPERATIONS[operation](*given)
            given = None  # what nobody else holds is forgotten
            body = self.pack(token, result, restore)
        except BaseException as error:
            error.__traceback__ = self.without_ours(error)
            text = self.describe(error, self.code)
            error.__traceback__ = None
            given = None
            kind, body = protocol.Kind.RAISE, self.pack(token, error, restore, text)
        result = None
        self.flush()
        protocol.send(self.channel, kind, body)

    def pack(self, token: str, result: Any, restore: Callable[[], list[Any]], text: str = "") -> bytes:
        printed = restore()
        changes = self.changes()
        node = self.encode(result)
        result = None
        return protocol.dump([token, changes, node, self.forget_unheld(), printed, text])

    def without_ours(self, error: BaseException) -> Any:
        """The traceback from the first line of the program on."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != "<program>":
            trace = trace.tb_next
        return trace

    def take_changes(self, changes: list[Any]) -> None:
        for number, content in changes:
            self.update(number, content)

    def surround(self, around: dict[str, Any]) -> Callable[[], list[Any]]:
        """What the tests have put in the place of stdout, stdin and the like holds here too, while this is asked."""
        before = sys.stdout, sys.stderr, sys.stdin, builtins.input, builtins.print
        out, error = io.StringIO(), io.StringIO()
        if "out" in around:
            sys.stdout = out
        if "err" in around:
            sys.stderr = error
        if "in" in around:
            sys.stdin = io.StringIO(around["in"])
        if "input" in around:
            builtins.input = self.decode(around["input"])
        if "print" in around:
            builtins.print = self.decode(around["print"])
        for name, node in around.get("give", ()):
            self.names[name] = self.decode(node)
        if "seed" in around:
            random.seed(*self.decode_items(around["seed"]))
        if "np_seed" in around and "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(*self.decode_items(around["np_seed"]))

        def restore() -> list[Any]:
            read = sys.stdin.tell() if "in" in around and type(sys.stdin) is io.StringIO else 0
            sys.stdout, sys.stderr, sys.stdin, builtins.input, builtins.print = before
            return [out.getvalue(), error.getvalue(), read]

        return restore

    # --- operations

    def name(self, name: str) -> Any:
        """What the tests mean by it: a name here, or a method of the class called Solution, as data sets have it."""
        if name in self.names:
            return self.names[name]
        solution = self.names.get("Solution")
        if isinstance(solution, type) and isinstance(vars(solution).get(name), types.FunctionType):
            kind = solution  # a new object each time: one call must not change what the next one does
            return lambda *args, **kwargs: getattr(kind(), name)(*args, **kwargs)
        raise NameError(f"name {name!r} is not defined")

    def step(self, work: Callable[[], Any]) -> list[Any]:
        try:
            return [True, work()]
        except StopIteration as stop:
            return [False, stop.value]

    def wait_for(self, value: Any) -> Any:
        async def outer() -> Any:
            return await value

        return self.event_loop().run_until_complete(outer())

    def async_item(self, iterator: Any) -> list[Any]:
        try:
            return [True, self.wait_for(type(iterator).__anext__(iterator))]
        except StopAsyncIteration:
            return [False, None]

    def event_loop(self) -> Any:
        if self.loop is None:
            import asyncio  # where it is used: what the fork-server has loaded costs every fork

            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        return self.loop

    def signature(self, function: Any) -> list[Any]:
        found = inspect.signature(function)
        empty = inspect.Parameter.empty

        def shown(value: Any) -> list[Any]:
            return [] if value is empty else [value]

        parameters = [[p.name, int(p.kind), shown(p.default), shown(p.annotation)] for p in found.parameters.values()]
        return [parameters, shown(found.return_annotation)]

    def missing_names(self) -> set[str]:
        """Names that the program's functions use and nobody here has: the tests may have them."""
        names: set[str] = set()
        stack = [value.__code__ for value in self.names.values() if type(value) is types.FunctionType]
        for value in list(self.names.values()):
            if isinstance(value, type) and value.__module__ == "__main__":
                stack += [f.__code__ for f in vars(value).values() if type(f) is types.FunctionType]
        while stack:
            code = stack.pop()
            names.update(code.co_names)
            stack += [constant for constant in code.co_consts if type(constant) is types.CodeType]
        return {name for name in names if name not in self.names and not hasattr(builtins, name)}

    # --- the program's objects

    def number(self, value: Any) -> int:
        found = self.number_by_id.get(id(value))
        if found is None:
            found = self.number_by_id[id(value)] = len(self.objects)
            self.objects.append(value)
        return found

    def encode_object(self, value: Any) -> Node:
        theirs = self.their_number.get(id(value))
        if theirs is not None:
            return ["O", theirs]
        kind = type(value)
        mirrored = self.their_classes.get(kind)
        if mirrored is not None:
            return self.share(value, mirrored)
        if id(kind) in self.their_number and issubclass(kind, tuple):
            return ["u", ["O", self.their_number[id(kind)]], self.encode_items(tuple.__iter__(value))]
        if issubclass(kind, type):
            return self.encode_class(value)
        known = id(value) in self.number_by_id
        number = self.number(value)
        if known:
            return ["o", number]
        if issubclass(kind, BaseException):
            return [
                "o",
                number,
                "e",
                self.encode_class(kind),
                self.encode_items(self.arguments(value)),
                self.text(value),
                self.encode(vars(value)) if library.may_name(kind) and vars(value) else None,
            ]
        if kind in PLAIN_FUNCTIONS and not getattr(value, "__dict__", None):
            flavour = "y" if inspect.iscoroutinefunction(value) else "m" if kind is not types.FunctionType else ""
            return ["o", number, "f", str(getattr(value, "__name__", "")), flavour, getattr(value, "__doc__", None)]
        if kind in FLOWS:
            return ["o", number, FLOWS[kind]]
        return ["o", number, "x", self.encode_mirror(kind), *self.content(number, value, kind)]

    def arguments(self, error: BaseException) -> list[Any]:
        found = BaseException.args.__get__(error)  # type: ignore[attr-defined]
        return list(found)

    def text(self, error: BaseException) -> str:
        try:
            return str(error)[:100_000]
        except BaseException:
            return "an exception that cannot be shown"

    def content(self, number: int, value: Any, kind: type) -> list[Node]:
        """The data under an instance of a subclass of a builtin type, read by that type's own methods."""
        base: Any
        for base in BASES:
            if issubclass(kind, base):
                break
        else:
            return []
        shared = KINDS_BY_TYPE.get(base)
        if shared is not None:
            found = self.numbers.get(id(value))
            if found is None:
                found, self.next = self.next, self.next + 2
                entry = self.keep(found, value, shared, True)
                node: Node = [found, self.encode_items(shared.read(value))]
                entry.seen = shared.state(value)
                return [node]
            return []
        if base in (int, float, complex):
            return [self.encode(base.__pos__(value))]
        if base in (str, bytes):
            return [self.encode(base.__getitem__(value, slice(None)) if base is bytes else base.__str__(value))]
        return [self.encode(base(base.__iter__(value)))]

    def encode_class(self, kind: Any) -> Node:
        theirs = self.their_number.get(id(kind))
        if theirs is not None:
            return ["O", theirs]
        lent = library.may_name(kind)
        if lent is not None:
            return ["L", *lent]
        return self.encode_mirror(kind)

    def encode_base(self, kind: Any) -> Node:
        """A base class that the judge can extend as well; of another library class it knows only the name."""
        if kind in BASES or issubclass(kind, BaseException) or type(kind) is abc.ABCMeta or kind is Generic:
            return self.encode_class(kind)
        return self.encode_mirror(kind)

    def encode_mirror(self, kind: Any) -> Node:
        known = id(kind) in self.number_by_id
        number = self.number(kind)
        if known:
            return ["c", number]
        own = _DICT(kind)
        bases = [self.encode_base(base) for base in kind.__bases__ if base is not object]
        dunders = [name for name in FORWARDED if name in own and own[name] is not None]
        held = issubclass(kind, BASES) or issubclass(kind, BaseException)
        extends = any(base is not object and library.may_name(base) for base in _MRO(kind)[1:])
        methods = [name for name in own if type(name) is str and not name.startswith("__")] if extends else []
        if held:
            dunders = [name for name in dunders if name not in ARITHMETIC]
        hashable = own.get("__hash__", 0) is not None
        document = own.get("__doc__") if type(own.get("__doc__")) is str else None
        text = str.__str__(_NAME(kind))[:200]
        qualname = getattr(kind, "__qualname__", text)
        return [
            "c",
            number,
            text,
            str(qualname)[:500],
            bases,
            dunders,
            methods,
            hashable,
            document,
            library.may_name(kind),
        ]

    def decode_object(self, node: list[Node]) -> Any:
        tag = node[0]
        if tag == "O":
            return self.objects[node[1]]
        if tag == "L":
            return getattr(__import__(node[1], fromlist=["*"]), node[2])
        if tag == "f":
            return self.their_function(*node[1:])
        if tag == "K":
            return self.their_class(*node[1:])
        if tag == "I":
            return self.decode_shared(self.their_classes[self.decode(node[3])], node[:3])
        if tag == "U":
            return self.remember(node[1], collections.namedtuple(node[2], node[3]))
        if tag == "u":
            return tuple.__new__(self.decode(node[1]), self.decode_items(node[2]))
        if tag == "m":
            return self.theirs.get(node[1]) or self.remember(node[1], Mocked(self, node[1]))
        if tag == "e":
            return self.their_error(*node[1:])
        raise Unreadable("an unknown tag")

    # --- the tests' objects

    def remember(self, number: int, value: Any) -> Any:
        self.theirs[number], self.their_number[id(value)] = value, number
        return value

    def their_function(self, number: int, name: str, later: bool) -> Any:
        if number in self.theirs:
            return self.theirs[number]

        def function(*args: Any, **kwargs: Any) -> Any:
            return self.call_back(number, args, kwargs)

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return self.call_back(number, args, kwargs)

        made = coroutine if later else function
        made.__name__ = made.__qualname__ = name
        return self.remember(number, made)

    def their_class(self, number: int, name: str, bases: list[Node], methods: list[Any], values: list[Any]) -> Any:
        """A class of the tests: its instances live here too, its methods run there."""
        if number in self.theirs:
            return self.theirs[number]
        body: dict[str, Any] = {key: self.method(number, key, style) for key, style in methods}
        made = type(name, tuple(map(self.decode, bases)) or (object,), body)
        made.__module__ = "__main__"
        self.remember(number, made)
        for key, value in values:
            setattr(made, key, self.decode(value))
        if not issubclass(made, BaseException):
            self.their_classes[made] = instances(made)
        return made

    def method(self, number: int, name: str, style: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            return self.call_back([number, name], args, kwargs)

        method.__name__ = name
        return staticmethod(method) if style == "s" else property(method) if style == "p" else method

    def their_error(self, number: int, kind: Node, args: Node) -> Any:
        if number in self.theirs:
            return self.theirs[number]
        made = self.decode(kind)
        error = made.__new__(made, *self.decode_items(args))
        error.args = tuple(error.args)
        return self.remember(number, error)

    def call_back(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changes = self.changes()
        nodes = [self.encode(args), self.encode(tuple(kwargs.items()))]
        del args, kwargs
        message = [target, changes, nodes, self.forget_unheld()]
        protocol.send(self.channel, protocol.Kind.CALLBACK, protocol.dump(message))
        while True:
            kind, body = protocol.receive(self.channel)
            if kind is protocol.Kind.RETURN:
                break
            self.answer(protocol.parse(body))  # the function uses the program in turn
        good, changes, node, forgotten = protocol.parse(body)
        self.take_changes(changes)
        value = self.decode(node)
        self.forget(forgotten)
        if good:
            return value
        raise value


class Mocked:
    """A mock object of the tests."""

    def __init__(self, side: Asked, number: int) -> None:
        self.__dict__.update(_side=side, _number=number)

    def __getattr__(self, name: str) -> Any:
        return self._side.call_back([self._number, name], (), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._side.call_back(self._number, args, kwargs)


FLOWS = {types.GeneratorType: "g", types.CoroutineType: "y", types.AsyncGeneratorType: "Y"}
_OPERATORS = """
add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift neg pos invert eq ne lt le gt ge getitem setitem
delitem contains index iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift
"""
OPERATORS = _OPERATORS.split()
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda f, args, kwargs: f(*args, **dict(kwargs)),
    "close": lambda g: g.close(),
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, kind, error: bool(type(value).__exit__(value, kind, error, None)),
    "aiter": lambda value: type(value).__aiter__(value),
    "format": format,
    "vars": lambda value: dict(vars(value)),
    "source": inspect.getsource,
    "subclass": lambda name, bases, body: type(bases[0])(name, bases, dict(body)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "bytes": bytes,
    "floor": lambda value: type(value).__floor__(value),
    "ceil": lambda value: type(value).__ceil__(value),
    "trunc": lambda value: type(value).__trunc__(value),
    **{f.__name__: f for f in (getattr, setattr, delattr, len, iter, str, repr, bool, int, float, complex)},
    **{f.__name__: f for f in (abs, round, reversed, dir, divmod, hash)},
    **{name: getattr(operator, name) for name in OPERATORS},
}
OWN_OPERATIONS: dict[str, Callable[..., Any]] = {
    "name": Asked.name,
    "next": lambda asked, iterator: asked.step(lambda: next(iterator)),
    "send": lambda asked, generator, value: asked.step(lambda: generator.send(value)),
    "throw": lambda asked, generator, error: asked.step(lambda: generator.throw(error)),
    "await": Asked.wait_for,
    "anext": Asked.async_item,
    "aenter": lambda asked, value: asked.wait_for(type(value).__aenter__(value)),
    "aexit": lambda asked, value, kind, error: asked.wait_for(type(value).__aexit__(value, kind, error, None)),
    "signature": Asked.signature,
}
"""Made once, before the fork: every object that a child makes or touches is a page that it copies."""
