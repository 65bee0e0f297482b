"""Tests, made to say more: what a failed comparison was given, and whether a loop had anything to loop over."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator
from typing import Any

SEEN, LOOP, EACH = "__mrl_seen", "__mrl_loop", "__mrl_each"


def instrumented(tree: ast.Module) -> ast.Module:
    """The same test, with calls of the three names in it."""
    return ast.fix_missing_locations(_Instrument().visit(tree))


def helpers(watch: Watch) -> dict[str, Callable[..., Any]]:
    """What the three names mean."""
    return {SEEN: watch.seen, LOOP: watch.loop, EACH: watch.each}


class Watch:
    """What was noticed while one test ran."""

    def __init__(self, emptied: dict[int, Any]) -> None:
        """emptied: containers of the tests that the program left empty, by their ids."""
        self.emptied = emptied
        self.reset()

    def reset(self) -> None:
        self.got: list[Any] = []
        self.nothing: list[int] = []
        """Lines of loops with assertions that had nothing to loop over."""

    def seen(self, value: Any) -> Any:
        self.got[:] = [value]
        return value

    def loop(self, items: Iterable[Any], line: int) -> Iterator[Any]:
        some = False
        for item in items:
            some = True
            yield item
        if not some:
            self.nothing.append(line)

    def each(self, value: Any) -> Any:
        if id(value) in self.emptied and not len(value):
            raise AssertionError("the test would loop over nothing: the program emptied what it loops over")
        return value


class _Instrument(ast.NodeTransformer):
    def __init__(self) -> None:
        self.asserting = 0

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.asserting += 1
        self.generic_visit(node)
        self.asserting -= 1
        test = node.test
        if isinstance(test, ast.Compare):
            test.left = _call(SEEN, test.left)
        elif not isinstance(test, ast.BoolOp | ast.UnaryOp | ast.Constant):
            node.test = _call(SEEN, test)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        asserts = any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
        self.generic_visit(node)
        node.iter = _names_watched(node.iter)
        if asserts:
            node.iter = _call(LOOP, node.iter, ast.Constant(node.lineno))
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        line = getattr(node.iter, "lineno", 0)
        node.iter = _names_watched(node.iter)
        if self.asserting and not node.is_async:
            node.iter = _call(LOOP, node.iter, ast.Constant(line))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("all", "any"):
            node.args = [
                argument if isinstance(argument, ast.GeneratorExp | ast.ListComp) else _names_watched(argument)
                for argument in node.args
            ]
        return node


class _Watched(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return _call(EACH, node) if isinstance(node.ctx, ast.Load) and not hasattr(builtins, node.id) else node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == EACH:
            return node
        node.args = [self.visit(argument) for argument in node.args]
        return node

    visit_GeneratorExp = visit_ListComp = visit_SetComp = visit_DictComp = visit_Lambda  # type: ignore[assignment]


def _names_watched(node: ast.expr) -> Any:
    return _Watched().visit(node)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    made = ast.Call(ast.Name(name, ast.Load()), list(arguments), [])
    return ast.copy_location(made, arguments[0])
