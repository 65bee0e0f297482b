"""Workers that die together or stop, disks that fill up or vanish: what comes of a run, and that nothing is lost.

Single workers that die are in test_dead_workers.py, a driver that dies in resume/test_crash.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.backends import BACKENDS
from mrl.errors import CheckpointError, StoreError, SyncError
from mrl.store.run import read_rows
from mrl.sync.volume import VolumeSync
from mrl.types import WeightRef
from tests import small_runs
from tests.process_backend import ProcessBackend, ProcessHandle
from tests.small_runs import distinct, record_of, same_weights

pytestmark = pytest.mark.slow

ON_PROCESSES: dict[str, Any] = {"backend": "processes", "num_rollout_workers": 2}


@pytest.fixture(scope="module")
def calm(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in which nothing happens."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS._registered, "processes", ProcessBackend)
        small_runs.run(tiny_model, folder, **ON_PROCESSES, weight_sync_method="reload")
    return folder


def check_same(stormy: Path, calm: Path) -> None:
    """All but the count of workers replaced, and the clock."""
    assert record_of(stormy, "sync/replaced") == record_of(calm, "sync/replaced")
    assert same_weights(stormy, calm)


def replaced(folder: Path) -> list[str]:
    messages = [row["message"] for row in read_rows(folder, "events") if row["kind"] == "notice"]
    return sorted(message.split()[0] for message in messages if " is replaced: " in message)


@pytest.fixture
def strike(processes: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """strike(number, signal, *workers): at the `number`th request from here on, these workers get the signal."""
    call, spawn = ProcessHandle.call, ProcessBackend.spawn
    alive: dict[str, ProcessHandle] = {}
    wanted: list[tuple[int, int, tuple[str, ...]]] = []
    requests = 0

    async def spawned(self: ProcessBackend, *args: Any, **kwargs: Any) -> ProcessHandle:
        handle = alive[kwargs["name"]] = await spawn(self, *args, **kwargs)
        return handle

    async def counted(self: ProcessHandle, method: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal requests
        answer = asyncio.ensure_future(call(self, method, *args, **kwargs))
        await asyncio.sleep(0)  # it is sent
        if method == "generate":
            requests += 1
            for number, what, names in wanted:
                if number == requests:
                    for name in names:
                        os.kill(alive[name].pid, what)
        return await answer

    def from_here_on(number: int, what: int, *workers: str) -> None:
        nonlocal requests
        requests = 0
        wanted.append((number, what, workers))

    monkeypatch.setattr(ProcessHandle, "call", counted)
    monkeypatch.setattr(ProcessBackend, "spawn", spawned)
    return from_here_on


def test_all_rollout_workers_die_at_once(
    tiny_model: str, tmp_path: Path, calm: Path, strike: Callable[..., None]
) -> None:
    """To rounding: requests that are made again come one by one, and who decodes with whom decides the last bits."""
    strike(9, signal.SIGKILL, "rollout-0", "rollout-1")
    assert small_runs.run(tiny_model, tmp_path / "stormy", **ON_PROCESSES).steps == 4
    small_runs.check_same_to_rounding(tmp_path / "stormy", calm)
    assert replaced(tmp_path / "stormy") == ["rollout-0", "rollout-1"]


def test_a_worker_that_stops_is_waited_for_within_a_bound(
    tiny_model: str, tmp_path: Path, calm: Path, strike: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, not dead: its connection stays, and it says nothing any more. Calls may take an hour."""
    monkeypatch.setattr("mrl.backends.base.ENDING_SECONDS", 0.2)
    monkeypatch.setattr("mrl.loop.progress.LEAST_SILENCE_SECONDS", 5.0)
    strike(9, signal.SIGSTOP, "rollout-1")
    assert small_runs.run(tiny_model, tmp_path / "stormy", **ON_PROCESSES, sync_timeout=5).steps == 4
    small_runs.check_same_to_rounding(tmp_path / "stormy", calm)
    assert replaced(tmp_path / "stormy") == ["rollout-1"]
    notices = [row["message"] for row in read_rows(tmp_path / "stormy", "events") if row["kind"] == "notice"]
    assert "rollout-1 has not said anything for 5 s and is ended" in notices


# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


FILL: dict[int, Path] = {}
"""By step, the disk that has no byte left from its rewards on."""


def filling(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    disk = FILL.pop(trainer_state.global_step, None)
    if disk is not None:
        with (disk / "ballast").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    return distinct(completions)


@pytest.mark.inline("the reward function fills the disk at a step that the test names")
@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("run", (StoreError, CheckpointError), "free space"),
        ("weights", SyncError, "weights could not be written to .*No space left on device; free space there"),
    ],
)
def test_a_disk_that_fills_up_ends_the_run_which_goes_on_when_there_is_room(
    what: str, error: Any, message: str, tiny_model: str, tmp_path: Path, small_disk: Path
) -> None:
    """The disk of the run's store and checkpoints, or that of weights on their way."""
    options = {"reward_funcs": filling, "weight_sync_method": "reload"}
    small_runs.run(tiny_model, tmp_path / "calm", **options)
    run = (small_disk if what == "run" else tmp_path) / "stormy"
    if what == "weights":
        options["weight_sync_dir"] = str(small_disk)
    FILL[3] = small_disk
    with pytest.raises(error, match=message):
        small_runs.run(tiny_model, run, **options, save_total_limit=1)
    (small_disk / "ballast").unlink()
    assert small_runs.run(tiny_model, run, **options, save_total_limit=1, resume="auto").steps == 4
    check_same(run, tmp_path / "calm")


@pytest.fixture
def volume(processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], None]], Any]:
    """volume(happens): a run whose weights go through a volume, to which that happens once version 2 is there."""
    publish = VolumeSync.publish
    todo: list[Callable[[Path], None]] = []

    async def watched(self: VolumeSync, actor: Any, workers: Any, version: int) -> WeightRef:
        ref = await publish(self, actor, workers, version)
        if version == 2 and todo:
            todo.pop()(tmp_path / "volume")
        return ref

    monkeypatch.setattr(VolumeSync, "publish", watched)

    def run(model: str, folder: Path, happens: Callable[[Path], None] | None = None, **changes: Any) -> Any:
        (tmp_path / "volume").mkdir(exist_ok=True)
        todo[:] = [happens] if happens is not None else []
        options = {"weight_sync_method": "volume", "weight_sync_dir": str(tmp_path / "volume"), "sync_timeout": 20}
        return small_runs.run(model, folder, **(ON_PROCESSES | options | changes))

    return run


def away(volume: Path) -> None:
    """It cannot be seen nor written any more; what is on it stays."""
    volume.rename(volume.with_name("elsewhere"))
    volume.write_text("no volume is mounted here")


def back(volume: Path) -> None:
    volume.unlink()
    volume.with_name("elsewhere").rename(volume)


def test_a_volume_that_vanishes(tiny_model: str, tmp_path: Path, calm: Path, volume: Callable[..., Any]) -> None:
    def for_a_moment(volume: Path) -> None:
        away(volume)
        asyncio.get_running_loop().call_later(1.0, back, volume)

    # Back in time: workers wait for the version that they were promised.
    volume(tiny_model, tmp_path / "moment", for_a_moment)
    check_same(tmp_path / "moment", calm)
    assert not replaced(tmp_path / "moment")
    # Until somebody mounts it again: the run ends, and is resumed.
    with pytest.raises(SyncError, match=r"v2 did not appear here within 6 s; is the disk shared\?"):
        volume(tiny_model, tmp_path / "gone", away, sync_timeout=8)
    back(tmp_path / "volume")
    volume(tiny_model, tmp_path / "gone", resume="auto", sync_timeout=8)
    check_same(tmp_path / "gone", calm)
