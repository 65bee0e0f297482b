"""A run whose loop is at Modal too: this process sends it off, waits, and brings its record here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import cloudpickle

from mrl.backends.code import put_code
from mrl.backends.modal.backend import ModalBackend
from mrl.backends.modal.host import bring_files
from mrl.backends.modal.link import patiently
from mrl.backends.modal.prices import own_prices
from mrl.backends.modal.storage import CHECKPOINTS, STORAGE, StorageThere, step_of
from mrl.backends.modal.writer import Writer, this_process
from mrl.config import OrchestratorConfig, flat_fields
from mrl.errors import ConfigError, StoreError, TrainingError
from mrl.evaltests.find import place_of
from mrl.loop.cost import check_cost
from mrl.loop.elsewhere import MakeRun
from mrl.loop.recorded_run import RecordedRun, RunResult
from mrl.loop.resources import actor_resources, check_resources, needs, settle_sync
from mrl.loop.spawning import backend_of
from mrl.rewards.functions import split_file
from mrl.store.find import runs_root
from mrl.store.run import CONFIG
from mrl.store.schema import DATABASE
from mrl.system import shared_disk
from mrl.system.interrupts import end_process
from mrl.system.threads import in_thread

FOLDERS = ("model", "dataset_name", "eval_dataset")
PATHS = (
    *FOLDERS,
    *("rollout_func", "rollout_options", "tools", "environment_factory", "evaluation_test", "reward_funcs"),
)
"""Options that may name files of this machine; the first ones folders too."""
MIRROR_SECONDS = 10.0
RUNS = "/root/mrl-runs"
_WRITTEN_THERE = ("checkpoints", "weights")
_NOT_KEPT = ("run.lock", f"{DATABASE}-wal", f"{DATABASE}-shm")


class RunOnModal:
    """See RecordedRun, whose caller calls this one the same way.

    make_run: makes the run there; a function of a module, or one that can be pickled.
    """

    def __init__(self, config: OrchestratorConfig, run_dir: Path, *, resume: bool, make_run: MakeRun) -> None:
        self.config, self.run_dir, self.resume, self.make_run = config, run_dir, resume, make_run
        self.wording: Callable[[str], str] = str
        self.signal: int | None = None
        self._there: Any = None
        self._names: dict[str, str] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def run(self) -> RunResult:
        """Send the run off, wait for its end, and have its record here. Raises what it raised there."""
        import modal

        self._event_loop = asyncio.get_running_loop()
        simple = self.config.trl.mode == "simple"
        if not simple:
            settle_sync(self.config)
        check_cost(self.config, self.run_dir, resume=self.resume)
        wanted = [actor_resources(self.config)] if simple else needs(self.config).values()
        check_resources(self.config, *wanted)
        if not self.resume and (self.run_dir / CONFIG).exists():
            raise ConfigError(f"run_dir: {self.run_dir} holds a run already; choose another, or resume that one")
        backend = backend_of(self.config)
        assert isinstance(backend, ModalBackend)
        backend.output = self.config.runtime.backend_options.get("output") is not False
        await backend.reserve({})
        assert backend.storage is not None
        name, folder = self.run_dir.name, f"{STORAGE}/{CHECKPOINTS}/{self.run_dir.name}"
        session = uuid.uuid4().hex
        writer = Writer(backend.settings.volume, name, session, this_process())
        try:
            await in_thread(writer.refuse)
            is_kept = await backend.storage.has(f"{folder}/{CONFIG}")
            if is_kept and not self.resume and self.config.run.resume != "auto":
                raise ConfigError(
                    f"run_name: the Volume {backend.settings.volume} holds a run {name!r} already; choose another "
                    "name, or go on with that one: resume: auto"
                )
            if self.resume and not is_kept:
                await in_thread(backend.storage.upload, self.run_dir, folder)
            config = await self._as_there(backend)
            work = RunThere(config, writer, self.make_run, dict(backend.storage.files), self._names)
            self._there = backend.module.Loop.with_options(**backend.placement)(run=name)
            call = await self._there.train.spawn.aio(cloudpickle.dumps(work))
            if self.signal is not None:  # before there was anybody to tell
                self._stop()
            try:
                kind, value = cloudpickle.loads(await patiently(call))
            except modal.exception.Error as error:
                raise TrainingError(
                    f"the run's loop at Modal is lost ({error}); what it has done is on the Volume, under "
                    f"{CHECKPOINTS}/{name}: go on with resume: auto"
                ) from error
            finally:
                with contextlib.suppress(OSError):  # the error that ended the run says more
                    await in_thread(_bring_record, backend.storage, folder, self.run_dir)
        finally:
            await backend.close()
        if kind == "raised":
            raise value
        result: RunResult = value
        here = None if result.checkpoint is None else self.run_dir / "checkpoints" / result.checkpoint.name
        return replace(result, run_dir=self.run_dir, checkpoint=here, signal=self.signal)

    def request_stop(self, number: int) -> None:
        """See RecordedRun."""
        self.signal = number
        if self._event_loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._event_loop.call_soon_threadsafe(self._stop)

    def end_at_once(self, number: int) -> NoReturn:
        """See RecordedRun."""
        end_process(
            number, f"stopped at once. The run's record is on Modal's Volume, under {CHECKPOINTS}/{self.run_dir.name}"
        )

    def _stop(self) -> None:
        if self._there is not None and self._stopping is None:
            self._stopping = asyncio.create_task(self._there.stop.remote.aio(self.signal))

    async def _as_there(self, backend: ModalBackend) -> OrchestratorConfig:
        """The configuration with the files it names sent to the Volume."""
        config = self.config.model_copy(deep=True)
        _test_as_file(config)
        for name in PATHS:
            section = getattr(config, flat_fields()[name][0])
            value = await self._sent(backend, getattr(section, name), folders=name in FOLDERS)
            setattr(section, name, value)
        scores = config.trl.mode != "simple" or config.reward.reward_funcs is not None  # not all of TRL's trainers do
        if scores and config.reward.sandbox == "auto":
            config.reward.sandbox = "modal"  # programs run in Modal's Sandboxes, beside the loop
        options = config.runtime.backend_options | {"loop": "here"}
        if (prices := own_prices(options.get("prices"))) is not None:
            options["prices"] = await backend.put(prices)
        config.runtime.backend_options = options
        return config

    async def _sent(self, backend: ModalBackend, value: Any, *, folders: bool) -> Any:
        """An option's value as it is there: local files in it are sent."""
        if isinstance(value, (list, tuple)):
            return [await self._sent(backend, one, folders=folders) for one in value]
        if isinstance(value, dict):
            return {name: await self._sent(backend, one, folders=folders) for name, one in value.items()}
        if not isinstance(value, str):
            return value
        where, function = split_file(value) or (Path(value).expanduser(), None)
        if not (where.is_file() or (folders and function is None and where.is_dir())):
            return value
        there = await (put_code(backend, where) if where.suffix == ".py" else backend.put(where))
        self._names[there] = value if function is None else value.rpartition(":")[0]
        return there if function is None else f"{there}:{function}"


