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
from mrl.sandbox.grading.compose import LIBRARIES, call_path, composed, is_builtin, iterated
from mrl.sandbox.grading.scope import Hole, Literal, NotRewritable, Scope, Trusted
from mrl.sandbox.grading.trusted import FUNCTIONS, KEYWORDS, METHODS, MODULES, TYPES, operate

ANSWER, OPERATE = "__answer", "__operate"
ITERATING = {
    "list",
    "tuple",
    "set",
    "frozenset",
    "sorted",
    "sum",
    "max",
    "min",
    "any",
    "all",
    "enumerate",
    "dict",
    "zip",
}
MAX_CALLS = 5000


@dataclass(slots=True)
class Lowered:
    """An expression to be evaluated here."""

    node: ast.expr
    values: dict[str, Any]
    holes: list[int]
    consumed: frozenset[int]
    """Answers that are iterated, indexed, converted or asked for their truth: objects could stand there. The others
    are compared, and an object equals nothing."""


def lower(node: ast.expr, scope: Scope) -> Lowered:
    """Raises NotRewritable. Calls found are appended to `scope.calls`."""
    lowering = _Lowering(scope)
    lowered = lowering.truth(node)
    return Lowered(lowered, lowering.values, lowering.holes, frozenset(lowering.consumed))


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


class _Lowering:
    """Rebuilds an expression node by node; a kind of node that is not mentioned is refused."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.values: dict[str, Any] = {}
        self.holes: list[int] = []
        self.bound: list[str] = []
        self.consumed: set[int] = set()

    def truth(self, node: ast.expr) -> ast.expr:
        """An expression whose value is used for more than a comparison."""
        lowered = self.expr(node)
        if is_hole(lowered):
            self.consumed.add(self.holes[-1])
        return lowered

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
            self.consumed.add(meaning.index)
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
        return ast.UnaryOp(node.op, self.truth(node.operand))

    def _boolop(self, node: ast.BoolOp) -> ast.expr:
        return ast.BoolOp(node.op, [self.truth(value) for value in node.values])

    def _ifexp(self, node: ast.IfExp) -> ast.expr:
        return ast.IfExp(self.truth(node.test), self.expr(node.body), self.expr(node.orelse))

    def _binop(self, node: ast.BinOp) -> ast.expr:
        name = ast.Constant(type(node.op).__name__)
        if name.value == "MatMult":
            raise NotRewritable("@")
        return ast.Call(ast.Name(OPERATE, ast.Load()), [name, self.truth(node.left), self.truth(node.right)], [])

    def _subscript(self, node: ast.Subscript) -> ast.expr:
        return ast.Subscript(self.truth(node.value), self.expr(node.slice), ast.Load())

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
        source = self.truth(generator.iter)
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

    def _builtin(self, name: str, node: ast.Call) -> ast.expr:
        function = self._trusted(FUNCTIONS, name)  # also refuses the builtins that are not among them
        if name == "isinstance":
            if len(node.args) != 2 or node.keywords:
                raise NotRewritable("isinstance with other arguments")
            return ast.Call(function, [self.truth(node.args[0]), self._types(node.args[1])], [])
        if name == "type" and (len(node.args) != 1 or node.keywords):
            raise NotRewritable("type() with other arguments")
        if self.bound and name == "range":
            raise NotRewritable("a range inside a loop")
        if name in ("map", "filter") and len(node.args) == 2:
            return ast.Call(function, [self._function(node.args[0]), self._iterated(node.args[1])], [])
        if name in ITERATING and node.args:
            rest = [self.truth(argument) for argument in node.args[1:]]
            return ast.Call(function, [self._iterated(node.args[0]), *rest], self._keywords(node))
        return self._apply(function, node)

    def _iterated(self, node: ast.expr) -> ast.expr:
        lowered = self.truth(node)
        if is_hole(lowered):
            self.scope.calls[self.holes[-1]] = iterated(self.scope.calls[self.holes[-1]])
        return lowered

    def _apply(self, function: ast.expr, node: ast.Call) -> ast.expr:
        return ast.Call(function, [self.truth(argument) for argument in node.args], self._keywords(node))

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
            return ast.Call(ast.Attribute(function.value, "join", ast.Load()), [self.truth(node.args[0])], [])
        if function.attr not in METHODS or node.keywords or any(map(self._mentions_bound, node.args)):
            raise NotRewritable(f"the method {function.attr!r}")
        receiver, holes = self.truth(function.value), len(self.holes)
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

    def _add(self, call: Call) -> ast.expr:
        if len(self.scope.calls) >= MAX_CALLS:
            raise NotRewritable(f"more than {MAX_CALLS} calls")
        self.scope.calls.append(call)
        return self._hole(len(self.scope.calls) - 1)

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

    def _mentions_bound(self, node: ast.expr) -> bool:
        return any(isinstance(inner, ast.Name) and inner.id in self.bound for inner in ast.walk(node))


def is_hole(node: ast.expr) -> bool:
    """Whether a lowered expression is nothing but an answer."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == ANSWER


def _singleton(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _is_type_of(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type"


def _is_target(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List):
        return all(map(_is_target, node.elts))
    return isinstance(node, ast.Name)
