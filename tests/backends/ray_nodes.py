"""Two Ray nodes, of which one falls silent and comes back. Run by test_ray_nodes.py in a process of its own: within the
first of two networks, whose names are its arguments, or, without any, with nodes that share this machine's network."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from mrl.backends.base import Resources
from mrl.backends.ray import RayBackend, cluster
from mrl.errors import WorkerDied
from tests.backends.two_networks import HEAD, OTHER, Networks
from tests.backends.workers import Worker
from tests.ports import wait_for

NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
SECONDS = 20.0
"""Generous: 8 s on an idle machine, 62 without our settings."""


class Stopped:
    """Nodes of one machine. All processes of the second are stopped, so that it answers nothing and no connection ends;
    they go on later."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.nodes = Cluster(initialize_head=True, head_node_args=NODE)
        self.node = self.nodes.add_node(**NODE)
        self.address = self.nodes.address

    def second(self) -> str:
        return str(self.node.node_id)

    def part(self) -> None:
        raylets = [psutil.Process(info.process.pid) for info in self.node.all_processes["raylet"]]
        self.processes = [*raylets, *(child for raylet in raylets for child in raylet.children(recursive=True))]
        for process in self.processes:
            process.suspend()

    def add(self) -> None:
        self.nodes.add_node(**NODE)

    def join(self) -> None:
        for process in self.processes:
            process.resume()
        psutil.wait_procs(self.processes, timeout=SECONDS)

    def close(self) -> None:
        self.nodes.shutdown()


class Cut:
    """Nodes in networks of their own; this process is in the first one's. The cable between them is cut, and healed."""

    def __init__(self, networks: Networks) -> None:
        self.networks = networks
        self.address = f"{HEAD}:6390"
        self.started: list[subprocess.Popen[bytes]] = []
        self._start(["--head", "--port=6390", f"--node-ip-address={HEAD}", "--include-dashboard=false"])
        wait_for(6390, self.started[0], host=HEAD)
        self._start([f"--address={self.address}", f"--node-ip-address={OTHER}"], self.networks.within(1))

    def second(self) -> str:
        (found,) = [node["NodeID"] for node in cluster.nodes() if node["NodeManagerAddress"] == OTHER]
        return str(found)

    def part(self) -> None:
        self.networks.cut()

    def add(self) -> None:
        self._start([f"--address={self.address}", f"--node-ip-address={HEAD}"])

    def join(self) -> None:
        self.networks.heal()

    def close(self) -> None:
        for process in self.started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file = Path("/tmp/ray/ray_current_cluster")  # the head's, which other processes would take for a cluster
        if file.exists() and file.read_text().strip() == self.address:
            file.unlink()

    def _start(self, options: list[str], within: Sequence[str] = ()) -> None:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
        memory = f"--object-store-memory={NODE['object_store_memory']}"
        self.started.append(subprocess.Popen([*within, *ray, memory, *options], start_new_session=True))


async def main(folder: Path, nodes: Stopped | Cut) -> None:
    backend = RayBackend(60.0, address=nodes.address)
    assert not backend.shares_disk
    try:
        (folder / "file").write_text("content")
        needs = {"near": Resources(), "far": Resources()}
        await backend._connect()
        async with asyncio.timeout(60):
            while len(cluster.nodes()) < 2:  # the second one says nothing of when it is there
                await asyncio.sleep(0.1)
        await backend.reserve(needs)
        workers = [await backend.spawn(Worker, name=name, resources=r, args={}) for name, r in needs.items()]
        assert len({worker.node for worker in workers}) == 2
        there = await backend.put(folder / "file")
        assert there != str(folder / "file")
        assert [await worker.call("read", there) for worker in workers] == ["content"] * 2
        second = nodes.second()
        lost = next(worker for worker in workers if worker.node == second)
        kept = next(worker for worker in workers if worker is not lost)
        await bring_back(backend, lost, folder)

        nodes.part()
        start = time.monotonic()
        nodes.add()  # it takes as long to start as the loss to be noticed
        try:
            await lost.call("wait", 60)
        except WorkerDied as error:
            print(f"noticed after {time.monotonic() - start:.1f} s: {error}", flush=True)
        assert time.monotonic() - start < SECONDS
        assert await kept.call("add", 1) == 1
        again = await backend.spawn(Worker, name=lost.name, resources=Resources(), args={})
        assert again.node not in (lost.node, kept.node)
        assert await again.call("read", there) == "content"
        nodes.join()
        assert not await lost.alive()
        assert await again.call("add", 1) == 1
        assert await kept.call("add", 1) == 2
    finally:
        await backend.close()
        nodes.close()
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


if __name__ == "__main__":
    os.environ.update(cluster.HEALTH)
    with tempfile.TemporaryDirectory(prefix="mrl-test-") as made:
        names = sys.argv[1:]
        asyncio.run(main(Path(made), Cut(Networks((names[0], names[1]))) if names else Stopped()))
