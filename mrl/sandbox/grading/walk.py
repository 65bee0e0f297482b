"""Follows the statements of a test, as Python would run them, with the program's answers left open."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from mrl.sandbox.execution import Call
from mrl.sandbox.grading.compose import arguments_after, call_path
from mrl.sandbox.grading.lower import compile_expression, is_hole, literal, lower
from mrl.sandbox.grading.scope import Hole, Literal, NotRewritable, Path, Scope, Trusted
from mrl.sandbox.grading.trusted import MODULES

MAX_STEPS, MAX_DEPTH = 2000, 8


@dataclass(frozen=True, slots=True)
class Holds:
    """An expression over answers and literals that must be true."""

    code: Any
    values: dict[str, Any]
    holes: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Returns:
    """A call whose answer is not looked at: it must not raise."""

    hole: int
    text: str


@dataclass(frozen=True, slots=True)
class Raises:
    """A call that must raise one of `types`; or, unless `required`, that may."""

    hole: int
    types: tuple[str, ...]
    required: bool
    text: str


Step = Holds | Returns | Raises


@dataclass(frozen=True, slots=True)
class _Function:
    """A function that the tests define, unrolled where it is called."""

    node: ast.FunctionDef


class Walker:
    """Runs a test's statements on names whose values are partly open."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.steps: list[Step] = []
        self.depth = 0

    def run(self, body: list[ast.stmt]) -> list[Step]:
        for node in body:
            self.statement(node)
        return self.steps

    def statement(self, node: ast.stmt) -> None:
        if len(self.steps) > MAX_STEPS:
            raise NotRewritable(f"more than {MAX_STEPS} steps")
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise NotRewritable(type(node).__name__)
        method(node)

    def _pass(self, node: ast.Pass) -> None:
        pass

    def _assert(self, node: ast.Assert) -> None:
        self.steps.append(self.condition(node.test))

    def condition(self, test: ast.expr) -> Holds:
        lowered = lower(test, self.scope)
        if not lowered.holes and self._mentions_program(test):
            self.scope.shadowed = True
            try:
                lowered = lower(test, self.scope)
            finally:
                self.scope.shadowed = False
        code, holes = compile_expression(lowered.node), tuple(lowered.holes)
        return Holds(code, lowered.values, holes, ast.unparse(test))

    def _mentions_program(self, node: ast.expr) -> bool:
        return any(isinstance(inner, ast.Name) and inner.id in self.scope.program for inner in ast.walk(node))

    def _assign(self, node: ast.Assign) -> None:
        targets, value = node.targets, node.value
        if len(targets) == 1 and isinstance(targets[0], ast.Tuple) and isinstance(value, ast.Tuple):
            if len(targets[0].elts) != len(value.elts):
                raise NotRewritable("unpacking that does not fit")
            meanings = [self._meaning(item) for item in value.elts]
            for target, meaning in zip(targets[0].elts, meanings, strict=True):
                self._bind_meaning([target], meaning)
        else:
            self._bind_meaning(targets, self._meaning(value))

    def _annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind_meaning([node.target], self._meaning(node.value))

    def _bind_meaning(self, targets: list[ast.expr], meaning: Any) -> None:
        for target in targets:
            if isinstance(target, ast.Name):
                self.bind(target.id, meaning)
            elif isinstance(meaning, Literal):
                self._unpack(target, meaning.value)
            else:
                raise NotRewritable("unpacking an answer")

    def _meaning(self, node: ast.expr) -> Any:
        path = call_path(node, self.scope) if isinstance(node, ast.Call) else None
        if path is not None:  # an object of the program, which stays there under a name of ours
            name = f"_object_{len(self.scope.calls)}"
            self.scope.calls.append(Call(f"(lambda: globals().__setitem__({name!r}, {path}))"))
            self.steps.append(Returns(len(self.scope.calls) - 1, ast.unparse(node)))
            return Path(name)
        if isinstance(node, ast.Name | ast.Attribute):
            path = call_path(node, self.scope)
            if path is not None:
                return Path(path)
        count = len(self.scope.calls)
        lowered = lower(node, self.scope)
        if not lowered.holes:
            return Literal(literal(node, self.scope))
        if len(lowered.holes) == 1 and len(self.scope.calls) == count + 1 and is_hole(lowered.node):
            self.steps.append(Returns(count, ast.unparse(node)))
            return Hole(count)
        raise NotRewritable("a value computed from answers")

    def bind(self, name: str, meaning: Any) -> None:
        self.scope.names[name] = meaning
        self.scope.lent.discard(name)

    def _unpack(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.bind(target.id, Literal(value))
            return
        if not isinstance(target, ast.Tuple | ast.List) or not isinstance(value, list | tuple | str):
            raise NotRewritable("an assignment to part of something")
        if len(target.elts) != len(value):
            raise NotRewritable("unpacking that does not fit")
        for inner, item in zip(target.elts, value, strict=True):
            self._unpack(inner, item)

    def _expr(self, node: ast.Expr) -> None:
        value = node.value
        if isinstance(value, ast.Constant):
            return
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            function = self.scope.names.get(value.func.id)
            if isinstance(function, _Function):
                self._inline(function.node, value)
                return
        index = self._single_call(value)
        self.steps.append(Returns(index, ast.unparse(value)))
        assert isinstance(value, ast.Call)
        self._changes(value, index)

    def _single_call(self, node: ast.expr) -> int:
        """The index of the one call of the program that the expression is."""
        count = len(self.scope.calls)
        lowered = lower(node, self.scope)
        if not is_hole(lowered.node) or len(self.scope.calls) != count + 1:
            raise NotRewritable("an expression that is no single call")
        return count

    def _changes(self, node: ast.Call, index: int) -> None:
        """A call for its effect: the lists, dicts and sets it was given mean what it has made of them."""
        given = {k: a.id for k, a in enumerate(node.args) if isinstance(a, ast.Name) and self._is_mutable(a.id)}
        others = {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and self._is_mutable(name.id)}
        self.scope.lent |= others - set(given.values())
        if not given:
            return
        if len(self.scope.calls[index].args) != len(node.args):  # composed, or with *arguments
            self.scope.lent |= set(given.values())
            return
        self.scope.calls[index] = arguments_after(self.scope.calls[index])
        for position, name in given.items():
            self.bind(name, Hole(index, position))

    def _is_mutable(self, name: str) -> bool:
        value = self.scope.names.get(name)
        return isinstance(value, Literal) and is_mutable(value.value)

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name not in MODULES:
                raise NotRewritable(f"import {alias.name}")
            self.bind(alias.asname or alias.name, Trusted(alias.name))

    def _importfrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if node.module == "typing":
                continue
            if node.level or node.module not in MODULES or alias.name not in MODULES[node.module]:
                raise NotRewritable(f"from {node.module} import {alias.name}")
            self.bind(alias.asname or alias.name, Trusted(node.module, alias.name))

    def _functiondef(self, node: ast.FunctionDef) -> None:
        arguments = node.args
        if node.decorator_list or arguments.defaults or arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
            raise NotRewritable("a function with defaults or decorators")
        self.bind(node.name, _Function(node))

    def _inline(self, function: ast.FunctionDef, call: ast.Call) -> None:
        """`check(f)`: the body, with its parameters bound. What it assigns stays its own."""
        parameters = [argument.arg for argument in function.args.posonlyargs + function.args.args]
        if call.keywords or len(call.args) != len(parameters) or self.depth >= MAX_DEPTH:
            raise NotRewritable(f"this call of {function.name}")
        outer = self.scope.names
        meanings = [self._meaning(argument) for argument in call.args]
        self.scope.names = dict(outer)
        for name, meaning in zip(parameters, meanings, strict=True):
            self.bind(name, meaning)
        self.depth += 1
        body = function.body
        if body and isinstance(body[-1], ast.Return) and _is_trivial(body[-1].value):
            body = body[:-1]
        self.run(body)
        self.depth -= 1
        self.scope.names = outer

    def _for(self, node: ast.For) -> None:
        if node.orelse or any(isinstance(inner, ast.Break | ast.Continue) for inner in ast.walk(node)):
            raise NotRewritable("a loop that may end early")
        items = literal(ast.Call(ast.Name("list", ast.Load()), [node.iter], []), self.scope)
        for item in items:
            self._unpack(node.target, item)
            self.run(node.body)

    def _try(self, node: ast.Try) -> None:
        """A call that must raise: `try: f(); assert False` with `except X: pass`, or with the failure under `else`."""
        if node.finalbody or not node.handlers or not node.body:
            raise NotRewritable("this try")
        call, *rest = node.body
        value = call.value if isinstance(call, ast.Expr | ast.Assign) else None
        if value is None or not all(_is_trivial_body(handler.body) and not handler.name for handler in node.handlers):
            raise NotRewritable("this try")
        if not all(map(_is_failure, rest + node.orelse)):
            raise NotRewritable("this try")
        types = tuple(name for handler in node.handlers for name in _exception_names(handler.type))
        swallowed = bool(rest) and any(name in ("AssertionError", "Exception", "BaseException") for name in types)
        required = bool(rest + node.orelse) and not (swallowed and not node.orelse)
        self.steps.append(Raises(self._single_call(value), types, required, ast.unparse(value)))

    def _with(self, node: ast.With) -> None:
        """`with pytest.raises(X): f()`."""
        (item, *others), (statement, *more) = node.items, node.body
        context = item.context_expr
        named = isinstance(context, ast.Call) and ast.unparse(context.func) in ("pytest.raises", "raises")
        if others or more or not named or item.optional_vars or not isinstance(statement, ast.Expr | ast.Assign):
            raise NotRewritable("this with")
        assert isinstance(context, ast.Call)
        if len(context.args) != 1 or context.keywords:
            raise NotRewritable("raises with other arguments")
        types = tuple(_exception_names(context.args[0]))
        self.steps.append(Raises(self._single_call(statement.value), types, True, ast.unparse(statement.value)))


def _exception_names(node: ast.expr | None) -> list[str]:
    if node is None:
        return ["BaseException"]
    if isinstance(node, ast.Tuple):
        return [name for item in node.elts for name in _exception_names(item)]
    if isinstance(node, ast.Name | ast.Attribute):
        return [ast.unparse(node)]
    raise NotRewritable("an exception type that is computed")


def _is_failure(node: ast.stmt) -> bool:
    """`assert False` or `raise AssertionError`."""
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and not node.test.value
    return isinstance(node, ast.Raise) and node.exc is not None and "AssertionError" in ast.unparse(node.exc)


def _is_trivial_body(body: list[ast.stmt]) -> bool:
    return all(isinstance(n, ast.Pass) or (isinstance(n, ast.Assert | ast.Expr) and _is_true(n)) for n in body)


def _is_true(node: ast.Assert | ast.Expr) -> bool:
    value = node.test if isinstance(node, ast.Assert) else node.value
    return isinstance(value, ast.Constant) and (isinstance(node, ast.Expr) or bool(value.value))


def _is_trivial(node: ast.expr | None) -> bool:
    return node is None or isinstance(node, ast.Constant)


def is_mutable(value: Any) -> bool:
    return isinstance(value, list | dict | set)
