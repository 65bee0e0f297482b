"""Two Ray nodes, of which one falls silent and comes back. Run by test_ray_nodes.py in a process of its own.

All processes of a node are stopped, so that it answers nothing and no connection ends, as when its network is cut; they
go on later, as when it is healed.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from mrl.backends.base import Resources
from mrl.backends.ray import RayBackend, cluster
from mrl.errors import WorkerDied
from tests.backends.workers import Worker

SECONDS = 20.0
"""Generous: 8 s on an idle machine, 62 without our settings."""


async def main(folder: Path) -> None:
    os.environ.update(cluster.HEALTH)
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20})
    second = nodes.add_node(num_cpus=1, object_store_memory=100 << 20)
    backend = RayBackend(60.0, address=nodes.address)
    assert not backend.shares_disk
    try:
        (folder / "file").write_text("content")
        needs = {"near": Resources(), "far": Resources()}
        await backend.reserve(needs)
        workers = [await backend.spawn(Worker, name=name, resources=r, args={}) for name, r in needs.items()]
        assert len({worker.node for worker in workers}) == 2
        there = await backend.put(folder / "file")
        assert there != str(folder / "file")
        assert [await worker.call("read", there) for worker in workers] == ["content"] * 2
        lost = next(worker for worker in workers if worker.node == second.node_id)
        kept = next(worker for worker in workers if worker is not lost)
        await bring_back(backend, lost, folder)

        stopped = processes_of(second)
        for process in stopped:
            process.suspend()
        start = time.monotonic()
        try:
            await lost.call("wait", 60)
        except WorkerDied as error:
            print(f"noticed after {time.monotonic() - start:.1f} s: {error}", flush=True)
        assert time.monotonic() - start < SECONDS
        assert await kept.call("add", 1) == 1
        nodes.add_node(num_cpus=1, object_store_memory=100 << 20)
        again = await backend.spawn(Worker, name=lost.name, resources=Resources(), args={})
        assert again.node not in (lost.node, kept.node)
        assert await again.call("read", there) == "content"
        for process in stopped:
            process.resume()
        psutil.wait_procs(stopped, timeout=SECONDS)
        assert not await lost.alive()
        assert await again.call("add", 1) == 1
        assert await kept.call("add", 1) == 2
    finally:
        await backend.close()
        nodes.shutdown()
    print("done", flush=True)


async def bring_back(backend: RayBackend, worker: Any, folder: Path) -> None:
    """A folder that a worker has written comes here whole, and is gone there."""
    there = backend.folder(folder, "checkpoints")
    large = os.urandom(70 << 20)
    (folder / "large").write_bytes(large)

    def write(source: str) -> None:
        (Path(there) / "step-1" / "inner").mkdir(parents=True)
        (Path(there) / "step-1" / "inner" / "large").write_bytes(Path(source).read_bytes())

    await worker.call("apply", write, await backend.put(folder / "large"))
    await backend.fetch(worker, f"{there}/step-1", folder / "step-1")
    assert (folder / "step-1" / "inner" / "large").read_bytes() == large
    assert not (Path(there) / "step-1").exists()


def processes_of(node: Any) -> list[psutil.Process]:
    """Ray's on a node, and those of the workers there."""
    raylets = [psutil.Process(info.process.pid) for info in node.all_processes["raylet"]]
    return [*raylets, *(child for raylet in raylets for child in raylet.children(recursive=True))]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="mrl-test-") as made:
        asyncio.run(main(Path(made)))
