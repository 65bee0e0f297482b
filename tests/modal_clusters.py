"""An emulator of Modal's control plane (MRL_MODAL_EMULATOR) that has clusters as well: `modal.clustered`.

Its containers have one address, so two of them are the most that a program can tell apart by ports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

KEPT = "emulator"
"""File in the folder of its state that says where the emulator is: containers have no other way to know."""


def emulator() -> Path:
    """The script."""
    if "--container" in sys.argv:
        return Path((Path(sys.argv[-1]).parents[2] / KEPT).read_text())
    return Path(os.environ["MRL_MODAL_EMULATOR"])


EMULATOR = emulator()
NAMES: dict[str, Any] = {"__name__": "emulator", "__file__": __file__}
"""The emulator's own, which starts containers by the file that this is."""
exec(compile(EMULATOR.read_text(), str(EMULATOR), "exec"), NAMES)
pb, State, Task = NAMES["pb"], NAMES["State"], NAMES["Task"]
scale, run_task = State.scale, State.run_task


class Group:
    """The containers of one cluster."""

    def __init__(self, fn: Any, size: int) -> None:
        self.id, self.addresses = NAMES["nid"]("cu"), {}
        self.members = [Task(fn) for _ in range(size)]
        for rank, task in enumerate(self.members):
            task.group, task.rank, task.inputs = self, rank, asyncio.Queue()


def scale_groups(self: Any, fn: Any) -> None:
    """A cluster, all of it or nothing, where a function has inputs."""
    size = (fn.base or fn).defn._experimental_group_size
    if not size:
        scale(self, fn)
    elif fn.queue and not fn.tasks:
        for task in Group(fn, size).members:
            fn.tasks[task.id] = self.tasks[task.id] = task
            self.spawn(self.run_task(task))


async def run_member(self: Any, task: Any) -> None:
    """A container that ends takes its processes along, and its cluster."""
    watching = asyncio.create_task(end_together(task)) if hasattr(task, "group") else None
    await run_task(self, task)
    if watching is not None:
        await watching


async def end_together(task: Any) -> None:
    """A process that it leaves behind has its output open, for which the emulator would wait."""
    while task.proc is None or is_alive(task.proc.pid):
        await asyncio.sleep(0.2)
    for member in task.group.members:
        if member.proc is not None:
            NAMES["kill_group"](member.proc.pid, 9)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Servicer(NAMES["ContainerServicer"]):  # type: ignore[misc]
    """What a container talks to."""

    async def _FunctionGetInputs(self, request: Any) -> Any:  # noqa: N802 - the emulator's way to name them
        """Those of the first container reach all."""
        if not hasattr(self.t, "group"):
            return await super()._FunctionGetInputs(request)
        if self.t.rank == 0:
            response = await super()._FunctionGetInputs(request)
            for item in response.inputs:
                for other in self.t.group.members[1:]:
                    other.inputs.put_nowait(item)
            return response
        self.t.ready = True
        try:
            item = await asyncio.wait_for(self.t.inputs.get(), 50)
        except TimeoutError:
            return pb.FunctionGetInputsResponse()
        return pb.FunctionGetInputsResponse(inputs=[item])

    async def _FunctionPutOutputs(self, request: Any) -> None:  # noqa: N802
        if getattr(self.t, "rank", 0) == 0:
            await super()._FunctionPutOutputs(request)

    async def _TaskClusterHello(self, request: Any) -> Any:  # noqa: N802
        group = self.t.group
        group.addresses[self.t.rank] = request.container_ip
        while len(group.addresses) < len(group.members):
            await asyncio.sleep(0.05)
        addresses = [group.addresses[rank] for rank in sorted(group.addresses)]
        return pb.TaskClusterHelloResponse(
            cluster_id=group.id,
            cluster_rank=self.t.rank,
            container_ips=addresses,
            container_ipv4_ips=["127.0.0.1"] * len(addresses),
        )


def be_container(spec: Path) -> None:
    """With the name by which Modal's client finds its container's address in a cluster."""
    hosts = spec.with_name("hosts")
    hosts.write_text(Path("/etc/hosts").read_text() + "\n::1 i6pn.modal.local\n")
    said = json.loads(spec.read_text())
    said["files"]["/etc/hosts"] = str(hosts)
    spec.write_text(json.dumps(said))
    NAMES["container_main"](str(spec))


if "--container" in sys.argv:
    be_container(Path(sys.argv[sys.argv.index("--container") + 1]))
elif "--enter" in sys.argv:
    NAMES["enter_main"](sys.argv[sys.argv.index("--enter") + 1 :])
else:
    State.scale, State.run_task = scale_groups, run_member
    NAMES["ContainerServicer"] = NAMES["servicer"](NAMES["api_grpc"].ModalClientBase)(Servicer)
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", required=True)
    parser.add_argument("--port-file")
    parser.set_defaults(port=None, no_isolate=False, verbose=False)
    given = parser.parse_args()
    Path(given.state, KEPT).write_text(str(EMULATOR))
    asyncio.run(NAMES["amain"](given))
