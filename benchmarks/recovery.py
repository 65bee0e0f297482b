"""How long a run is without what it lost: workers that are killed or stopped, the driver, a volume.

    python benchmarks/recovery.py            # two minutes
    python benchmarks/recovery.py --faults "a rollout worker, generating" "the actor"

Short runs of a tiny model with every worker in a process of its own (tests/process_backend.py, where starting one takes
a fraction of a second). A row for each fault:

- noticed: until the run has said so, or for a driver until somebody starts it again, which is at once here;
- working again: until whatever was lost has done again what it was doing (generated, loaded weights, scored, trained);
- of that, start: the seconds that starting what takes its place took: workers, or for a driver its libraries and its
  workers. On other backends this is what differs: a machine is rented, an image pulled, a larger model loaded;
- lost: steps that were trained again, that of the fault included (there is a checkpoint every other step).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/

os.environ.setdefault("OMP_NUM_THREADS", "1")
STEPS, SAVE_STEPS, FAULT_STEP = 6, 2, 4
SILENCE = 5.0
"""Seconds after which a worker that says nothing is ended; outside this script `sync_timeout`, at least a minute."""
OUT_OF_REACH = 2.0
"""Seconds for which the volume is gone."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to workers at their call of `method` in step FAULT_STEP."""

    workers: tuple[str, ...]
    method: str
    signal: int = signal.SIGKILL
    changes: dict[str, Any] = field(default_factory=dict)


