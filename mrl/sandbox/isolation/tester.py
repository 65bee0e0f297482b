"""The trusted tests, in a process of their own: run one after another, say what became of each.

Only this process holds the channel on which verdicts travel. It is confined like the program's, for what the tests do
with the program's data may take any time and memory.

A name of a test means, in this order: what the tests define; Python's builtins; one of LENT, or something in it, that
the program imports at its top level (imported here, not taken from there); the program's own.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
import types
from typing import Any

from .. import plain
from . import child, frames
from .remote import Gone, Link, Remote

_LENT = """
abc array asyncio base64 bisect calendar cmath collections copy csv dataclasses datetime decimal enum fractions
functools hashlib heapq io itertools json math numbers operator os random re statistics string struct sys textwrap
time typing unicodedata
"""
LENT = frozenset(_LENT.split())
"""Modules of the standard library in which nothing equals what it is not. The program chooses what it imports and under
which name: `from unittest.mock import _ANY as f` must not become this process's own `f`."""


class Names(dict[str, Any]):
    """The tests' globals. A name nobody here knows is asked of the program."""

    link: Link
    imports: dict[str, tuple[str, str]]

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        if name in self.imports:
            module, attribute = self.imports[name]
            value = importlib.import_module(module)
            self[name] = getattr(value, attribute) if attribute else value
            return self[name]
        value = self.link.ask("name", name)
        if type(value) is Remote:
            kinds = self.link.ask("kind", value)
            if kinds:
                try:
                    return self.link.exception_class(kinds)
                except (ValueError, TypeError) as problem:
                    raise Gone(f"the program sent what cannot be read: {problem}") from None
        return value


def run_tests(plan: dict[str, Any], channel: int) -> None:
    """Never returns. plan: the program's `code`, read for its imports only, and the tests' `blocks`."""
    link = Link(channel)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    names = Names(__name__="__main__", __builtins__=builtins)
    names.link, names.imports = link, standard_imports(plan["code"])
    for block in plan["blocks"]:
        try:
            exec(compile(block, "<test>", "exec", 0, True), names)
            outcome: list[Any] = []
        except Gone as error:
            frames.write(channel, frames.pack(b"Z", str(error).encode("ascii", "backslashreplace")))
            os._exit(0)
        except frames.Closed:
            os._exit(0)
        except BaseException as error:
            bases = [plain.type_name_of(kind) for kind in type.mro(type(error))][:20]
            outcome = [bases, describe(error, block)]
        frames.write(channel, frames.pack(b"B", json.dumps(outcome).encode()))
    frames.write(channel, frames.pack(b"D"))
    os._exit(0)


def standard_imports(code: str) -> dict[str, tuple[str, str]]:
    """Name -> module and attribute, of what the program imports of LENT at its top level."""
    found: dict[str, tuple[str, str]] = {}
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    for node in body:
        if isinstance(node, ast.Import):
            for item in node.names:
                root = item.name.partition(".")[0]
                if root in LENT:
                    found[item.asname or root] = (item.name if item.asname else root, "")
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.partition(".")[0] in LENT:
                found.update({item.asname or item.name: (module, item.name) for item in node.names})
    return found


def describe(error: BaseException, block: str) -> str:
    """As the program's own errors are described, with the line of the test."""
    text = child.describe_error(error, "").decode("ascii")
    trace, number = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<test>":
            number = trace.tb_lineno
        trace = trace.tb_next
    if number is not None:
        lines = block.splitlines()
        text += f"\ntest line {number}: {lines[number - 1].strip()[:300] if 0 < number <= len(lines) else ''}"
    return text
