"""What ordinary solutions use works in isolation: in layer A, and what B and C lack is known."""

from pathlib import Path

import pytest

from mrl.sandbox import IOTest, Limits, Program
from mrl.sandbox.confine import selftest
from mrl.sandbox.local import LocalSandbox

LIMITS = Limits(wall_seconds=10, cpu_seconds=10)
NO_FILES = {"files", "pathlib and os.path", "tempfile"}
MISSES: dict[str, set[str]] = {"A": set(), "B": NO_FILES, "C": NO_FILES}
"""By layer: what fails there, as docs/sandbox.md lists it."""


def snippets() -> dict[str, Program]:
    found = {}
    for section in (Path(__file__).parent / "snippets.txt").read_text().split("\n=== ")[1:]:
        name, *lines = section.rstrip("\n").split("\n")
        given = [line.removeprefix("stdin: ") for line in lines if line.startswith("stdin: ")]
        code = "\n".join(line for line in lines if not line.startswith("stdin: "))
        test = IOTest("".join(f"{line}\n" for line in given), "a-b!" if name == "print options" else "")
        found[name] = Program(code, (test,), LIMITS)
    return found


def test_there_are_enough():
    assert len(snippets()) >= 80


@pytest.mark.parametrize("layer", ["A", *(pytest.param(layer, marks=pytest.mark.slow) for layer in "BC")])
async def test_ordinary_programs_work(layer):
    if selftest.unsupported():
        pytest.skip(selftest.unsupported())
    result = selftest.test_layer(layer)
    if not result.holds:
        pytest.skip(result.reason)
    sandbox = LocalSandbox(layer=layer)
    programs = snippets()
    try:
        verdicts = await sandbox.run(list(programs.values()))
    finally:
        await sandbox.close()
    failed = {
        name: v.stderr[-200:] or v.detail for name, v in zip(programs, verdicts, strict=True) if v.status != "passed"
    }
    assert set(failed) == MISSES[layer], failed
