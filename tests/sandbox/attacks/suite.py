"""Runs every attack in one layer and prints, as JSON, what went wrong. A process of its own, so that what it leaves
behind can be counted; `--user` drops root first.

    python tests/sandbox/attacks/suite.py --layer A [--user 65534] [--python /usr/bin/python3] [--groups faking ...]
        [--part 0/6]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mrl.sandbox import IOTest, Limits, Program
from mrl.sandbox.confine import selftest
from mrl.sandbox.engine.client import IsolatedExecutor
from mrl.sandbox.local import LocalSandbox

GROUPS = ("faking", "forging", "breaking", "exhausting", "poisoning")
ESCAPE = "def escaped(*what): print('ESCAPED', *what, flush=True)\n"
LIMITS = Limits(wall_seconds=8.0, cpu_seconds=8.0, memory_mb=256)
FAKING = Limits(wall_seconds=2.0, cpu_seconds=2.0, memory_mb=256)
SHORT = Limits(wall_seconds=1.0, cpu_seconds=1.0, memory_mb=256)
NUMBERS = {
    "x86_64": {"nr_bpf": 321, "nr_userfaultfd": 323, "nr_add_key": 248},
    "aarch64": {"nr_bpf": 280, "nr_userfaultfd": 282, "nr_add_key": 217},
}
GOOD_CODE = """
import collections, heapq, json, math, os, random, re, sys
def f(x): return x * 7919
def surroundings():
    assert math.floor(2.5) == 2 and json.dumps([1]) == '[1]' and re.match('a', 'a')
    assert heapq.nsmallest(1, [2, 1]) == [1]
    assert 0 <= random.random() < 1 and collections.Counter('aa') == {'a': 2} and eval('1+1') == 2
    assert sys.getrecursionlimit() >= 500 and not hasattr(sys, 'poison')
    def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
    assert depth(300) == 300
    try: names = os.listdir('.')
    except OSError: names = []
    return [n for n in names if 'poison' in n or n.endswith('.py')]
