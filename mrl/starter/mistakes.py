"""Plausible mistakes in a small program, made on its syntax tree.

They serve three ends: the careless demonstrations of the supervised phase, the choice of test cases (inputs are kept
because they tell a program from its mistaken versions), and the tests that check that choice.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, cast

Edit = Callable[[Any], object]
"""Changes a syntax node in place. Nodes are `Any` below: their fields differ by class, as do the edits."""

OPERATORS: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.FloorDiv: (ast.Mod,),
    ast.Mod: (ast.FloorDiv,),
}
BOUNDARIES: dict[type, type] = {ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Lt: ast.LtE, ast.LtE: ast.Lt}
DIRECTIONS: dict[type, type] = {
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
NAMES = {"max": "min", "min": "max", "sum": "len", "len": "sum", "all": "any", "any": "all", "upper": "lower"}


def mistakes(program: str) -> dict[str, list[str]]:
    """Every single-edit mistake of `program`, by kind of mistake; programs differ from `program` and from each other.

    Kinds: operator, boundary (`>` for `>=`), direction (`>` for `<`), off_by_one, name (`max` for `min`), drop (a step
    is forgotten), order (two steps or the two branches are swapped), no_return.
    """
    seen = {program}
    found: dict[str, list[str]] = {}
    for kind, edited in _edits(program):
        text = ast.unparse(edited) + "\n"
        if text not in seen:
            seen.add(text)
            found.setdefault(kind, []).append(text)
    return found


def _edits(program: str) -> Iterator[tuple[str, ast.Module]]:
    for index, node in enumerate(ast.walk(ast.parse(program))):
        for kind, change in _changes(node):
            # Parsing again is eight times faster than deep-copying the tree; ast.walk visits both in the same order.
            edited = ast.parse(program)
            change(next(islice(ast.walk(edited), index, None)))
            yield kind, edited


def _changes(node: Any) -> Iterator[tuple[str, Edit]]:
    """Pairs of (kind, function that edits a node like this one in place)."""
    if isinstance(node, ast.BinOp):
        for operator in OPERATORS.get(type(node.op), ()):
            yield "operator", partial(_set, "op", operator())
        yield "drop", lambda n: _become(n, n.left)
        if isinstance(node.op, ast.Sub):
            yield "order", _swap_operands
    elif isinstance(node, ast.Compare):
        for position, comparison in enumerate(node.ops):
            for kind, table in (("boundary", BOUNDARIES), ("direction", DIRECTIONS)):
                if type(comparison) in table:
                    yield kind, partial(_set_comparison, position, table[type(comparison)]())
    elif isinstance(node, ast.BoolOp):
        yield "operator", partial(_set, "op", ast.And() if isinstance(node.op, ast.Or) else ast.Or())
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "off_by_one", partial(_set, "value", node.value + 1)
        if node.value > 0:
            yield "off_by_one", partial(_set, "value", node.value - 1)
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield "name", partial(_set, "id", NAMES[node.id])
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield "name", partial(_set, "attr", NAMES[node.attr])
    elif isinstance(node, ast.Subscript):
        yield "drop", lambda n: _become(n, n.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield "drop", lambda n: _become(n, n.func.value)
        if len(node.args) == 2:
            yield "order", lambda n: n.args.reverse()
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield "drop", lambda n: n.ifs.clear()
    elif isinstance(node, ast.FunctionDef):
        yield from _changes_of_lines(node.body)


def _changes_of_lines(body: list[ast.stmt]) -> Iterator[tuple[str, Edit]]:
    for position, statement in enumerate(body[:-1]):
        if isinstance(statement, ast.Assign):
            yield "drop", partial(_drop_line, position)
        yield "order", partial(_swap_with_next_line, position)
    yield "no_return", _forget_return


def _set(field: str, value: object, node: ast.AST) -> None:
    setattr(node, field, value)


def _set_comparison(position: int, operator: ast.cmpop, node: ast.Compare) -> None:
    node.ops[position] = operator


def _drop_line(position: int, function: ast.FunctionDef) -> None:
    del function.body[position]


def _swap_with_next_line(position: int, function: ast.FunctionDef) -> None:
    """Swaps what two steps compute, or what the two branches return."""
    first, second = cast(list[Any], function.body[position : position + 2])
    if isinstance(first, ast.If):
        first = first.body[0]
    first.value, second.value = second.value, first.value


def _forget_return(function: ast.FunctionDef) -> None:
    last = function.body[-1]
    if isinstance(last, ast.Return) and last.value is not None:
        function.body[-1] = ast.Expr(last.value)


def _become(node: ast.AST, other: ast.AST) -> None:
    """`node` turns into `other` where it stands, whoever its parent is."""
    node.__class__ = other.__class__
    node.__dict__.clear()
    node.__dict__.update(other.__dict__)


def _swap_operands(node: ast.BinOp) -> None:
    node.left, node.right = node.right, node.left