def _test_as_file(config: OrchestratorConfig) -> None:
    """Name the evaluation test by its file, which can be sent. Raises ConfigError where it has none."""
    if (test := config.rollout.evaluation_test) is None:
        return
    place = place_of(test)
    if place is None or place.module is not None:
        raise ConfigError(
            f"evaluation_test: {test!r:.80} is no file, which is what is sent to a loop at Modal; name it file.py:name,"
            " or leave the loop here (backend_options: {loop: here})"
        )
    named = f"{place.file}:{place.name}" if place.name else str(place.file)
    config.rollout.evaluation_test = named
    config.reward.reward_funcs = {"evaluation_test": {"test": named}}


@dataclass
class RunThere:
    """What runs in the loop's container. files: as Call's."""

    config: OrchestratorConfig
    writer: Writer
    make_run: MakeRun
    files: dict[str, str]
    names: dict[str, str]
    """What these files are called in the configuration that the user gave, by their path there."""
    made: RecordedRun | None = None
    asked: int | None = None
    """The signal that asked it to end."""

    def run(self) -> RunResult:
        """Run, from the beginning or from what the Volume has of this run. What a container leaves, the next one
        finds. Raises StoreError when another loop writes this run."""
        os.environ["MRL_RUNS"] = RUNS
        self.writer.take()
        try:
            return self._run()
        finally:
            with contextlib.suppress(OSError):  # it counts as gone some time later
                self.writer.release()

    def _run(self) -> RunResult:
        bring_files(self.files)
        folder, kept = runs_root() / self.writer.run, STORAGE / CHECKPOINTS / self.writer.run
        mirror = Mirror(folder, kept, self.names, self.writer)
        mirror.restore()
        self.made = self.make_run(self.config, folder, (folder / CONFIG).exists())
        if self.asked is not None:
            self.made.request_stop(self.asked)
        StorageThere.after_fetch[:] = [mirror.write]
        with mirror.kept_up():
            return asyncio.run(self.made.run())

    def stop(self, number: int) -> None:
        """End in good order."""
        self.asked = number
        if self.made is not None:
            self.made.request_stop(number)


