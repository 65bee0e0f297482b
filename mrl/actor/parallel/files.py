"""Files of ranks whose disk is not rank 0's, brought there over the process group."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from mrl.actor.parallel.world import World
from mrl.errors import CheckpointError

CHUNK = 16 << 20
"""Bytes that are sent at a time."""


def gather_files(world: World, folder: Path, own: Path | None) -> None:
    """Copy the files of folders that ranks have of their own into rank 0's. own: this rank's; None = it has none.

    Called on every rank. Raises CheckpointError, on every rank, for what cannot be read or written.
    """
    sizes = {} if own is None else {path.name: path.stat().st_size for path in sorted(own.iterdir())}
    problem: str | None = None
    for rank, files in enumerate(world.everyone(sizes)):
        for name, size in files.items():
            if rank == world.rank and own is not None:
                problem = _send(own / name, size) or problem
            elif world.first:
                problem = _receive(folder / name, size, rank) or problem
    if problems := [said for said in world.everyone(problem) if said is not None]:
        raise CheckpointError(f"{folder}: {problems[0]}; free space there, or choose another run_dir")


def _send(path: Path, size: int) -> str | None:
    """Everything that was announced, come what may: rank 0 waits for it. What went wrong, or None."""
    problem: str | None = None
    file = None
    try:
        file = path.open("rb")
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror})"
    for start in range(0, size, CHUNK):
        chunk = torch.zeros(min(CHUNK, size - start), dtype=torch.uint8)
        if file is not None and problem is None:
            try:
                if file.readinto(chunk.numpy().data) != len(chunk):
                    problem = f"{path} became shorter"
            except OSError as error:
                problem = f"{path} cannot be read ({error.strerror})"
        dist.send(chunk, 0)
    if file is not None:
        file.close()
    return problem


def _receive(path: Path, size: int, rank: int) -> str | None:
    """All of it, also where nothing can be written. What went wrong, or None."""
    problem: str | None = None
    file = None
    try:
        file = path.open("wb")
    except OSError as error:
        problem = f"{path.name} cannot be written ({error.strerror})"
    for start in range(0, size, CHUNK):
        chunk = torch.empty(min(CHUNK, size - start), dtype=torch.uint8)
        dist.recv(chunk, rank)
        if file is not None and problem is None:
            try:
                file.write(chunk.numpy().data)
            except OSError as error:
                problem = f"{path.name} cannot be written ({error.strerror})"
    if file is not None:
        try:
            file.close()
        except OSError as error:
            problem = problem or f"{path.name} cannot be written ({error.strerror})"
    return problem
