"""What the Ray backend does beside the contract of all backends (test_contract.py), on a cluster on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mrl.backends import Resources, check_backend
from mrl.backends.ray import RayBackend, cluster
from mrl.backends.ray.placement import actor_options, bundles
from mrl.errors import ConfigError, WorkerDied
from tests.backends.workers import Worker

A100 = {"CPU": 8.0, "GPU": 2.0, "memory": 64.0 * 1024**3, "accelerator_type:A100": 1.0}
A10G = {"CPU": 4.0, "GPU": 1.0, "memory": 16.0 * 1024**3, "accelerator_type:A10G": 1.0}
PLAIN = {"CPU": 2.0, "memory": 8.0 * 1024**3}


def test_what_workers_ask_of_a_cluster() -> None:
    asked = {"actor": Resources("A100", 1), "rollout-0": Resources("A10", 1), "reward-0": Resources()}
    wanted = bundles(asked, [A100, A10G])
    assert wanted["actor"] == {"CPU": 1.0, "GPU": 1.0, "accelerator_type:A100": 0.001}
    assert wanted["rollout-0"] == {"CPU": 1.0, "GPU": 1.0, "accelerator_type:A10G": 0.001}
    assert wanted["reward-0"] == {"CPU": 1.0}
    assert actor_options(wanted["actor"]) == {
        "num_cpus": 1.0,
        "num_gpus": 1.0,
        "resources": {"accelerator_type:A100": 0.001},
    }
    assert bundles({"w": Resources("any", 1, memory_mb=100)}, [PLAIN])["w"] == {"CPU": 1.0, "memory": 100.0 * 1024**2}
    assert bundles({"w": Resources("any", 1)}, [PLAIN, A100])["w"] == {"CPU": 1.0, "GPU": 1.0}
    shared = bundles({f"w{i}": Resources() for i in range(6)}, [PLAIN])  # six on two processors
    assert {one["CPU"] for one in shared.values()} == {0.25}


def test_what_no_cluster_of_these_machines_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no GPU of type H100: the cluster has A100, A10G; name one of these"):
        bundles({"actor": Resources("H100", 1)}, [A100, A10G])
    with pytest.raises(ConfigError, match="has no GPU whose type it knows"):
        bundles({"actor": Resources("H100", 1)}, [PLAIN])
    three = {f"rollout-{i}": Resources("A100", 1) for i in range(3)}
    with pytest.raises(
        ConfigError, match=r"need 3 × \(1 GPU A100, 1 CPU\), and the cluster has 2 GPU A100, 8 CPU, 65536"
    ):
        bundles(three, [A100])
    assert len(bundles(three, [A100], growing=True)) == 3
    with pytest.raises(ConfigError, match=r"1 × \(1 CPU, 9000 MB\)"):
        bundles({"w": Resources(memory_mb=9000)}, [PLAIN])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "ray://head:10001"}, r"client protocol.*ray job submit.*address: auto"),
        ({"address": ""}, "address is ''; give local, auto, or HOST:PORT"),
        ({"placement_timeout": 0}, "placement_timeout is 0; give seconds above 0"),
        ({"shared_disk": "yes"}, "shared_disk is 'yes'; give true or false"),
        ({"runtime_env": ["math-verify"]}, "give a mapping"),
        ({"adress": "auto"}, "has no option 'adress'; it has address, runtime_env"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^backend_options: .*{message}"):
        check_backend("ray", options, [])


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'mrl\[ray\]'"):
        check_backend("ray", {}, [])


@pytest.mark.ray
def test_an_environment_that_ray_does_not_know_is_refused() -> None:
    for wrong in ({"pipp": ["x"]}, {"rollout": {"env_vars": {"A": 1}}}):
        with pytest.raises(ConfigError, match=r"runtime_env.* is refused by Ray"):
            check_backend("ray", {"runtime_env": wrong}, [])


@pytest.fixture
async def backend(ray_cluster: None) -> AsyncIterator[RayBackend]:
    made = RayBackend(60.0, runtime_env={"env_vars": {"ALL": "1"}, "rollout": {"env_vars": {"MINE": "2"}}})
    yield made
    await made.close()


@pytest.mark.ray
async def test_workers_live_in_what_was_reserved(backend: RayBackend) -> None:
    """More of them than the cluster has processors, one that the reservation does not name, and one replaced."""
    import ray

    needs = {f"rollout-{i}": Resources(env={"RANK": str(i)}) for i in range(3)}
    await backend.reserve(needs)
    others = [await backend.spawn(Worker, name=name, resources=each, args={}) for name, each in needs.items()]
    other = await backend.spawn(Worker, name="environment-0", resources=Resources(), args={})
    pids = [await worker.call("pid") for worker in (*others, other)]
    assert len({*pids, os.getpid()}) == 5
    assert [await worker.call("environment", "RANK") for worker in others] == ["0", "1", "2"]
    assert [await others[0].call("environment", name) for name in ("ALL", "MINE")] == ["1", "2"]
    assert await other.call("environment", "MINE") is None
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await others[0].call("wait", 60)
    again = await backend.spawn(Worker, name="rollout-0", resources=needs["rollout-0"], args={})
    assert await again.call("pid") not in pids
    await backend.close()
    async with asyncio.timeout(10):
        while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
            await asyncio.sleep(0.05)


@pytest.mark.ray
async def test_a_request_without_room_is_refused(backend: RayBackend) -> None:
    with pytest.raises(ConfigError, match=r"need 1 × \(1 CPU, 10000000 MB\), and the cluster has"):
        await backend.reserve({"actor": Resources(memory_mb=10_000_000)})
    other = RayBackend(60.0, placement_timeout=0.5)
    await backend.reserve({"actor": Resources(cpus=2)})
    with pytest.raises(ConfigError, match=r"no room for the run's 1 workers within 0 s: others use the cluster"):
        await other.reserve({"actor": Resources(cpus=2)})
    await other.close()


@pytest.mark.ray
async def test_what_travels(backend: RayBackend) -> None:
    import ray

    worker = await backend.spawn(Worker, name="w", resources=Resources(), args={})
    large, offset = os.urandom(1 << 22), 3
    assert await worker.call("apply", lambda n: n + offset, 4) == 7
    assert await asyncio.gather(worker.call("echo", large), worker.call("add", 1)) == [large, 1]
    with pytest.raises(ConfigError, match=r"cannot be sent to a process of its own"):
        await worker.call("echo", threading.Lock())
    with pytest.raises(TypeError, match=r"apply\(\): arguments or answer cannot travel"):
        await worker.call("apply", threading.Lock)
    [reference] = await worker.call("apply", lambda: [ray.put(large)])  # the worker has dropped its own by now
    assert ray.get(reference) == large

    def warned() -> bool:
        ray.get(ray.put(1))
        return bool(ray._private.worker.blocking_get_inside_async_warned)

    assert not await worker.call("apply", warned)  # its thread may wait: no event loop does
    with pytest.raises(WorkerDied, match="other: is gone") as raised:
        await worker.call("death")
    assert raised.value.worker == "other"
    assert await worker.call("add", 1) == 2


@pytest.mark.ray
async def test_killed_and_stopped_workers(backend: RayBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.backends.base.ENDING_SECONDS", 0.2)
    for method in ("wait", "sleep"):
        worker = await backend.spawn(Worker, name="w", resources=Resources(), args={})
        pid = await worker.call("pid")
        call = asyncio.create_task(worker.call(method, 60))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerDied, match=rf"w: its process died during {method}\(\)"):
            await call
        assert time.monotonic() - start < 5
        assert not await worker.alive()
    for stop in (True, False):  # the whole process, and its thread in a call that does not end
        worker = await backend.spawn(Worker, name="w", resources=Resources(), args={})
        pid = await worker.call("pid")
        if stop:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match=r"w: sleep\(\) did not finish in 0 s"):
            await worker.call("sleep", 600, timeout=0.2)
        await worker.kill()
        await gone(pid)


async def gone(pid: int) -> None:
    import psutil

    async with asyncio.timeout(30):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.05)


@pytest.mark.ray
def test_health_settings_reach_the_cluster(ray_cluster: None) -> None:
    assert all(os.environ[name] == value for name, value in cluster.HEALTH.items())
