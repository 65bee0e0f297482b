"""Which names of the tests are the program's. Read from the tests alone, before the program says anything.

A name that a test binds or imports is the tests'; so is the name of a library, and of a library's class that stands
beside something of the program's. Builtins are Python's. Every other name is asked of the program.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import symtable
import sys
from dataclasses import dataclass, field
from typing import Any

ALIASES = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot", "sp": "scipy", "tf": "tensorflow"}
_CLASSES = {
    "fractions": "Fraction",
    "decimal": "Decimal",
    "datetime": "date datetime timedelta timezone",
    "collections": "deque Counter OrderedDict defaultdict namedtuple",
    "pathlib": "Path PurePath",
    "uuid": "UUID",
    "io": "StringIO BytesIO",
    "itertools": "islice",
    "typing": "Any Callable Dict Iterable Iterator List Optional Sequence Set Tuple Union",
    "unittest": "TestCase",
}
CLASSES = {name: module for module, names in _CLASSES.items() for name in names.split()}
"""Names of libraries that tests use without importing them, because the program does."""
_PROGRAMS = "solution main program answer candidate submission your_module your_code module"
PROGRAM_MODULES = frozenset(_PROGRAMS.split())
"""From which tests import the program, where it has no name."""
_PURE = """
bisect cmath collections copy fractions functools heapq itertools json math operator pytest re statistics string typing
"""
PURE = frozenset(_PURE.split())
"""Modules that tests cannot leave in another state than they found them in."""
_STATEFUL = "open setattr delattr exec eval compile globals vars locals __import__ input breakpoint memoryview"
STATEFUL = frozenset(_STATEFUL.split())
NOT_HERE = "the test needs {}, which is not among the sandbox's `modules`"
PATCHABLE = frozenset({"sys.stdout", "sys.stderr", "sys.stdin", "builtins.input", "builtins.print"})


@dataclass(slots=True)
class Test:
    """One test, read."""

    tree: ast.Module | None
    problem: str = ""
    """Why it cannot be run at all: not Python."""
    refused: str = ""
    """Why nothing can be said of a program by it, here."""
    bound: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    early: set[str] = field(default_factory=set)
    """Used before the test binds them."""


class Names:
    """The names of all tests of one program."""

    def __init__(self, texts: list[str]) -> None:
        self.tests = [_read(text) for text in texts]
        self.library: dict[str, Any] = {}
        for test in self.tests:
            missing = next((name for name in _imported(test.tree) if not _can_import(name)), None)
            if missing is not None:
                test.refused = test.refused or NOT_HERE.format(missing)
        bound = set().union(*(test.bound for test in self.tests))
        trees = [test.tree for test in self.tests if test.tree is not None]
        for test in self.tests:
            for name in test.used - bound - self.library.keys():
                self._find_module(name, trees, test)
        for test in self.tests:
            own = test.used - bound - self.library.keys() - set(dir(builtins))
            classes = own & CLASSES.keys()
            if own - classes:
                for name in classes:
                    self.library[name] = getattr(importlib.import_module(CLASSES[name]), name)
        self.wanted = sorted(
            set().union(*(test.used for test in self.tests)) - bound - self.library.keys() - set(dir(builtins))
        )
        self.offered = sorted(name for tree in trees for name in _records(tree))
        """Classes that the program may use although only the tests define them."""
        self._shadowing = [_builtins_tested(test) for test in self.tests]
        self.shadowing = sorted(set().union(*self._shadowing))
        """Builtins' names that are the program's, should it bind them."""

    def shadowing_of(self, at: int) -> set[str]:
        return self._shadowing[at]

    def are_pure(self) -> bool:
        """Whether the tests leave nothing behind in their process, so that it may judge the next program too."""
        modules = {getattr(value, "__name__", "") for value in self.library.values()}
        return all(test.tree is not None and _is_pure(test.tree) for test in self.tests) and modules <= PURE

    def may_ask(self, name: str, at: int) -> bool:
        """Whether the program is asked for a name that is not set while test number `at` runs: not where a test should
        have set it, and failed."""
        test = self.tests[at]
        if any(name in earlier.bound for earlier in self.tests[:at]):
            return False
        return name not in test.bound or name in test.early

    def _find_module(self, name: str, trees: list[ast.Module], test: Test) -> None:
        """A module's name that is used for nothing but attributes which the module has."""
        module = ALIASES.get(name, name)
        if module not in ALIASES.values() and module not in sys.stdlib_module_names and module != "pytest":
            return
        attributes = _attributes(name, trees)
        if attributes is None:
            return
        try:
            found = importlib.import_module(module)
        except ImportError:
            if name in ALIASES:
                test.refused = test.refused or NOT_HERE.format(module)
            return
        if all(hasattr(found, attribute) for attribute in attributes):
            self.library[name] = found


