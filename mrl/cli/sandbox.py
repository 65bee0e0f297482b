"""`mrl sandbox`: grade one program, or say which isolation works here."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from mrl.cli.flags import argument, parse
from mrl.errors import ConfigError
from mrl.system.units import size

USAGE = """usage: mrl sandbox COMMAND

  check    which layer of isolation works on this machine, and why the others do not
  run      grade one program against its tests

`mrl sandbox run --help` explains the second."""


def sandbox(argv: list[str]) -> int:
    """The subcommand. Exit code 0 when the program passed (or a layer works), 1 when not, 2 for what can be mended."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    action, *rest = argv
    if action == "check":
        return check(rest)
    if action == "run":
        return run(rest)
    raise ConfigError(f"mrl sandbox: {action!r} is neither run nor check")


def check(argv: list[str]) -> int:
    """Perform the forbidden acts inside each layer of isolation; print which layer is used, and why."""
    given = parse("mrl sandbox check", check.__doc__ or "", argv, options=[], extra={"json": _JSON})
    from mrl.sandbox.confine.report import describe

    report = describe()
    if given.get("json"):
        layers = {result.layer: {"holds": result.holds, "reason": result.reason} for result in report.results}
        _print_json({"layer": report.layer, "layers": layers, "facts": report.facts, "problem": report.problem})
    else:
        print("\n".join(report.lines()))
    return 0 if report.layer else 1


def run(argv: list[str]) -> int:
    """Run a Python file in the sandbox and judge it by its tests."""
    from dataclasses import replace

    from mrl.rewards.code import parse_tests
    from mrl.sandbox import Limits, Program, make_factory

    extra = {
        "file": argument("The program.", positional=True, required=True, metavar="FILE"),
        "tests": argument(
            'JSON file: a list of assert lines, or of {"input": ..., "output": ...}.', required=True, metavar="FILE"
        ),
        "timeout": argument("Wall-clock and CPU seconds.", default="30", kind=float),
        "memory_mb": argument("Memory in MB.", default="512", kind=int),
        "json": _JSON,
    }
    given = parse("mrl sandbox run", run.__doc__ or "", argv, options=["sandbox", "sandbox_options"], extra=extra)
    code, tests = _read(given["file"], "file"), _read(given["tests"], "tests")
    limits = Limits()
    if "timeout" in given:
        if not 0 < given["timeout"] < 1e6:
            raise ConfigError(f"timeout: {given['timeout']} is not a number of seconds above 0")
        limits = replace(limits, wall_seconds=given["timeout"], cpu_seconds=given["timeout"])
    if "memory_mb" in given:
        if given["memory_mb"] < 16:
            raise ConfigError(f"memory_mb: {given['memory_mb']} is not enough for Python; try 512")
        limits = replace(limits, memory_mb=given["memory_mb"])
    make_sandbox = make_factory(given.get("sandbox", "auto"), given.get("sandbox_options"))
    program = Program(code, parse_tests(_parse_json(tests, f"tests: {given['tests']!r}")), limits)

    async def judge() -> Any:
        member = make_sandbox()
        try:
            return (await member.run([program]))[0]
        finally:
            await member.close()

    verdict = asyncio.run(judge())
    if given.get("json"):
        _print_json(verdict.as_dict())
    else:
        _print_verdict(verdict, [str(test) for test in program.tests])
    return 0 if verdict.status == "passed" else 1 if verdict.judged else 2


_JSON = argument("Print as JSON.", default="off", kind=bool)


def _print_verdict(verdict: Any, tests: list[str]) -> None:
    passed = sum(test.passed for test in verdict.tests)
    print(
        f"{verdict.status}: {passed} of {len(tests)} tests passed" + (f"\n{verdict.detail}" if verdict.detail else "")
    )
    for number, result in enumerate(verdict.tests):
        text = " ".join(tests[number].split())[:100]
        print(f"  test {number}: {'passed' if result.passed else 'failed'}  {text}")
        if result.detail and not result.passed:
            print("\n".join(f"      {line}" for line in result.detail.splitlines()))
    seconds = f"{verdict.wall_seconds:.3f} s, {verdict.cpu_seconds:.3f} s of processor"
    print(f"{seconds}, {size(verdict.peak_memory_mb * 1e6)} at most")
    for name, text in (("stdout", verdict.stdout), ("stderr", verdict.stderr)):
        if text:
            print(f"--- {name}\n{text.rstrip()}")


def _read(name: str, option: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: cannot read {name!r}: {error}") from None


def _parse_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=True)
    print()