FAULTS = {
    "a rollout worker, generating": Fault(("rollout-0",), "generate"),
    "a rollout worker, during weight sync": Fault(("rollout-0",), "update_weights"),
    "all rollout workers": Fault(("rollout-0", "rollout-1"), "generate"),
    "a rollout worker that is stopped": Fault(("rollout-0",), "generate", signal.SIGSTOP, {"sync_timeout": SILENCE}),
    "a reward worker": Fault(("reward-0",), "score"),
    "the actor": Fault(("actor",), "train_step"),
}
DRIVER, VOLUME = "the driver, resumed", "the weights' volume, for a while"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*FAULTS, DRIVER, VOLUME]
    parser.add_argument("--faults", choices=names, nargs="+", default=names)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)  # the process that is killed
    options = parser.parse_args()
    if options.drive is not None:
        run(options.drive, resume="auto")
        return
    print("| fault | noticed, s | working again, s | of that, start, s | steps lost |")
    print("|---|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory(prefix="mrl-recovery-") as folder:
        from tests.conftest import build_model

        build_model(Path(folder) / "model")
        for name in options.faults:
            where = Path(folder) / f"run-{names.index(name)}"
            measured = {DRIVER: kill_driver, VOLUME: hide_volume}.get(name, lambda at, fault=name: strike(at, fault))
            noticed, again, start, lost = measured(where)
            print(f"| {name} | {noticed:.2f} | {again:.2f} | {start:.2f} | {lost} |", flush=True)


Row = tuple[float, float, float, int]


def run(folder: Path, **changes: Any) -> None:
    """A run of a few steps, with what it says thrown away."""
    from mrl.backends import BACKENDS
    from tests import small_runs
    from tests.process_backend import ProcessBackend

    BACKENDS._registered["processes"] = ProcessBackend
    options = {"backend": "processes", "num_rollout_workers": 2, "max_steps": STEPS, "save_steps": SAVE_STEPS}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        small_runs.run(str(folder.parent / "model"), folder, **(options | changes))


def strike(folder: Path, name: str) -> Row:
    """Have a fault happen in a run."""
    from mrl.backends import base
    from mrl.loop import progress
    from tests.process_backend import ProcessBackend, ProcessHandle

    fault = FAULTS[name]
    seen = Seen(fault)
    call, spawn = ProcessHandle.call, ProcessBackend.spawn
    ending, silence = base.ENDING_SECONDS, progress.LEAST_SILENCE_SECONDS
    ProcessHandle.call, ProcessBackend.spawn = seen.wrap_call(call), seen.wrap_spawn(spawn)  # type: ignore[method-assign]
    base.ENDING_SECONDS, progress.LEAST_SILENCE_SECONDS = 0.5, SILENCE
    try:
        run(folder, **fault.changes)
    finally:
        ProcessHandle.call, ProcessBackend.spawn = call, spawn  # type: ignore[method-assign]
        base.ENDING_SECONDS, progress.LEAST_SILENCE_SECONDS = ending, silence
    noticed = next(row["time"] for row in rows(folder, "events") if tells(row)) - seen.wall
    return noticed, max(seen.again.values()) - seen.struck, seen.starting, seen.steps - STEPS


class Seen:
    """Watches a run's workers, and strikes when it is time."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.handles: dict[str, Any] = {}
        self.steps = 0
        """Training steps that were begun."""
        self.struck = self.wall = self.starting = 0.0
        self.again: dict[str, float] = {}
        """When each of the struck workers had done again what it was doing."""

    def wrap_spawn(self, spawn: Any) -> Any:
        async def spawned(backend: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            handle = self.handles[kwargs["name"]] = await spawn(backend, *args, **kwargs)
            if self.struck:
                self.starting += time.perf_counter() - start
            return handle

        return spawned

    def wrap_call(self, call: Any) -> Any:
        async def called(handle: Any, method: str, *args: Any, **kwargs: Any) -> Any:
            self.steps += method == "train_step"
            due = self.steps == FAULT_STEP - (self.fault.method != "train_step")
            answer = asyncio.ensure_future(call(handle, method, *args, **kwargs))
            await asyncio.sleep(0)  # it is sent
            if due and not self.struck and (handle.name, method) == (self.fault.workers[0], self.fault.method):
                self.struck, self.wall = time.perf_counter(), time.time()
                for name in self.fault.workers:
                    os.kill(self.handles[name].pid, self.fault.signal)
            result = await answer
            if self.struck and method == self.fault.method and handle.name in self.fault.workers:
                self.again.setdefault(handle.name, time.perf_counter())
            return result

        return called


def tells(event: dict[str, Any]) -> bool:
    return event["kind"] == "restart" or " is replaced" in event["message"]


def kill_driver(folder: Path) -> Row:
    """The process with the loop; its workers end with it. Somebody starts it again at once."""
    before = FAULT_STEP - 1
    drive(folder, lambda: steps_of(folder) >= before, killed=True)
    start = time.time()
    drive(folder, lambda: resumed_at(folder) is not None and steps_of(folder) > before, killed=False)
    at = resumed_at(folder)
    assert at is not None
    trained = next(row["time"] for row in rows(folder, "metrics") if row["step"] == before + 1)
    return 0.0, trained - start, at["time"] - start, before - int(at["step"])


def drive(folder: Path, done: Callable[[], bool], *, killed: bool) -> None:
    """Run in a process of its own until `done`, then kill it, or let it end by itself."""
    command = [sys.executable, str(Path(__file__).resolve()), "--drive", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not done():
        time.sleep(0.01)
    if killed:
        process.kill()
    process.wait()


def resumed_at(folder: Path) -> dict[str, Any] | None:
    """The event of going on."""
    return next((row for row in rows(folder, "events") if row["kind"] == "resume"), None)


def steps_of(folder: Path) -> int:
    return max((int(row["step"]) for row in rows(folder, "metrics")), default=0)


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Of a run's record; none where there is none yet."""
    from mrl.errors import MRLError
    from mrl.store.run import read_rows

    with contextlib.suppress(MRLError, OSError):
        return list(read_rows(folder, kind))
    return []


def hide_volume(folder: Path) -> Row:
    """It vanishes when a version was written and no worker has it yet, and comes back."""
    from mrl.sync.volume import VolumeSync

    publish, volume = VolumeSync.publish, folder.parent / "volume"
    volume.mkdir()
    hidden = shown = 0.0

    def back() -> None:
        nonlocal shown
        volume.with_name("elsewhere").rename(volume)
        shown = time.perf_counter()

    async def watched(self: VolumeSync, actor: Any, workers: Any, version: int) -> Any:
        nonlocal hidden
        ref = await publish(self, actor, workers, version)
        if version == FAULT_STEP:
            volume.rename(volume.with_name("elsewhere"))
            hidden = time.perf_counter()
            asyncio.get_running_loop().call_later(OUT_OF_REACH, back)
        return ref

    update, loaded = VolumeSync.update, []

    async def updated(self: VolumeSync, *args: Any) -> Any:
        report = await update(self, *args)
        if shown and not loaded:
            loaded.append(time.perf_counter())
        return report

    VolumeSync.publish, VolumeSync.update = watched, updated  # type: ignore[method-assign, assignment]
    try:
        run(folder, weight_sync_method="volume", weight_sync_dir=str(volume))
    finally:
        VolumeSync.publish, VolumeSync.update = publish, update  # type: ignore[method-assign]
    return 0.0, loaded[0] - hidden, 0.0, 0


if __name__ == "__main__":
    main()