class Mirror:
    """A run's folder in a container, and what of it outlives that: its record is copied to the Volume every few
    seconds, and before a checkpoint counts; its checkpoints are written there. names, writer: as RunThere's."""

    def __init__(self, folder: Path, kept: Path, names: dict[str, str], writer: Writer) -> None:
        self.folder, self.kept, self.names, self.writer = folder, kept, names, writer
        self.lock = threading.Lock()
        self.copied: dict[str, float] = {}

    def restore(self) -> None:
        """Make the folder, with everything that is kept."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        shared_disk.bring(self.kept / DATABASE, self.folder / DATABASE)  # also brings the mount up to date
        for path in self.kept.iterdir() if self.kept.is_dir() else ():
            if path.name not in (*_WRITTEN_THERE, *_NOT_KEPT, DATABASE) and not path.name.endswith(".partial"):
                shared_disk.copy(path, self.folder / path.name)
        if (config := self.folder / CONFIG).exists():
            config.write_text(replaced(config.read_text(), {here: there for there, here in self.names.items()}))
        (self.kept / "checkpoints").mkdir(parents=True, exist_ok=True)
        (self.folder / "checkpoints").symlink_to(self.kept / "checkpoints")
        self._forget_unrecorded()

    def write(self) -> None:
        """Copy what changed. Raises StoreError when another loop writes this run by now, and OSError."""
        if not self.writer.stay():
            raise StoreError(f"run_name: another loop at Modal has taken over the run {self.writer.run!r}")
        with self.lock:
            for path in sorted(self.folder.rglob("*")):
                relative = path.relative_to(self.folder)
                if path.is_dir() or relative.parts[0] in (*_WRITTEN_THERE, *_NOT_KEPT):
                    continue
                if path.name == DATABASE:
                    self._copy_database(path)
                elif self.copied.get(str(relative)) != (changed := path.stat().st_mtime):
                    (self.kept / relative).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, self.kept / relative)
                    if path.name == CONFIG:
                        (self.kept / relative).write_text(replaced(path.read_text(), self.names))
                    self.copied[str(relative)] = changed
            shared_disk.commit(self.kept)

    @contextmanager
    def kept_up(self) -> Iterator[None]:
        """Write every few seconds, and at the end."""
        over = threading.Event()

        def work() -> None:
            while not over.wait(MIRROR_SECONDS):
                # The next one may do. That another loop writes ends the run where a checkpoint is to count.
                with contextlib.suppress(OSError, sqlite3.Error, StoreError):
                    self.write()

        thread = threading.Thread(target=work, name="mrl-mirror", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.write()

    def _copy_database(self, path: Path) -> None:
        """As it is between two transactions."""
        partial = self.kept / f"{DATABASE}.partial"
        partial.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(partial)) as target:
            target.execute("PRAGMA journal_mode=DELETE")
            source.backup(target)
        partial.replace(self.kept / DATABASE)

    def _forget_unrecorded(self) -> None:
        """A checkpoint that was written just before the container died, and of whose steps the record was not kept."""
        recorded = -1
        if (self.folder / DATABASE).exists():
            with closing(sqlite3.connect(self.folder / DATABASE)) as database:
                (newest,) = database.execute("SELECT MAX(step) FROM steps").fetchone()
                recorded = -1 if newest is None else newest
        for path in (self.kept / "checkpoints").glob("step-*"):
            number = path.name.removeprefix("step-")
            if number.isdigit() and int(number) > recorded:
                shutil.rmtree(path, ignore_errors=True)


def replaced(text: str, names: dict[str, str]) -> str:
    """A recipe with other names of files in it."""
    for before, after in names.items():
        text = text.replace(before, after)
    return text


def _bring_record(storage: Any, folder: str, here: Path) -> None:
    """Of a run on the Volume the record, and the newest checkpoint. Raises OSError."""
    names = [PurePosixPath(path).name for path in storage.listing(folder)]
    if CONFIG not in names:
        return  # it ended before it began
    here.mkdir(parents=True, exist_ok=True)
    for name in _NOT_KEPT:  # of the record that was here before
        (here / name).unlink(missing_ok=True)
    for name in names:
        if name not in (*_WRITTEN_THERE, *_NOT_KEPT) and not name.endswith(".partial"):
            storage.download_to(f"{folder}/{name}", here / name)
    steps = [step for path in storage.listing(f"{folder}/checkpoints") if (step := step_of(path)) is not None]
    if steps:
        newest = f"step-{max(steps)}"
        target = here / "checkpoints" / newest
        brought = target.with_name(f"{newest}.brought")  # one of that name may be here, from before the run was resumed
        shutil.rmtree(brought, ignore_errors=True)
        storage.download_to(f"{folder}/checkpoints/{newest}", brought)
        shutil.rmtree(target, ignore_errors=True)
        brought.rename(target)
