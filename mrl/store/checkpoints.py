"""Checkpoints: whole or absent, checked by checksum, and a model folder that transformers loads as it is.

    checkpoints/step-40/
      config.json, model.safetensors, tokenizer…   (LoRA: adapter_config.json, adapter_model.safetensors)
      trainer/optimizer.pt, scheduler.pt, rng.pt, gap_probe.json   what training resumes from
      trainer/optimizer/                           instead of optimizer.pt where several ranks wrote it, a part each
      trainer/state.json                           step, policy version, data cursor, trackers' ids …
      trainer/in_flight.json.gz                    groups that were drawn or generated and not trained on yet
      manifest.json                                size and sha256 of every file

A checkpoint is written beside its place as `step-40.partial`, flushed to disk, and renamed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.errors import CheckpointError
from mrl.system import shared_disk

MANIFEST = "manifest.json"
STATE = "trainer/state.json"
IN_FLIGHT = "trainer/in_flight.json.gz"
"""A part of the state with a number for every token, so it is packed; older checkpoints have it in `STATE`."""
SERVED = "trainer/served.safetensors"
"""The rollout workers' weights, where they were older than the actor's when the checkpoint was written."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk."""

    path: Path
    step: int

    @property
    def state(self) -> dict[str, Any]:
        """What the orchestrator recorded, but for what was in flight. Raises CheckpointError."""
        state: dict[str, Any] = self._read(STATE, lambda path: json.loads(path.read_text()))
        return state

    @property
    def in_flight(self) -> Any:
        """What the orchestrator recorded as drawn or generated and not trained on yet. Raises CheckpointError."""
        if not (self.path / IN_FLIGHT).exists():
            return self.state["in_flight"]
        return self._read(IN_FLIGHT, lambda path: json.loads(gzip.decompress(path.read_bytes())))

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def _read(self, name: str, read: Callable[[Path], Any]) -> Any:
        try:
            return read(self.path / name)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise CheckpointError(f"{self.path / name}: cannot be read ({error}); use an earlier checkpoint") from None

    def problems(self) -> list[str]:
        """What is missing or damaged, file by file; empty when it is intact."""
        try:
            manifest = json.loads((self.path / MANIFEST).read_text())["files"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return [f"{self.path / MANIFEST}: cannot be read ({error})"]
        found = []
        for name, recorded in manifest.items():
            file = self.path / name
            if not file.is_file():
                found.append(f"{file}: missing")
            elif file.stat().st_size != recorded["size"]:
                found.append(f"{file}: {file.stat().st_size} bytes instead of {recorded['size']}")
            elif _sha256(file) != recorded["sha256"]:
                found.append(f"{file}: damaged (its sha256 is not the one recorded)")
        return found


def write_checkpoint(path: Path, write_files: Callable[[Path], None], state: dict[str, Any]) -> None:
    """Write a checkpoint at `path`, whole or not at all. Raises CheckpointError.

    write_files: writes the model and whatever else into the folder it is given. state: plain data; what it has under
    `in_flight` goes into a file of its own.
    """
    state = dict(state)
    in_flight = state.pop("in_flight", None)
    partial = path.with_name(path.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "trainer").mkdir(parents=True)
        write_files(partial)
        lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in state.items())
        (partial / STATE).write_text("{\n" + ",\n".join(lines) + "\n}\n")
        if in_flight:
            packed = gzip.compress(json.dumps(in_flight, separators=(",", ":")).encode(), compresslevel=1, mtime=0)
            (partial / IN_FLIGHT).write_bytes(packed)
        files = {str(file.relative_to(partial)): file for file in sorted(partial.rglob("*")) if file.is_file()}
        manifest = {name: {"size": file.stat().st_size, "sha256": _sha256(file)} for name, file in files.items()}
        (partial / MANIFEST).write_text(json.dumps({"version": 1, "files": manifest}, indent=1))
        _flush(partial)
        if path.exists():  # an earlier write of this step, before the run was rewound
            shutil.rmtree(path)
        os.replace(partial, path)
        _flush_folder(path.parent)
        shared_disk.commit(path)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) or "No space left" in str(error) or "I/O error" in str(error):
            raise CheckpointError(
                f"checkpoint {path} could not be written ({error}); free space there, or choose another run_dir. "
                "Earlier checkpoints are as they were"
            ) from error
        raise


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """A run's checkpoints by step. Folders that are still being written are not among them."""
    found = []
    for path in (run / "checkpoints").glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdigit() and path.is_dir():
            found.append(Checkpoint(path, int(number)))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_intact(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The latest checkpoint without a problem, and the problems of the later ones."""
    problems: list[str] = []
    for checkpoint in reversed(list_checkpoints(run)):
        found = checkpoint.problems()
        if not found:
            return checkpoint, problems
        problems += found
    return None, problems


def best_step(run: Path) -> int | None:
    """The step of the best checkpoint so far by `best_metric`, or None."""
    found = [best for checkpoint in list_checkpoints(run) if (best := checkpoint.state.get("best"))]
    return found[-1]["step"] if found else None


def find_checkpoint(run: Path, which: str) -> Checkpoint:
    """`newest`, `best` or a step's number. Raises CheckpointError with the steps there are."""
    checkpoints = list_checkpoints(run)
    steps = {checkpoint.step: checkpoint for checkpoint in checkpoints}
    if not steps:
        raise CheckpointError(f"{run}: this run has no checkpoint yet; train it longer, or lower save_steps")
    wanted = max(steps) if which == "newest" else best_step(run) if which == "best" else None
    if wanted is None and which.removeprefix("step-").isdigit():
        wanted = int(which.removeprefix("step-"))
    if wanted not in steps:
        listed = ", ".join(str(step) for step in steps)
        raise CheckpointError(f"{run}: no checkpoint {which!r}; there are newest, best (with best_metric) and {listed}")
    return steps[wanted]


def copy_model(checkpoint: Path, target: Path) -> None:
    """Copy a checkpoint's model to a folder, without what training resumes from. Raises CheckpointError."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file in checkpoint.iterdir():
            if file.is_file() and file.name != MANIFEST:
                shutil.copy2(file, target / file.name)
    except OSError as error:
        raise CheckpointError(
            f"{target}: the model cannot be written there ({error.strerror}); {checkpoint} has it"
        ) from error


def prune(run: Path, keep: int, protect: set[int]) -> list[Path]:
    """Delete all but the latest `keep` checkpoints and those of the steps in `protect`. Returns what was deleted."""
    deleted = []
    for checkpoint in list_checkpoints(run)[: -keep or None]:
        if checkpoint.step not in protect:
            # Renamed first, so that a half-deleted one is never taken for whole.
            doomed = checkpoint.path.with_name(checkpoint.path.name + ".deleted")
            os.replace(checkpoint.path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            deleted.append(checkpoint.path)
    return deleted


def remove_leftovers(run: Path) -> None:
    """Remove what a killed process was writing or deleting."""
    for pattern in ("*.partial", "*.deleted"):
        for path in (run / "checkpoints").glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    for path in _files_then_folders(folder):
        _flush_folder(path) if path.is_dir() else _flush_file(path)


def _files_then_folders(folder: Path) -> Iterator[Path]:
    paths = [folder, *folder.rglob("*")]
    yield from (path for path in paths if not path.is_dir())
    yield from (path for path in paths if path.is_dir())


def _flush_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
