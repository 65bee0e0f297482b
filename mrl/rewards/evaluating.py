"""Expressions in answers are read, never run.

sympy reads an expression by having Python evaluate it, which can be made to do anything; a verifier does that in the
process that then says what the answer is worth. So, before an answer is looked at, that process gives up running text
as Python. What remains is an expression of numbers, symbols and functions, checked as a tree before it is evaluated.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Mapping
from types import CodeType
from typing import Any

MAKERS = ("Symbol", "Function", "Integer", "Float", "Rational")
"""What sympy's reader writes around names and numbers: only these are given text."""
BUILTINS = ("abs", "pow", "round")
DEFINERS = ("collections", "dataclasses", "importlib._bootstrap", "_frozen_importlib")
"""Modules that run code of their own making: for a named tuple, a data class, a module that is imported late."""
_NODES = (
    *(ast.Expression, ast.Load, ast.Name, ast.Call, ast.keyword, ast.Constant, ast.Tuple, ast.List),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_approved: list[CodeType] = []


class NotAnExpression(ValueError):
    """Text that does more than compute a value."""


def evaluate(text: str, names: Mapping[str, Any] | None = None) -> Any:
    """The value of an expression. names: what it may use, where `is_harmless` says so. Raises NotAnExpression, and
    whatever computing raises."""
    tree = _parse(text)
    _check(tree, names or {})
    return _run(compile(tree, "<answer>", "eval"), dict(names or {}))


def close_sympy() -> None:
    """Have sympy's reader evaluate nothing but expressions that were checked. Once is enough; in every process that
    is forked afterwards too."""
    from sympy.parsing import sympy_parser

    home = vars(sympy_parser)
    write = home["stringify_expr"]
    if getattr(write, "checks", False):
        return

    @functools.wraps(write)
    def checked(text: str, local_dict: Any, global_dict: Any, transformations: Any) -> str:
        code: str = write(text, local_dict, global_dict, transformations)
        _check(_parse(code), {**global_dict, **local_dict})
        return code

    checked.checks = True  # type: ignore[attr-defined]
    home["stringify_expr"] = checked
    home["eval"] = lambda code, names, more: _run(
        compile(_parse(code), "<answer>", "eval") if isinstance(code, str) else code, names, more
    )
    home["exec"] = lambda _, names: names.update(_everything())  # `from sympy import *`, its only use there


def close_interpreter() -> None:
    """From here on, and for good, this process runs no text as Python but checked expressions: `eval`, `exec` and
    unpickling raise NotAnExpression, whoever calls them."""
    sys.addaudithook(_refuse)


def is_harmless(name: str, value: Any) -> bool:
    """Whether an expression may use it: a number, a symbol, a function of numbers, and what sympy writes them with.

    Not what computes for the answer (`integrate`, `solve`, `simplify`, an unevaluated `Integral`), nor what reads text.
    """
    import sympy
    from sympy.core.function import Application
    from sympy.core.relational import Relational

    if isinstance(value, type):
        kinds = (Application, Relational, sympy.Number, sympy.Symbol, sympy.Add, sympy.Mul, sympy.Pow)
        return issubclass(value, kinds)
    if isinstance(value, sympy.Basic):
        return True
    return value in (sympy.sqrt, sympy.cbrt, sympy.root) or (name in BUILTINS and value in (abs, pow, round))


@functools.cache
def _everything() -> dict[str, Any]:
    import sympy

    return {name: vars(sympy)[name] for name in sympy.__all__}


def _parse(text: str) -> ast.Expression:
    return ast.parse(text.strip(), mode="eval")


def _check(tree: ast.Expression, names: Mapping[str, Any]) -> None:
    texts = set()  # constants that stand where a name or number is made of text
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise NotAnExpression(f"{type(node).__name__} is no part of an expression")
        if isinstance(node, ast.Name) and not (node.id in names and is_harmless(node.id, names[node.id])):
            raise NotAnExpression(f"{node.id!r} is not for answers")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
            texts |= {id(argument) for argument in node.args}
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in texts:
            raise NotAnExpression("text is no part of an expression")


def _run(code: CodeType, *names: dict[str, Any]) -> Any:
    names[0]["__builtins__"] = {}
    _approved.append(code)
    try:
        return eval(code, *names)
    finally:
        _approved.pop()


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event == "exec":
        code, caller = args[0], sys._getframe(1).f_globals.get("__name__")
        if any(code is approved for approved in _approved) or caller in DEFINERS:
            return
    elif event not in ("pickle.find_class", "code.__new__"):
        return
    raise NotAnExpression(f"{event}: an answer is read, not run")