def _imported(tree: ast.Module | None) -> list[str]:
    """Modules that a test cannot do without: not those that it tries to import."""
    found: list[str] = []
    stack: list[ast.AST] = [tree] if tree is not None else []
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            found += [item.name for item in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
        elif not isinstance(node, ast.Try):
            stack += ast.iter_child_nodes(node)
    return found


def _can_import(name: str) -> bool:
    root = name.partition(".")[0]
    if root in sys.stdlib_module_names or root in PROGRAM_MODULES or root in ("pytest", "__main__"):
        return True
    try:
        importlib.import_module(root)
    except ImportError:
        return False
    return True


def _is_pure(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [item.name for item in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if not {name.partition(".")[0] for name in names} <= PURE:
                return False
        elif isinstance(node, ast.ClassDef | ast.Await | ast.AsyncFunctionDef):
            return False
        elif isinstance(node, ast.Attribute):
            if not isinstance(node.ctx, ast.Load) or node.attr.startswith("__"):
                return False
        elif isinstance(node, ast.Name) and node.id in STATEFUL:
            return False
    return True


def _records(tree: ast.Module) -> list[str]:
    """Classes that hold data (`ListNode`, `TreeNode`) and compute nothing: programs are written to be used with them.
    What computes may be what the tests compare with, and is not the program's to call."""
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and all(
            not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or inner.name[:2] == "__"
            for inner in node.body
        )
    ]


def _builtins_tested(test: Test) -> set[str]:
    """Builtins are Python's own: a program that rebinds `abs` does not answer for it in `abs(f(1) - 2)`. A test that
    uses nothing else tests the program's `abs`, if there is one."""
    return {name for name in test.used if name[0].islower()} if test.used <= set(dir(builtins)) else set()


def _read(text: str) -> Test:
    try:
        tree = ast.parse(text)
        table = symtable.symtable(text, "<test>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Test(None, f"not Python: {error}")
    test = Test(tree, refused=_refused(tree))
    _collect(table, test)
    for statement in tree.body:
        loads = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        test.early |= loads - (test.bound & _bound_before(tree.body, statement))
    return test


def _bound_before(body: list[ast.stmt], end: ast.stmt) -> set[str]:
    found: set[str] = set()
    for statement in body:
        if statement is end:
            break
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            found |= {(item.asname or item.name).partition(".")[0] for item in statement.names}
        else:
            found |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found


def _collect(table: symtable.SymbolTable, test: Test) -> None:
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        here = top and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace())
        if here or (not top and symbol.is_declared_global() and symbol.is_assigned()):
            test.bound.add(symbol.get_name())
        if symbol.is_referenced() and (top or symbol.is_global()):
            test.used.add(symbol.get_name())
    for child in table.get_children():
        _collect(child, test)


def _attributes(name: str, trees: list[ast.Module]) -> set[str] | None:
    """What is asked of a name; None where it is used for itself."""
    found: set[str] = set()
    inner: set[int] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name:
                found.add(node.attr)
                inner.add(id(node.value))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == name and id(node) not in inner:
                return None
    return found


def _refused(tree: ast.Module) -> str:
    """Tests that change what the program's own process is made of."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        patches = called in ("patch", "mock.patch", "unittest.mock.patch")
        if patches and node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value in PATCHABLE:
            continue
        if patches or called.endswith(("patch.object", "patch.dict", "patch.multiple")):
            return f"the test changes a module of the program's process: {ast.unparse(node)[:100]}"
        if called == "importlib.reload":
            return "the test reloads a module of the program's process"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            fixtures = {a.arg for a in node.args.args} & {"monkeypatch", "capsys", "capfd", "tmp_path", "mocker"}
            if fixtures:
                return f"the test needs pytest's {', '.join(sorted(fixtures))}"
    return ""
