"""From the text of tests to calls of the program and conditions on what it answers.

Names get literals or answers, `check(candidate)` and loops over literals are unrolled, and what is asserted becomes a
condition. A test with anything else in it is not rewritten; it runs as it is, in a sandboxed process of its own.

Arguments cross by value. A list handed to a call for its effect (a statement of its own) comes back as an answer.
"""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass, field
from typing import Any

from mrl.sandbox.execution import Call
from mrl.sandbox.grading.scope import Hole, Literal, NotRewritable, Scope, Tainted
from mrl.sandbox.grading.walk import Step, Walker, is_mutable


@dataclass(slots=True)
class RewrittenTest:
    """What one test became: its calls are `first` up to, not including, `end` of the program's calls."""

    steps: list[Step] | None
    """None: it runs as it is, for `reason`."""
    reason: str = ""
    first: int = 0
    end: int = 0


@dataclass(slots=True)
class Rewritten:
    """All tests of a program, in order."""

    tests: list[RewrittenTest]
    calls: list[Call] = field(default_factory=list)


def rewrite(code: str, tests: list[str]) -> Rewritten:
    """Tests share names, as they would share a process: one may use what an earlier one assigned."""
    scope = program_scope(code)
    return Rewritten([_rewrite_test(text, scope) for text in tests], scope.calls)


def program_scope(code: str) -> Scope:
    """What can be known of the program without running it. One that cannot be parsed binds nothing."""
    tree = _parse(code)
    names: set[str] = set()
    methods: set[str] = set()
    for node in tree.body if tree else []:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        if isinstance(node, ast.ClassDef) and node.name == "Solution":
            methods |= {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return Scope(frozenset(names), frozenset(methods))


def _rewrite_test(text: str, scope: Scope) -> RewrittenTest:
    tree = _parse(text)
    if tree is None:
        return RewrittenTest(None, "not Python")
    first, names, lent = len(scope.calls), dict(scope.names), set(scope.lent)
    reason = ""
    try:
        steps = Walker(scope).run(tree.body)
        return RewrittenTest(steps, "", first, len(scope.calls))
    except NotRewritable as error:
        reason = str(error)
    except RecursionError:
        reason = "too deeply nested"
    del scope.calls[first:]
    scope.names, scope.lent = names | {name: Tainted() for name in _touched(tree, names)}, lent
    return RewrittenTest(None, reason)


def _touched(tree: ast.Module, names: dict[str, Any]) -> set[str]:
    """Names that a test which runs elsewhere may have bound or changed."""
    touched = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            touched.add(node.name)
        elif isinstance(node, ast.alias):
            touched.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name):
            value = names.get(node.id)
            mutable = isinstance(value, Hole) or (isinstance(value, Literal) and is_mutable(value.value))
            if isinstance(node.ctx, ast.Store) or mutable:
                touched.add(node.id)
    return touched


def _parse(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
