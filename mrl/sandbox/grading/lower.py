"""One expression of a test, with its calls of the program taken out: `assert f(2) == 4` becomes `answer(0) == 4`.

What is left is evaluated here, on plain data, so it may only be made of literals, comparisons, arithmetic and the
functions of `trusted`. Everything else raises NotRewritable, and the test runs in a sandboxed process of its own.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from mrl.sandbox.execution import Call
from mrl.sandbox.grading.compare import is_plain
from mrl.sandbox.grading.compose import call_path, composed, is_builtin, iterated
from mrl.sandbox.grading.expressions import ANSWER, OPERATE, Expressions
from mrl.sandbox.grading.scope import NotRewritable, Scope, Trusted
from mrl.sandbox.grading.trusted import FUNCTIONS, KEYWORDS, METHODS, MODULES, operate

ITERATING = set("list tuple set frozenset sorted sum max min any all enumerate dict zip".split())  # noqa: SIM905


@dataclass(slots=True)
class Lowered:
    """An expression to be evaluated here."""

    node: ast.expr
    values: dict[str, Any]
    holes: list[int]


def lower(node: ast.expr, scope: Scope) -> Lowered:
    """Raises NotRewritable. Calls found are appended to `scope.calls`."""
    lowering = _Lowering(scope)
    return Lowered(lowering.expr(node), lowering.values, lowering.holes)


def literal(node: ast.expr, scope: Scope) -> Any:
    """The plain value of an expression without calls of the program. Raises NotRewritable."""
    count = len(scope.calls)
    lowered = lower(node, scope)
    if lowered.holes or len(scope.calls) != count:
        del scope.calls[count:]
        raise NotRewritable("an argument that depends on the program")
    try:
        value = evaluate(compile_expression(lowered.node), lowered.values, None)
    except Exception as error:
        raise NotRewritable(f"{type(error).__name__} in a literal") from None
    if type(value) in (range, map, zip, filter, enumerate, reversed):
        raise NotRewritable("an argument that is no plain data")
    if not is_plain(value):
        raise NotRewritable(f"a {type(value).__name__} as argument")
    return value


def compile_expression(node: ast.expr) -> Any:
    return compile(ast.fix_missing_locations(ast.Expression(node)), "<test>", "eval")


def evaluate(code: Any, values: dict[str, Any], answer: Any) -> Any:
    """Run a lowered expression. answer: from a call's index to its value."""
    return eval(code, {"__builtins__": {}, ANSWER: answer, OPERATE: operate, **values})  # made by `lower` only