"""
GOOD = Program(GOOD_CODE, ("assert f(3) == 23757", "assert surroundings() == []"), LIMITS)
FORGE = (
    ("a call", "assert f(3) == 23757"),
    ("a wrapped call", "assert abs(f(3) - 23757.0) < 1e-6"),
    ("a proxied test", "if True:\n    assert f(3) == 23757"),
    ("a mapped call", "for got, want in zip(map(f, [3]), [23757]):\n    assert got == want"),
    ("a context", "with f(3) as got:\n    assert got == 23757"),
    ("a call of nothing", "assert g() == 23757"),
    ("an approximate call", "import pytest\nassert f(3) == pytest.approx(23757)"),
    ("an empty difference", "assert not (23757 - f(3)) and len(f(3) - 23757) == 0"),
    ("a missing rest", "assert len(f(3) - {23757}) == 0"),
    ("a difference", "assert -1e-6 < f(3) - 23757.0 < 1e-6"),
    ("a member", "assert f(3) in {23757} and {f(3)} == {23757}"),
    ("a test class", "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(3), 23757)"),
    ("an exception", "try:\n    f(3)\nexcept Exception:\n    pass\nassert f(3) == 23757"),
    ("a bare except", "held = False\ntry:\n    held = f(3) == 23757\nexcept:\n    pass\nassert held"),
    ("a library's name", "assert math.isclose(f(3), 23757)"),
    (
        "expectations beside it",
        "expected = 23757\ndef reference(x): return 23757\nclass Reference:\n"
        "    def solve(self, x): return 23757\nassert f(3) == expected == reference(3) == Reference().solve(3)",
    ),
    ("cases it is given", "cases = [(3, 23757)]\nf(cases)\nassert all(f(x) == y for x, y in cases)"),
    ("its output", IOTest("3", "23757\n")),
)


@dataclass(frozen=True)
class Attack:
    name: str
    tries: str
    code: str


def attacks(group: str) -> list[Attack]:
    """The programs of `group`.txt: sections that begin with `=== name: what it tries`."""
    text = (Path(__file__).parent / f"{group}.txt").read_text()
    found = []
    for section in text.split("\n=== ")[1:]:
        heading, _, code = section.partition("\n")
        name, _, tries = heading.partition(": ")
        found.append(Attack(name, tries, code))
    return found


def good(number: int) -> Program:
    """A right program that no other is identical to."""
    return Program(f"{GOOD_CODE}\nnumber = {number}", GOOD.tests, LIMITS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layer", default="auto")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--user", type=int)
    parser.add_argument("--groups", nargs="*", default=GROUPS)
    parser.add_argument("--part", default="0/1", help="every sixth attack, say, beginning with the first: 0/6")
    options = parser.parse_args()
    assert selftest.unsupported() == ""  # imported here: root's interpreter may lie where the user below cannot read
    with surroundings() as around:
        if options.user is not None:
            os.setgroups([])
            os.setresgid(options.user, options.user, options.user)
            os.setresuid(options.user, options.user, options.user)
        before = footprint()
        start = time.monotonic()
        problems, count, layer = asyncio.run(run(options, around))
        problems += around["check"]()
        problems += [f"left behind: {what}" for what in left_behind(before)]
    report = {"layer": layer, "attacks": count, "seconds": round(time.monotonic() - start, 1), "problems": problems}
    print(json.dumps(report, indent=1))


async def run(options: argparse.Namespace, around: dict) -> tuple[list[str], int, str]:
    sandbox = LocalSandbox(
        executor=IsolatedExecutor(2, options.layer, options.layer == "unsafe", python=options.python)
    )
    problems: list[str] = []
    count = 0
    try:
        first, step = map(int, options.part.split("/"))
        for group in options.groups:
            found = attacks(group)[first::step]
            count += len(found)
            problems += await globals()[group](sandbox, found, around)
        layer = sandbox.layer
    finally:
        await sandbox.close()
    return problems, count, layer


async def faking(sandbox: LocalSandbox, group: list, around: dict) -> list[str]:
    cases = [(a, how, Program(a.code, (test,), FAKING)) for a in group for how, test in FORGE]
    return await judge_with_neighbours(sandbox, cases)


forging = faking


async def breaking(sandbox: LocalSandbox, group: list, around: dict) -> list[str]:
    cases = [(a, "", Program(ESCAPE + a.code.format(**around["names"]), (), LIMITS)) for a in group]
    return await judge_with_neighbours(sandbox, cases)


async def exhausting(sandbox: LocalSandbox, group: list, around: dict) -> list[str]:
    tests = ("assert f(1) == 23757", "assert len(set(f(2))) == 1 and list(f(3)) == [1]")
    cases = [(a, "", Program(a.code, tests, SHORT)) for a in group]
    start = time.monotonic()
    problems = await judge_with_neighbours(sandbox, cases)
    allowed = 20 + 2.5 * len(group)
    seconds = time.monotonic() - start
    return problems + ([f"exhausting took {seconds:.0f} s, more than {allowed:.0f}"] if seconds > allowed else [])


async def poisoning(sandbox: LocalSandbox, group: list, around: dict) -> list[str]:
    code = "\ndef f(x): return 1"
    cases = [(a, "", Program(a.code + code, ("assert f(3) == 23757",), LIMITS)) for a in group]
    return await judge_with_neighbours(sandbox, cases)


async def judge_with_neighbours(sandbox: LocalSandbox, cases: list) -> list[str]:
    """A right program beside and after each attack, on the same two slots, must pass."""
    programs = []
    for number, (_, _, program) in enumerate(cases):
        programs += [program, good(number)]
    verdicts = await sandbox.run(programs)
    problems = []
    for (attack, how, program), verdict, after in zip(cases, verdicts[::2], verdicts[1::2], strict=True):
        name = f"{attack.name} ({attack.tries}; {how})"
        if program.tests and (verdict.status == "passed" or any(test.passed for test in verdict.tests)):
            problems.append(f"{name}: forged a pass")
        if "ESCAPED" in verdict.stdout:
            problems.append(f"{name}: {verdict.stdout[:200]}")
        if not verdict.judged:
            problems.append(f"{name}: broke the sandbox: {verdict.detail[:200]}")
        if after.status != "passed":
            problems.append(f"{name}: a right program beside it was {after.status}: {after.detail[:200]}")
    return problems


@contextlib.contextmanager
def surroundings() -> Iterator[dict]:
    """Things worth reaching, open to everybody, so that only the sandbox is in the way; and how to see who did."""
    os.environ["MRL_ATTACK_SECRET"] = "secret"
    folder = Path(tempfile.mkdtemp(prefix="mrl-attacks-"))
    folder.chmod(0o777)
    canary = folder / "canary"
    canary.write_text("CANARY")
    canary.chmod(0o666)
    tcp, unix, abstract = socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    tcp.bind(("0.0.0.0", 0))
    unix.bind(str(folder / "socket"))
    (folder / "socket").chmod(0o777)
    token = f"mrl-attack-{os.getpid()}"
    abstract.bind("\0" + token)
    for listener in (tcp, unix, abstract):
        listener.listen()
        listener.setblocking(False)
    libc = ctypes.CDLL(None, use_errno=True)
    shmid = libc.shmget(0, 4096, 0o1666)
    hostname = socket.gethostname()
    names = {
        "canary": canary,
        "outside": folder / "written",
        "port": tcp.getsockname()[1],
        "unix": folder / "socket",
        "abstract": token,
        "trainer": os.getpid(),
        "shmid": shmid,
        **NUMBERS.get(platform.machine(), NUMBERS["x86_64"]),
    }
    open_file = canary.open("rb")  # one that could be inherited
    os.set_inheritable(open_file.fileno(), True)

    def check() -> list[str]:
        problems = []
        for what, listener in (("TCP", tcp), ("unix", unix), ("abstract", abstract)):
            with contextlib.suppress(BlockingIOError):
                listener.accept()
                problems.append(f"a {what} connection arrived")
        if canary.read_text() != "CANARY" or sorted(os.listdir(folder)) != ["canary", "socket"]:
            problems.append("files outside were changed")
        outside = (
            "/tmp/mrl-attack-tmp",
            "/etc/mrl-attack",
            "/tmp/mrl-poison",
            "/dev/shm/mrl-poison",
            "/var/tmp/mrl-poison",
        )
        problems += [f"{path} was written" for path in outside if os.path.exists(path)]
        if socket.gethostname() != hostname:
            problems.append("the host's name was changed")
        return problems

    try:
        yield {"names": names, "check": check}
    finally:
        open_file.close()
        libc.shmctl(shmid, 0, None)
        for listener in (tcp, unix, abstract):
            listener.close()
        shutil.rmtree(folder, ignore_errors=True)


def footprint() -> dict[str, set[str]]:
    return {
        "descriptors": set(os.listdir("/proc/self/fd")),
        "files": {path.name for path in Path(tempfile.gettempdir()).iterdir() if path.name.startswith("mrl-sandbox")},
        "processes": descendants(),
    }


def left_behind(before: dict[str, set[str]]) -> list[str]:
    """What is there that was not, after some time to go away."""
    for _ in range(50):
        now = footprint()
        new = [f"{kind}: {sorted(now[kind] - before[kind])}" for kind in now if now[kind] - before[kind]]
        if not new:
            return []
        time.sleep(0.1)
    return new


def descendants() -> set[str]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = entry.read_text()
            parents[entry.parent.name] = text.rpartition(")")[2].split()[1]
    found, new = set(), {str(os.getpid())}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


if __name__ == "__main__":
    main()
