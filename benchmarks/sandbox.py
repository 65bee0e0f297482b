"""Executions a second: isolated layers against a cold interpreter, bubblewrap and a bare fork, all in one run.

    python benchmarks/sandbox.py [--seconds S] [--slots N]

Every contender runs the same small program with three tests, `slots` at a time. `cold` is `python3 -I -c` with the
tests appended (which proves nothing about the program; it is the price of starting an interpreter). It pays for the
`.pth` files of the machine's site-packages, hence a row with `-S`, which skips them, and a ratio to each. Rounds are
interleaved, so that a machine whose speed wanders does not favour one; the ratios are of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from mrl.sandbox.confine import selftest
from mrl.sandbox.engine.client import IsolatedExecutor, usable_cores
from mrl.sandbox.execution import Execution

CODE = "def f(x):\n    return x * x + 1\n"
ASSERTS = "assert f(1) == 2\nassert f(2) == 5\nassert f(3) == 10\n"
TESTS = tuple(ASSERTS.splitlines())
JUDGED = Execution(CODE, TESTS)
FRESH = Execution(CODE, ("import sys", *TESTS))
"""Tests that might leave something behind, so that each program gets a judge of its own."""
PYTHON = getattr(sys, "_base_executable", sys.executable)
BWRAP = [
    "bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--tmpfs", "/tmp", "--dev", "/dev",
]  # fmt: skip
ROUNDS = 5
COLD, BARE = "cold python3 -I -c", "cold python3 -I -S -c"
Contender = Callable[[float], Awaitable[tuple[float, list[float]]]]


def commands(command: list[str], slots: int) -> Contender:
    """Processes started from threads, which wait in the kernel."""

    async def run(seconds: float) -> tuple[float, list[float]]:
        times: list[float] = []
        end = time.perf_counter() + seconds

        def work(_: int) -> None:
            while time.perf_counter() < end:
                started = time.perf_counter()
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
                times.append(time.perf_counter() - started)

        began = time.perf_counter()
        with ThreadPoolExecutor(slots) as pool:
            await asyncio.to_thread(lambda: list(pool.map(work, range(slots))))
        return len(times) / (time.perf_counter() - began), times

    return run


def forks(slots: int) -> Contender:
    """The floor: a fork of this small helper that runs the program and ends, without any isolation or answer."""
    code = (
        "import os, sys, time\n"
        "code, end, n = sys.argv[1], time.perf_counter() + float(sys.argv[2]), 0\n"
        "while time.perf_counter() < end:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n        exec(code, {}); os._exit(0)\n"
        "    os.waitpid(pid, 0); n += 1\nprint(n)\n"
    )

    async def run(seconds: float) -> tuple[float, list[float]]:
        command = [PYTHON, "-I", "-S", "-c", code, CODE + ASSERTS, str(seconds)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(slots)]
        counts = [int(process.communicate()[0]) for process in running]
        rates = [count / seconds for count in counts]
        return sum(rates), [1 / rate for rate in rates]

    return run


def executor(layer: str, execution: Execution, slots: int, open_: list[IsolatedExecutor]) -> Contender:
    isolated = IsolatedExecutor(slots=slots, layer=layer)
    open_.append(isolated)

    async def run(seconds: float) -> tuple[float, list[float]]:
        times: list[float] = []
        end = time.perf_counter() + seconds

        async def work() -> None:
            while time.perf_counter() < end:
                started = time.perf_counter()
                (seen,) = await isolated.execute([execution])
                times.append(time.perf_counter() - started)
                assert seen.verdict.status == "passed", seen

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(slots)))
        return len(times) / (time.perf_counter() - began), times

    return run


async def batch_with_sleeper(slots: int) -> tuple[float, float]:
    """Seconds until 511 of 512 were back, and until the 30 s sleeper was (cut at its time-out)."""
    isolated = IsolatedExecutor(slots=slots)
    executions = [Execution("import time; time.sleep(60)"), *[JUDGED] * 511]
    started = time.perf_counter()
    futures = [asyncio.wrap_future(isolated.submit(execution)) for execution in executions]
    await asyncio.gather(*futures[1:])
    others = time.perf_counter() - started
    await futures[0]
    sleeper = time.perf_counter() - started
    await isolated.close()
    return others, sleeper


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=10.0, help="per contender, over all rounds")
    parser.add_argument("--slots", type=int, default=usable_cores())
    options = parser.parse_args()
    slots, open_ = options.slots, list[IsolatedExecutor]()
    cold, bare = [PYTHON, "-I", "-c", CODE + ASSERTS], [PYTHON, "-I", "-S", "-c", CODE + ASSERTS]
    contenders: dict[str, Contender] = {COLD: commands(cold, slots), BARE: commands(bare, slots)}
    if shutil.which("bwrap"):
        contenders["bubblewrap, cold -I -S"] = commands([*BWRAP, *bare], slots)
    contenders["bare fork"] = forks(slots)
    for layer in "ABC":
        if selftest.test_layer(layer).holds:
            contenders[f"layer {layer}"] = executor(layer, JUDGED, slots, open_)
    contenders["best layer, a judge each"] = executor("auto", FRESH, slots, open_)
    for count in range(1, slots):
        contenders[f"best layer, {count} of {slots} slots"] = executor("auto", JUDGED, count, open_)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, contender in contenders.items():
            rate, taken = await contender(options.seconds / ROUNDS)
            rates[name].append(rate)
            times[name] += taken
    for isolated in open_:
        await isolated.close()
    base, base_bare = statistics.median(rates[COLD]), statistics.median(rates[BARE])
    print(f"{slots} slots on {os.cpu_count()} cores, {PYTHON}, load {os.getloadavg()[0]:.1f}")
    print(f"{'':36}{'per second':>12}{'x cold':>9}{'x cold -S':>11}{'p50 ms':>9}")
    for name, found in rates.items():
        rate, p50 = statistics.median(found), statistics.median(times[name]) * 1000
        print(f"{name:36}{rate:12.0f}{rate / base:9.2f}{rate / base_bare:11.2f}{p50:9.2f}")
    others, sleeper = await batch_with_sleeper(slots)
    print(f"512 programs, one sleeping: 511 back after {others:.2f} s, the sleeper stopped after {sleeper:.1f} s")


if __name__ == "__main__":
    asyncio.run(main())