class _Lowering(Expressions):
    """Calls: of builtins, of methods of data, and of the program."""

    def _call(self, node: ast.Call) -> ast.expr:
        function = node.func
        if isinstance(function, ast.Name) and is_builtin(function.id, self.scope):
            return self._builtin(function.id, node)
        if isinstance(function, ast.Name):
            meaning = self.scope.names.get(function.id)
            if isinstance(meaning, Trusted) and meaning.attribute:
                return self._apply(self._trusted(MODULES[meaning.module], meaning.attribute), node)
        if isinstance(function, ast.Attribute):
            module = self._module(function.value)
            if module:
                return self._apply(self._trusted(MODULES[module], function.attr), node)
        path = call_path(function, self.scope)
        if path is None:
            return self._method(node)
        return self._ask(path, node)

    def _builtin(self, name: str, node: ast.Call) -> ast.expr:
        function = self._trusted(FUNCTIONS, name)  # also refuses the builtins that are not among them
        if name == "isinstance":
            if len(node.args) != 2 or node.keywords:
                raise NotRewritable("isinstance with other arguments")
            return ast.Call(function, [self.expr(node.args[0]), self._types(node.args[1])], [])
        if name == "type" and (len(node.args) != 1 or node.keywords):
            raise NotRewritable("type() with other arguments")
        if self.bound and name == "range":
            raise NotRewritable("a range inside a loop")
        if name in ("map", "filter") and len(node.args) == 2:
            return ast.Call(function, [self._function(node.args[0]), self._iterated(node.args[1])], [])
        if name in ITERATING and node.args:
            rest = [self.expr(argument) for argument in node.args[1:]]
            return ast.Call(function, [self._iterated(node.args[0]), *rest], self._keywords(node))
        return self._apply(function, node)

    def _iterated(self, node: ast.expr) -> ast.expr:
        lowered = self.expr(node)
        if is_hole(lowered):
            self.scope.calls[self.holes[-1]] = iterated(self.scope.calls[self.holes[-1]])
        return lowered

    def _apply(self, function: ast.expr, node: ast.Call) -> ast.expr:
        return ast.Call(function, [self.expr(argument) for argument in node.args], self._keywords(node))

    def _keywords(self, node: ast.Call) -> list[ast.keyword]:
        keywords = []
        for keyword in node.keywords:
            if keyword.arg not in KEYWORDS:
                raise NotRewritable(f"the argument {keyword.arg}")
            value = self._function(keyword.value) if keyword.arg == "key" else self.expr(keyword.value)
            keywords.append(ast.keyword(keyword.arg, value))
        return keywords

    def _function(self, node: ast.expr) -> ast.expr:
        """A function as an argument: a builtin, None, or a lambda of one element."""
        unsafe = ("type", "isinstance", "range")
        if isinstance(node, ast.Name) and is_builtin(node.id, self.scope) and node.id not in unsafe:
            return self._trusted(FUNCTIONS, node.id)
        if isinstance(node, ast.Constant) and node.value is None:
            return node
        if isinstance(node, ast.Lambda) and len(node.args.args) == 1 and not node.args.defaults:
            holes, outer = len(self.holes), len(self.bound)
            self.bound.append(node.args.args[0].arg)
            body = self.expr(node.body)
            del self.bound[outer:]
            if len(self.holes) == holes:
                return ast.Lambda(node.args, body)
        raise NotRewritable("a function as argument")

    def _method(self, node: ast.Call) -> ast.expr:
        """A method of a value: its name is a known one, and its arguments are the test's own data."""
        function = node.func
        if not isinstance(function, ast.Attribute):
            raise NotRewritable("a call of something computed")
        if function.attr == "join" and len(node.args) == 1 and isinstance(function.value, ast.Constant):
            return ast.Call(ast.Attribute(function.value, "join", ast.Load()), [self.expr(node.args[0])], [])
        if function.attr not in METHODS or node.keywords or any(map(self._mentions_bound, node.args)):
            raise NotRewritable(f"the method {function.attr!r}")
        receiver, holes = self.expr(function.value), len(self.holes)
        arguments = [self.expr(argument) for argument in node.args]
        if len(self.holes) != holes:
            raise NotRewritable(f"the method {function.attr!r} of an answer with another one")
        return ast.Call(ast.Attribute(receiver, function.attr, ast.Load()), arguments, [])

    def _ask(self, path: str, node: ast.Call) -> ast.expr:
        if self.bound and any(map(self._mentions_bound, node.args)):
            raise NotRewritable("a call of the program inside a loop")
        try:
            call = Call(path, *self._arguments(node))
        except NotRewritable:
            call = Call(f"(lambda: {composed(node, self.scope)})")
        return self._add(call)

    def _arguments(self, node: ast.Call) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        arguments: list[Any] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                arguments += literal(argument.value, self.scope)
            else:
                arguments.append(literal(argument, self.scope))
        if any(keyword.arg is None for keyword in node.keywords):
            raise NotRewritable("** in a call")
        return tuple(arguments), tuple((str(k.arg), literal(k.value, self.scope)) for k in node.keywords)


def is_hole(node: ast.expr) -> bool:
    """Whether a lowered expression is nothing but an answer."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == ANSWER
