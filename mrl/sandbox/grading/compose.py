"""What a test says of the program, as text that is evaluated on the program's side.

All of it is in the program's hands there, so nothing of an expectation may be in it: only what is called and with what.
"""

from __future__ import annotations

import ast
import builtins
import copy
import sys
from dataclasses import replace
from typing import Any

from mrl.sandbox.execution import Call
from mrl.sandbox.grading.scope import Literal, NotRewritable, Path, Scope, Trusted
from mrl.sandbox.grading.trusted import MODULES

LIBRARIES = (sys.stdlib_module_names | {"np", "numpy", "pd", "pandas", "torch", "scipy", "sympy", "plt"}) - {"this"}
_ITERATED = (
    "(lambda *a, **k: (lambda r: r if type(r) in (list, tuple, set, frozenset, dict, str, bytes)"
    " or not hasattr(r, '__iter__') else [*r])(("
)


def is_builtin(name: str, scope: Scope) -> bool:
    """Whether a name of a test is Python's own. A program that rebinds `abs` must not answer for it in
    `abs(f(1) - 2) < 0.1`; in `assert abs(-1) == 1` alone it is what is tested."""
    if name in scope.names or not hasattr(builtins, name):
        return False
    return not (scope.shadowed and name in scope.program)


def call_path(node: ast.expr, scope: Scope) -> str | None:
    """The dotted path of something of the program, e.g. `f`, `obj.f` or `Solution().f`; None when it is none."""
    if isinstance(node, ast.Name):
        meaning = scope.names.get(node.id)
        if isinstance(meaning, Path):
            return meaning.text
        if meaning is not None or node.id in MODULES or is_builtin(node.id, scope):
            return None
        if node.id not in scope.program and node.id in scope.methods:
            return f"Solution().{node.id}"
        return node.id
    if isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
        if isinstance(node.value, ast.Name) and node.value.id in LIBRARIES and node.value.id not in scope.names:
            return None  # a library's function must not be taken from the program
        parent = call_path(node.value, scope)
        return None if parent is None else f"{parent}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        if name in scope.names or not name[:1].isupper():
            return None
        try:
            return composed(node, scope)
        except NotRewritable:
            return None
    return None


def composed(node: ast.Call, scope: Scope) -> str:
    """A call whose arguments are not plain data (an object, a function, another call's result), as text that is
    evaluated by the program's side altogether. It may hold anything but what the tests themselves define or were
    answered. Raises NotRewritable."""
    return ast.unparse(_Composer(scope).visit(copy.deepcopy(node)))


class _Composer(ast.NodeTransformer):
    """Puts the tests' literals in the place of their names."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.own: set[str] = set()

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            raise NotRewritable(type(node).__name__)
        return super().generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.own |= {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        return self.generic_visit(node)

    def visit_ListComp(self, node: Any) -> ast.AST:
        for generator in node.generators:
            self.own |= {name.id for name in ast.walk(generator.target) if isinstance(name, ast.Name)}
        return self.generic_visit(node)

    visit_GeneratorExp = visit_SetComp = visit_DictComp = visit_ListComp

    def visit_Name(self, node: ast.Name) -> ast.AST:
        meaning = self.scope.names.get(node.id)
        if node.id in self.own or meaning is None:
            if meaning is None and node.id in MODULES:
                return ast.parse(f"__import__({node.id!r})", mode="eval").body
            if meaning is None and node.id in LIBRARIES and node.id not in self.scope.program:
                raise NotRewritable(f"the library {node.id}")
            return node
        if node.id in self.scope.lent:
            raise NotRewritable(f"{node.id!r} after the program had it")
        if isinstance(meaning, Literal) and _finite(meaning.value):
            return ast.parse(repr(meaning.value), mode="eval").body
        if isinstance(meaning, Path):
            return ast.parse(meaning.text, mode="eval").body
        if isinstance(meaning, Trusted) and meaning.module in ("math", "collections"):
            dotted = f"__import__({meaning.module!r})" + (f".{meaning.attribute}" if meaning.attribute else "")
            return ast.parse(dotted, mode="eval").body
        raise NotRewritable(f"{node.id!r} in an argument")


def _finite(value: Any) -> bool:
    """Whether `repr` of plain data reads back as the same."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


def iterated(call: Call) -> Call:
    """The same call, whose result comes as a list where it is an iterator or another iterable that is no plain data."""
    if call.function.startswith(_ITERATED):
        return call
    return replace(call, function=f"{_ITERATED}{call.function})(*a, **k)))")


def arguments_after(call: Call) -> Call:
    """The same call, answering what has become of its positional arguments."""
    return replace(call, function=f"(lambda *a, **k: (({call.function})(*a, **k), a)[1])")
