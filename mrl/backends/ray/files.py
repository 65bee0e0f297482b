"""Files of a cluster whose machines have no disk in common.

They travel through Ray's object store, a piece at a time, and are never whole in memory. On every machine a small actor
of its own, the keeper, writes and reads them: it outlives workers, and its folder is removed with it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

from mrl.errors import WorkerDied
from mrl.system import scratch
from mrl.system.threads import in_thread

PIECE = 32 << 20
"""Bytes on the way at a time."""


class Keeper:
    """A Ray actor: the files below `folder` on its machine."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        scratch.sweep(self.folder.parent)
        scratch.claim(self.folder)

    def make_folder(self, path: str) -> None:
        """Also of the folders above it."""
        Path(path).mkdir(parents=True, exist_ok=True)

    def write(self, path: str, offset: int, piece: bytes) -> None:
        """Write a piece of a file; the first one makes it."""
        with open(path, "r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(piece)

    def rename(self, partial: str, path: str) -> None:
        """What was written is whole."""
        if not os.path.exists(path):
            os.rename(partial, path)

    def listing(self, path: str) -> list[tuple[str, int | None]]:
        """See `listing`."""
        return listing(Path(path))

    def read(self, path: str, offset: int) -> bytes:
        """A piece of a file."""
        return read(path, offset)

    def remove(self, path: str) -> None:
        """Remove a folder."""
        shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        scratch.remove(self.folder)


class Files:
    """folder: for everything that this run has on the disks of the cluster's machines, the same path on each."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.keepers: dict[str, Any] = {}
        self.there: dict[Path, str] = {}
        """Path on the machines, by path here."""
        self.brought: dict[tuple[Path, str], asyncio.Task[None]] = {}
        """By path here and machine."""

    async def put(self, path: Path, nodes: set[str]) -> str:
        """Copy a file or folder to these machines. Returns its path there. Raises OSError."""
        there = self.there.setdefault(path, f"{self.folder}/{len(self.there)}/{path.name}")
        await asyncio.gather(*(self._bring(path, node) for node in nodes))
        return there

    async def bring_to(self, node: str) -> None:
        """Copy everything that was put to a machine, if it is still here."""
        await asyncio.gather(*(self._bring(path, node) for path in list(self.there) if path.exists()))

    async def fetch(self, name: str, node: str, there: str, here: Path) -> None:
        """Bring a folder from a machine, whole or not at all, and remove it there. name: of the worker that wrote it.
        Raises OSError, and WorkerDied when the machine is gone."""
        from ray.exceptions import RayError, RayTaskError

        partial = here.with_name(f"{here.name}.partial")
        keeper = self._keeper(node)
        try:
            await in_thread(shutil.rmtree, partial, True)
            partial.mkdir(parents=True)
            for relative, size in await keeper.listing.remote(there):
                if size is None:
                    (partial / relative).mkdir(parents=True, exist_ok=True)
                    continue
                (partial / relative).parent.mkdir(parents=True, exist_ok=True)
                with (partial / relative).open("wb") as file:
                    for offset in range(0, size, PIECE):
                        piece = await keeper.read.remote(f"{there}/{relative}", offset)
                        await in_thread(file.write, piece)
            partial.rename(here)
            await keeper.remove.remote(there)
        except RayTaskError as error:
            raise OSError(f"{name}: {error.cause}") from error
        except RayError as error:
            raise WorkerDied(f"{name}: its machine is gone, and {there} with it", name) from error
        finally:
            await in_thread(shutil.rmtree, partial, True)

    async def close(self) -> None:
        """Remove what was copied, on all machines."""
        import ray

        for task in self.brought.values():
            task.cancel()
        asked = [keeper.close.remote() for keeper in self.keepers.values()]
        if asked:
            await in_thread(lambda: ray.wait(asked, num_returns=len(asked), timeout=_CLOSING_SECONDS))
        for keeper in self.keepers.values():
            ray.kill(keeper, no_restart=True)
        self.keepers.clear()
        self.brought.clear()

    async def _bring(self, path: Path, node: str) -> None:
        """Once for each machine, however many ask."""
        task = self.brought.get((path, node))
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self.brought[path, node] = asyncio.create_task(self._copy(path, node))
        await asyncio.shield(task)

    async def _copy(self, path: Path, node: str) -> None:
        """Under another name first: what has its name is whole."""
        keeper, there = self._keeper(node), self.there[path]
        partial = f"{there}.{node}.partial"
        await keeper.make_folder.remote(os.path.dirname(there))
        for relative, size in await in_thread(listing, path):
            target = f"{partial}/{relative}" if path.is_dir() else partial
            if size is None:
                await keeper.make_folder.remote(target)
                continue
            await keeper.make_folder.remote(os.path.dirname(target))
            source = str(path / relative) if path.is_dir() else str(path)
            for offset in range(0, max(size, 1), PIECE):
                piece = await in_thread(read, source, offset)
                await keeper.write.remote(target, offset, piece)
        await keeper.rename.remote(partial, there)

    def _keeper(self, node: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self.keepers:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            self.keepers[node] = (
                ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=strategy, max_restarts=0).remote(self.folder)
            )
        return self.keepers[node]


_CLOSING_SECONDS = 10.0


def listing(path: Path) -> list[tuple[str, int | None]]:
    """Relative path and bytes of every file; None for a folder. Of a file, itself."""
    if path.is_file():
        return [(path.name, path.stat().st_size)]
    return [("", None), *((str(each.relative_to(path)), _bytes(each)) for each in sorted(path.rglob("*")))]


def read(path: str, offset: int) -> bytes:
    """At most `PIECE` bytes of a file."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(PIECE)


def _bytes(path: Path) -> int | None:
    return None if path.is_dir() else path.stat().st_size
