"""With the real `modal` client and its real exec, against a local emulator of Modal's control plane.

Needs the package, and an account: tests/modal_account.py.
"""

from __future__ import annotations

import sys

import pytest

from mrl.errors import SandboxError
from mrl.sandbox import IOTest, Limits, Program, make_factory

LIMITS = Limits(wall_seconds=5, cpu_seconds=5)


@pytest.mark.modal
@pytest.mark.usefixtures("modal_account")
@pytest.mark.parametrize("layer", ["auto", "B"])
async def test_programs_are_judged_on_modal(layer: str) -> None:
    sandbox = make_factory("modal", {"machines": 2, "cpu": 2, "layer": layer, "lifetime": 120})()
    tests = ("assert f(1) == 2", "assert f(2) == 3")
    programs = [
        Program("def f(x): return x + 1", tests, LIMITS),
        Program("def f(x): return 2", tests, LIMITS),
        Program("print(input()[::-1])", (IOTest("abc\n", "cba\n"),), LIMITS),
        Program("import os; os._exit(0)", tests, LIMITS),
        Program("while True: pass", tests, Limits(wall_seconds=1, cpu_seconds=1)),
    ]
    try:
        verdicts = await sandbox.run(programs)
    finally:
        await sandbox.close()
    assert [v.status for v in verdicts] == ["passed", "failed", "passed", "exited", "timeout"], verdicts
    assert [test.passed for test in verdicts[1].tests] == [True, False]


@pytest.mark.modal
@pytest.mark.usefixtures("modal_account")
async def test_the_sandboxes_are_without_a_network_and_given_back() -> None:
    import modal

    app = "mrl-sandbox-given-back"
    sandbox = make_factory("modal", {"machines": 1, "cpu": 1, "app": app, "lifetime": 60})()
    owner = await modal.App.lookup.aio(app, create_if_missing=True)
    try:
        program = Program("def f(x): return x", ("assert f(1) == 1",), LIMITS)
        assert [v.status for v in await sandbox.run([program])] == ["passed"]
        assert len([one async for one in modal.Sandbox.list.aio(app_id=owner.app_id)]) == 1
    finally:
        await sandbox.close()
    assert [one async for one in modal.Sandbox.list.aio(app_id=owner.app_id)] == []


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(SandboxError, match=r"pip install 'mrl\[modal\]'"):
        make_factory("modal")()
