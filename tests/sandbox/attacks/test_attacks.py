"""The attacks against every layer that works here, as this user and as an ordinary one; and against a naive grader."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mrl.sandbox.confine import selftest
from tests.soak import but

HERE = Path(__file__).parent
LAYERS = ("A", "B", "C")
NOBODY = 65534

spec = importlib.util.spec_from_file_location("attack_suite", HERE / "suite.py")
assert spec is not None
assert spec.loader is not None
suite = importlib.util.module_from_spec(spec)
sys.modules["attack_suite"] = suite
spec.loader.exec_module(suite)


@functools.cache
def works(layer: str) -> str:
    """Empty, or why the layer does not work here."""
    if selftest.unsupported():
        return selftest.unsupported()
    result = selftest.test_layer(layer)
    return "" if result.holds else f"layer {layer}: {result.reason}"


def strongest() -> str | None:
    return next((layer for layer in LAYERS if not works(layer)), None)


def attack(layer: str, user: str, part: str = "0/1", groups: Sequence[str] = suite.GROUPS) -> int:
    """Runs the attacks, or a part of them, and returns how many."""
    if layer != "unsafe" and works(layer):
        pytest.skip(works(layer))
    options = ["--groups", *groups]
    if user == "ordinary":
        python = public_python()
        if python is None:
            pytest.skip("no Python that an ordinary user may start")
        options += ["--user", str(NOBODY), "--python", python]
    command = [sys.executable, str(HERE / "suite.py"), "--layer", layer, "--part", part, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["problems"] == []
    assert report["layer"] == layer
    return int(report["attacks"])


@functools.cache
def public_python() -> str | None:
    """An interpreter that an ordinary user may start."""
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        check = [path, "-I", "-S", "-c", "import sys; assert sys.version_info >= (3, 11)"]
        try:
            subprocess.run(check, user=NOBODY, group=NOBODY, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return path
    return None


# Whoever is an ordinary user cannot become another one.
USERS = ("mine", "ordinary") if os.geteuid() == 0 else ("mine",)
WALLS = [(layer, user) for layer in LAYERS for user in USERS]
"""In the way of the attacks. Each attack meets one of them, in the slow suite, and all of them in `make soak`."""


@pytest.mark.slow
@pytest.mark.parametrize("wall", WALLS, ids="-".join)
def test_nothing_is_forged_leaked_or_left_behind(wall):
    assert attack(*wall, f"{WALLS.index(wall)}/{len(WALLS)}") >= 60 // len(WALLS)


@pytest.mark.slow
def test_every_attack_on_the_layer_that_is_used():
    layer = strongest()
    if layer is None:
        pytest.skip("no layer works here")
    assert attack(layer, "mine") >= 60


@pytest.mark.soak
@pytest.mark.parametrize(("layer", "user"), WALLS)
def test_every_attack(layer, user):
    assert attack(layer, user) >= 60


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="makes users of its own as root")
@pytest.mark.parametrize("part", but(["0/6"], [f"{k}/6" for k in range(6)]))
def test_users_of_their_own_keep_programs_from_their_judges(part):
    """Where no layer holds, on a machine apart: what leaves files behind, or leaves, is not tried there."""
    assert attack("unsafe", "mine", part, ("faking", "forging", "exhausting")) >= 15


@pytest.mark.slow
async def test_a_judge_that_goes_on_is_not_poisoned():
    """One judge for many programs, since their tests are the same: after each attack comes a right program."""
    layer = strongest()
    if layer is None:
        pytest.skip("no layer works here")
    tests = tuple(test for how, test in suite.FORGE if how in ("a call", "a wrapped call", "a mapped call", "a member"))
    right = "def f(x): return 7919 * x"
    found = [attack for group in ("faking", "forging") for attack in suite.attacks(group)]
    programs = []
    for number, attack in enumerate(found):
        programs += [suite.Program(attack.code, tests, suite.SHORT)]
        programs += [suite.Program(f"{right} + 0 * {number}", tests, suite.SHORT)]
    sandbox = suite.LocalSandbox(executor=suite.IsolatedExecutor(1, layer))
    verdicts = await sandbox.run(programs)
    await sandbox.close()
    for attack, verdict, after in zip(found, verdicts[::2], verdicts[1::2], strict=True):
        assert not any(test.passed for test in verdict.tests), attack.name
        assert after.status == "passed", (attack.name, after)


@pytest.mark.slow
def test_the_attacks_bite(tmp_path):
    """The usual grader, asserts appended to the program and exit code 0 for a pass, takes most of them for right."""

    def forged(found) -> bool:
        script = tmp_path / f"{found.name}.py"
        script.write_text(f"{found.code}\nassert f(3) == 23757\n")
        try:
            done = subprocess.run([sys.executable, "-I", script], cwd=tmp_path, capture_output=True, timeout=10)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    attacks = suite.attacks("faking")
    with ThreadPoolExecutor(2) as pool:
        successes = [found.name for found, success in zip(attacks, pool.map(forged, attacks), strict=True) if success]
    assert len(successes) >= len(attacks) // 2, successes
    assert {"os_exit_0", "eq_true", "frame_constants", "int_subclass_eq"} <= set(successes)


def test_every_attack_says_what_it_tries():
    groups = {group: suite.attacks(group) for group in suite.GROUPS}
    found = [attack for group in groups.values() for attack in group]
    assert len(found) >= 60
    assert len({attack.name for attack in found}) == len(found)
    assert all(attack.tries and attack.code.strip() for attack in found)
