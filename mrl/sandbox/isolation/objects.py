"""The program's side of proxied tests: its objects stay here, under numbers; operations on them are asked from outside.

Runs in the program's process and is in its hands. The tester believes it only data, and never asks it to compare an
object with an expected value (see `tester`).
"""

from __future__ import annotations

import builtins
import itertools
import json
import operator
from collections.abc import Callable
from typing import Any

from .. import plain
from . import child, frames

BASES = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)


def run_objects(code: str, channel: int) -> None:
    """Never returns."""
    names = child.new_main()
    child.load_or_leave(code, names, channel)
    Objects(names, channel, code).serve()


class Objects:
    """Number -> object. Nothing is forgotten: the process is short-lived."""

    def __init__(self, names: dict[str, Any], channel: int, code: str) -> None:
        self.names, self.channel, self.code = names, channel, code
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.operations: dict[str, Callable[..., Any]] = {
            "name": self.name,
            "kind": self.kind,
            "call": lambda f, args, kwargs: f(*args, **kwargs),
            "next": self.next_items,
            "base": self.base,
            "isinstance": lambda value, kind: isinstance(value, kind),
            "same_type": lambda value, kind: type(value) is kind,
            "enter": lambda value: type(value).__enter__(value),
            "exit": lambda value: (type(value).__exit__(value, None, None, None), None)[1],
            "await": self.wait_for,
            "format": format,
            **{f.__name__: f for f in (getattr, setattr, delattr, len, iter, str, repr, bool, int, float, complex)},
            **{f.__name__: f for f in (abs, round, reversed, issubclass, dir, divmod, hash, callable)},
            **{name: getattr(operator, name) for name in OPERATORS},
        }

    def serve(self) -> None:
        while True:
            self.answer(json.loads(frames.read(self.channel)[1]))

    def answer(self, request: dict[str, Any]) -> None:
        token = request["id"].encode()
        given: list[Any] = []
        try:
            given = [plain.loads(text, self.restore) for text in request["args"]]
            result = self.operations[request["op"]](*given)
            body = json.dumps([plain.dumps(result, self.keep), self.changed(request["args"], given)])
            message = frames.pack(b"V", token + body.encode())
        except BaseException as error:
            kinds = self.exception_kinds(type(error))
            detail = child.describe_error(error, self.code).decode("ascii")
            body = json.dumps([kinds, detail, self.changed(request["args"], given)])
            message = frames.pack(b"X", token + body.encode())
        child.flush()
        frames.write(self.channel, message)

    def changed(self, before: list[str], given: list[Any]) -> list[list[Any]]:
        """The arguments of a call that the program changed in place: position, new text."""
        if len(given) != 3 or type(given[1]) is not list:
            return []
        out = []
        old = plain.loads(before[1], self.restore)
        for at, (was, now) in enumerate(zip(old, given[1], strict=True)):
            if type(now) in (list, dict, set):
                text = plain.dumps(now, self.keep)
                if text != plain.dumps(was, self.keep):
                    out.append([at, text])
        return out

    def name(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        raise NameError(f"name {name!r} is not defined")

    def kind(self, value: Any) -> Any:
        """An exception class and its bases, or None."""
        if isinstance(value, type) and issubclass(value, BaseException):
            return self.exception_kinds(value)
        return None

    def exception_kinds(self, kind: type) -> list[list[Any]]:
        """Number (-1 for a builtin one) and name of the class and of its bases."""
        chain: list[Any] = [base for base in type.mro(kind) if issubclass(base, BaseException)][:20]
        own: list[list[Any]] = [
            [-1 if getattr(builtins, base.__name__, None) is base else self.number(base), base] for base in chain
        ]
        return [[number, plain.type_name_of(base)] for number, base in own]

    def next_items(self, iterator: Any) -> list[Any]:
        """One item: reading ahead would show in what the program prints or counts."""
        return list(itertools.islice(iterator, 1))

    def base(self, value: Any) -> Any:
        """The plain data under an instance of a subclass of a builtin type, read by that type's own methods."""
        kind: Any
        for kind in BASES:
            if isinstance(value, kind) and kind in type.mro(type(value)):
                if kind in (int, float, complex):
                    return [kind.__pos__(value)]
                if kind in (str, bytes):
                    return [kind.__add__(value, kind())]
                return [kind(dict.items(value)) if kind is dict else kind(kind.__iter__(value))]
        return []

    def wait_for(self, value: Any) -> Any:
        import asyncio

        async def outer() -> Any:
            return await value

        return asyncio.run(outer())

    def keep(self, value: Any) -> plain.Opaque:
        return plain.Opaque(plain.type_name(value), f"#{self.number(value)}")

    def number(self, value: Any) -> int:
        found = self.numbers.get(id(value))
        if found is None:
            found = self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return found

    def restore(self, opaque: plain.Opaque) -> Any:
        number = int(opaque.reason[1:])
        return self.objects[number] if opaque.reason[0] == "#" else Callback(self, number)


_OPERATORS = """
add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift neg pos invert eq ne lt le gt ge getitem setitem
delitem iadd isub imul contains index
"""
OPERATORS = _OPERATORS.split()


class Callback:
    """A function of the tests, called by the program."""

    def __init__(self, owner: Objects, number: int) -> None:
        self._owner, self._number = owner, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner
        texts = [plain.dumps(value, owner.keep) for value in (list(args), kwargs)]
        frames.write(owner.channel, frames.pack(b"K", json.dumps([self._number, *texts]).encode()))
        while True:
            kind, body = frames.read(owner.channel)
            if kind == b"l":
                break
            owner.answer(json.loads(body))  # the function uses the program in turn
        good, text = json.loads(body)
        if good:
            return plain.loads(text, owner.restore)
        name, detail = plain.loads(text)
        kind_ = getattr(builtins, name, None)
        raise (kind_ if isinstance(kind_, type) and issubclass(kind_, Exception) else RuntimeError)(detail)
