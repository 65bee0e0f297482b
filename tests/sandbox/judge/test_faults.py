"""A mistake of the judge's own is no score; whatever a program does to look like one is."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

import mrl.sandbox
from mrl.sandbox import Limits, Program, Verdict
from mrl.sandbox.engine.client import IsolatedExecutor
from mrl.sandbox.judge.faults import is_ours
from mrl.sandbox.local import LocalSandbox
from tests.soak import slow_but

HOLDS = "assert f(3) == 6"
UNIT = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 6)"
CAUGHT = "try:\n    held = f(3) == 6\nexcept Exception:\n    held = False\n    raise AssertionError"
MISTAKES = {
    "a name that there is not": ("link.py", "        token = os", "        token = nope + os", HOLDS),
    "an attribute of our own": (
        "link.py",
        "                value = self.decode(node)",
        "                self.nope()",
        HOLDS,
    ),
    "a name of a module of ours": ("link.py", "name = library.name_of(", "name = library.nope(", "f(len)"),
    "in a test class": ("link.py", "        token = os", "        token = nope + os", UNIT),
    "that the test caught": ("link.py", "        token = os", "        token = nope + os", CAUGHT),
    "before any test": ("names.py", "bound = set().union", "bound = {}.union", HOLDS),
}


def judged(*programs: Program) -> list[Verdict]:
    sandbox = LocalSandbox(executor=IsolatedExecutor(slots=1))
    try:
        return asyncio.run(sandbox.run(list(programs)))
    finally:
        sandbox.shutdown()


KEPT = ["an attribute of our own"]


@pytest.mark.parametrize("name", slow_but(KEPT, MISTAKES))
def test_a_mistake_of_the_judges_is_no_score(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, before, after, test = MISTAKES[name]
    package = tmp_path / "sandbox"
    shutil.copytree(Path(mrl.sandbox.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (tmp_path, package):
        folder.chmod(0o755)
    source = package / "judge" / file
    assert source.read_text().count(before) == 1
    executor = IsolatedExecutor(slots=1)
    monkeypatch.setattr("mrl.sandbox.engine.slot.__file__", str(package / "engine" / "slot.py"))
    source.write_text(source.read_text().replace(before, after))
    sandbox = LocalSandbox(executor=executor)
    (verdict,) = asyncio.run(sandbox.run([Program("def f(x): return x * 2", (test,))]))
    sandbox.shutdown()
    assert verdict.status == "sandbox_error", verdict
    assert not verdict.judged


HOSTILE = [
    "def f(x): return nope",
    "def f(x):\n    if x == 4: y = 1\n    return y",
    "import sys\ndef f(x): raise AttributeError('nope', name='nope', obj=sys.modules['mrl_sandbox.judge.link'])",
    "def f(x): return object().nope",
    "class C:\n    def __getattr__(self, name): return nope\n    __eq__ = __bool__ = __getattr__\ndef f(x): return C()",
]


def test_errors_of_the_program_are_its_own() -> None:
    quick = Limits(wall_seconds=5, cpu_seconds=5)
    for verdict in judged(*(Program(code, (HOLDS, UNIT), quick) for code in HOSTILE)):
        assert verdict.status == "failed", verdict
        assert not any(test.passed for test in verdict.tests)


def test_a_test_that_is_no_python_by_a_late_rule_fails() -> None:
    (verdict,) = judged(Program("def f(x): return x * 2", (HOLDS, "return f(3)")))
    assert [test.passed for test in verdict.tests] == [True, False]
    assert "not Python" in verdict.tests[1].detail


def test_what_the_tests_raise_is_theirs() -> None:
    with pytest.raises(NameError) as caught:
        exec(compile("nope", "<test>", "exec"), {})
    assert not is_ours(caught.value)
    assert not is_ours(NameError("never raised"))
    assert not is_ours(None)
