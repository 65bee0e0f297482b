"""The attacks against every layer that works here, as this user and as an ordinary one; and against a naive grader."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mrl.sandbox.isolation import selftest

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


def attack(layer: str, user: str, part: str = "0/1") -> int:
    """Runs the attacks, or a part of them, and returns how many."""
    if works(layer):
        pytest.skip(works(layer))
    options = []
    if user == "ordinary":
        python = public_python()
        if python is None:
            pytest.skip("no Python that an ordinary user may start")
        options = ["--user", str(NOBODY), "--python", python]
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
