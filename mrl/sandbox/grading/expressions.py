"""The parts of an expression that need no call: names, displays, operators, comparisons, loops over data."""

from __future__ import annotations

import ast
from typing import Any

from mrl.sandbox.execution import Call
from mrl.sandbox.grading.compose import LIBRARIES, call_path
from mrl.sandbox.grading.scope import Hole, Literal, NotRewritable, Scope, Trusted
from mrl.sandbox.grading.trusted import MODULES, TYPES

ANSWER, OPERATE = "__answer", "__operate"
MAX_CALLS = 5000


class Expressions:
    """Rebuilds an expression node by node; a kind of node that is not mentioned is refused."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.values: dict[str, Any] = {}
        self.holes: list[int] = []
        self.bound: list[str] = []

    def expr(self, node: ast.expr) -> ast.expr:
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise NotRewritable(f"{type(node).__name__} in an expression")
        result: ast.expr = method(node)
        return result

    def _constant(self, node: ast.Constant) -> ast.expr:
        return node

    def _name(self, node: ast.Name) -> ast.expr:
        if node.id in self.bound:
            return node
        if node.id in self.scope.lent:
            raise NotRewritable(f"{node.id!r} after the program had it")
        meaning = self.scope.names.get(node.id)
        if isinstance(meaning, Literal):
            self.values[node.id] = meaning.value
            return node
        if isinstance(meaning, Hole):
            hole = self._hole(meaning.index)
            if meaning.item is None:
                return hole
            return ast.Subscript(hole, ast.Constant(meaning.item), ast.Load())
        if isinstance(meaning, Trusted) and meaning.attribute:
            return self._trusted(MODULES[meaning.module], meaning.attribute)
        path = call_path(node, self.scope)
        if path is None or node.id in LIBRARIES:
            raise NotRewritable(f"the name {node.id!r}")
        return self._add(Call(f"(lambda: {path})"))

    def _hole(self, index: int) -> ast.expr:
        self.holes.append(index)
        return ast.Call(ast.Name(ANSWER, ast.Load()), [ast.Constant(index)], [])

    def _trusted(self, table: dict[str, Any], name: str) -> ast.expr:
        if name not in table:
            raise NotRewritable(f"{name!r} of a module")
        self.values[f"__{name}_{id(table[name])}"] = table[name]
        return ast.Name(f"__{name}_{id(table[name])}", ast.Load())

    def _list(self, node: ast.List) -> ast.expr:
        return ast.List([self.expr(item) for item in node.elts], ast.Load())

    def _tuple(self, node: ast.Tuple) -> ast.expr:
        return ast.Tuple([self.expr(item) for item in node.elts], ast.Load())

    def _set(self, node: ast.Set) -> ast.expr:
        return ast.Set([self.expr(item) for item in node.elts])

    def _dict(self, node: ast.Dict) -> ast.expr:
        if None in node.keys:
            raise NotRewritable("** in a dict")
        return ast.Dict([self.expr(key) for key in node.keys if key], [self.expr(value) for value in node.values])

    def _unaryop(self, node: ast.UnaryOp) -> ast.expr:
        return ast.UnaryOp(node.op, self.expr(node.operand))

    def _boolop(self, node: ast.BoolOp) -> ast.expr:
        return ast.BoolOp(node.op, [self.expr(value) for value in node.values])

    def _ifexp(self, node: ast.IfExp) -> ast.expr:
        return ast.IfExp(self.expr(node.test), self.expr(node.body), self.expr(node.orelse))

    def _binop(self, node: ast.BinOp) -> ast.expr:
        name = ast.Constant(type(node.op).__name__)
        if name.value == "MatMult":
            raise NotRewritable("@")
        return ast.Call(ast.Name(OPERATE, ast.Load()), [name, self.expr(node.left), self.expr(node.right)], [])

    def _subscript(self, node: ast.Subscript) -> ast.expr:
        return ast.Subscript(self.expr(node.value), self.expr(node.slice), ast.Load())

    def _slice(self, node: ast.Slice) -> ast.expr:
        parts = [self.expr(part) if part else None for part in (node.lower, node.upper, node.step)]
        return ast.Slice(*parts)

    def _compare(self, node: ast.Compare) -> ast.expr:
        operands = [node.left, *node.comparators]
        for op, operand in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, ast.Is | ast.IsNot) and not (_singleton(operand) or _is_type_of(node.left)):
                raise NotRewritable("`is` between objects")
            if isinstance(op, ast.In | ast.NotIn) and self.bound and self._mentions_bound(operand):
                raise NotRewritable("`in` inside a loop")
        types = any(map(_is_type_of, operands))
        lowered = [self._types(o) if types and not _is_type_of(o) else self.expr(o) for o in operands]
        return ast.Compare(lowered[0], node.ops, lowered[1:])

    def _types(self, node: ast.expr) -> ast.expr:
        """A builtin type, or a tuple or list of them."""
        if isinstance(node, ast.Tuple | ast.List):
            return ast.Tuple([self._types(item) for item in node.elts], ast.Load())
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return ast.Tuple([self._types(node.left), self._types(node.right)], ast.Load())
        if isinstance(node, ast.Name) and node.id not in self.scope.names and node.id in TYPES:
            return self._trusted(TYPES, node.id)
        if isinstance(node, ast.Call) and _is_type_of(node) and len(node.args) == 1:
            return self.expr(node)
        if isinstance(node, ast.Constant) and node.value is None:
            return node
        raise NotRewritable("a type that is not builtin")

    def _generatorexp(self, node: ast.GeneratorExp) -> ast.expr:
        return ast.GeneratorExp(*self._comprehension(node))

    def _listcomp(self, node: ast.ListComp) -> ast.expr:
        return ast.ListComp(*self._comprehension(node))

    def _comprehension(self, node: ast.GeneratorExp | ast.ListComp) -> tuple[ast.expr, list[ast.comprehension]]:
        """One `for` only, and calls of the program only in what it runs over: their arguments are known beforehand,
        and the time stays proportional to the data."""
        if len(node.generators) != 1 or node.generators[0].is_async:
            raise NotRewritable("a loop in a loop")
        (generator,) = node.generators
        source = self.expr(generator.iter)
        outer, holes = len(self.bound), len(self.holes)
        names = [name.id for name in ast.walk(generator.target) if isinstance(name, ast.Name)]
        if not _is_target(generator.target):
            raise NotRewritable("a loop's target")
        self.bound += names
        conditions = [self.expr(condition) for condition in generator.ifs]
        element = self.expr(node.elt)
        del self.bound[outer:]
        if len(self.holes) != holes:
            raise NotRewritable("a call of the program inside a loop")
        return element, [ast.comprehension(generator.target, source, conditions, 0)]

    def _attribute(self, node: ast.Attribute) -> ast.expr:
        module = self._module(node.value)
        if module:
            return self._trusted(MODULES[module], node.attr)
        path = call_path(node, self.scope)
        if path is None:
            raise NotRewritable(f"the attribute {node.attr!r}")
        return self._add(Call(f"(lambda: {path})"))

    def _module(self, node: ast.expr) -> str:
        """The trusted module that a name means: imported by the test, or by everybody."""
        if not isinstance(node, ast.Name) or node.id in self.bound:
            return ""
        meaning = self.scope.names.get(node.id, Trusted(node.id))
        known = isinstance(meaning, Trusted) and not meaning.attribute and meaning.module in MODULES
        return meaning.module if known else ""

    def _add(self, call: Call) -> ast.expr:
        if len(self.scope.calls) >= MAX_CALLS:
            raise NotRewritable(f"more than {MAX_CALLS} calls")
        self.scope.calls.append(call)
        return self._hole(len(self.scope.calls) - 1)

    def _mentions_bound(self, node: ast.expr) -> bool:
        return any(isinstance(inner, ast.Name) and inner.id in self.bound for inner in ast.walk(node))


def _singleton(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _is_type_of(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"


def _is_target(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List):
        return all(map(_is_target, node.elts))
    return isinstance(node, ast.Name)
