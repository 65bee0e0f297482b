"""The real vLLM dying, hanging, and lacking memory: it is found, said, and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mrl.config import ModelConfig
from mrl.engines.vllm import VLLMEngine
from mrl.errors import EngineDied, EngineError
from mrl.models import load_model
from mrl.sync.files import publish
from mrl.types import Completion, GenerateRequest, SamplingParams

pytestmark = pytest.mark.vllm

LENGTH = 512
STALL = 18.0
"""Seconds; the first step of an engine takes three, and several times that on a slow machine or a busy one."""


def config(model: str, **changes: object) -> ModelConfig:
    return ModelConfig(model=model, device="cpu", max_model_len=LENGTH, **changes)


def requests(count: int, tokens: int) -> list[GenerateRequest]:
    params = SamplingParams(max_tokens=tokens)
    return [GenerateRequest(f"r{i}", (65 + i % 3, 66, 67), params, seed=100 + i) for i in range(count)]


async def begin(engine: VLLMEngine) -> asyncio.Task[list[Completion]]:
    """Far more work than a test takes, in flight."""
    task = asyncio.create_task(engine.generate(requests(64, 480)))
    while (await engine.health())["in_flight"] < 32:
        await asyncio.sleep(0.001)
    return task


def processes_of(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(path.name))
    return found


def hosts(owner: int) -> list[int]:
    """The processes that speak to this owner's engines; each leads a group."""
    children = [pid for path in Path(f"/proc/{owner}/task").glob("*/children") for pid in path.read_text().split()]
    return [pid for pid in map(int, children) if b"vllm_process.host" in command(pid)]


def core_of(group: int) -> int:
    """vLLM's own process, with the model, behind the one that speaks to us; 0 while there is none."""
    found = [pid for pid in processes_of(group) if b"spawn_main" in command(pid) or b"EngineCore" in command(pid)]
    return found[0] if found else 0


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def shared_by(pids: list[int]) -> set[Path]:
    """Files in shared memory that these processes have mapped, by what they are called there."""
    inodes = set()
    for pid in pids:
        try:
            mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        inodes |= {int(line.split()[4]) for line in mapped if "/dev/shm/" in line}
    folders = ["/dev/shm", *map(str, Path("/dev/shm").glob("mrl-*/"))]
    return {
        Path(e.path) for folder in folders if os.path.isdir(folder) for e in os.scandir(folder) if e.inode() in inodes
    }


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- dying and hanging ----------------------------------------------------------------------------------------------


@pytest.fixture
def engine(vllm_model: str) -> Iterator[VLLMEngine]:
    """One to be broken. What it leaves is looked for when the test is over."""
    engine = VLLMEngine.create(config(vllm_model), vllm_stall_timeout=STALL)
    asyncio.run(engine.generate(requests(2, 2)))
    group, folder = engine.pid, engine._process.folder
    shared = shared_by(processes_of(group))
    yield engine
    assert not processes_of(group), "gone as soon as its death is known, before anybody closes it"
    engine.close()
    engine.close()
    assert not folder.exists()
    assert not [path for path in shared if path.exists()]


async def dies(engine: VLLMEngine, running: asyncio.Task[list[Completion]], what: str) -> None:
    with pytest.raises(EngineDied, match=what):
        await running
    for call in (engine.generate(requests(1, 1)), engine.health()):
        with pytest.raises(EngineDied, match=what):
            await call


@pytest.mark.parametrize("killed", ["host", "core"])
async def test_one_that_is_killed(engine: VLLMEngine, killed: str) -> None:
    running = await begin(engine)
    os.kill(engine.pid if killed == "host" else core_of(engine.pid), signal.SIGKILL)
    await dies(
        engine,
        running,
        "killed without a word; .* lower vllm_kv_cache_gb from 1 to 0.5" if killed == "host" else "died",
    )


def test_several_processes_killed_at_once(vllm_model: str) -> None:
    """Nobody of them is left to tidy up: neither the workers' shared memory nor that of Python's own trackers."""
    engine = VLLMEngine.create(config(vllm_model), tensor_parallel_size=2)
    group = engine.pid
    shared = shared_by(processes_of(group))
    assert shared
    os.killpg(group, signal.SIGKILL)
    with pytest.raises(EngineDied):
        asyncio.run(engine.generate(requests(1, 500)))
    assert not [path for path in shared if path.exists()]
    engine.close()


async def test_one_that_stops_altogether(engine: VLLMEngine) -> None:
    running = await begin(engine)
    os.killpg(engine.pid, signal.SIGSTOP)
    await dies(engine, running, "hangs: it does not answer for .* s .vllm_stall_timeout")


async def test_one_whose_model_stops_and_what_only_looks_like_it(
    engine: VLLMEngine, vllm_model: str, tmp_path: Path
) -> None:
    running = await begin(engine)
    await engine.pause()
    await asyncio.sleep(1.5 * STALL)
    assert (await engine.health())["in_flight"], "paused, and not called hanging"
    await engine.resume()
    core = core_of(engine.pid)
    ref = publish(dict(load_model(config(vllm_model)).state_dict()), tmp_path, 1)
    os.kill(core, signal.SIGSTOP)
    update = asyncio.create_task(asyncio.to_thread(engine.load_weights, ref))
    await asyncio.sleep(1.5 * STALL)
    assert not update.done()
    os.kill(core, signal.SIGCONT)
    assert await update == 1, "slow to load, and not called hanging"
    assert {c.finish_reason for c in await running} <= {"length", "stop"}
    running = await begin(engine)
    os.kill(core, signal.SIGSTOP)
    await dies(engine, running, "hangs: none of its .* requests gets a token for")


# --- starting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gib", "message"),
    [
        (0.0003, "lower max_model_len from 512 to 128, or raise vllm_kv_cache_gb from 0.0003 to 0.0014"),
        (0.00001, "raise vllm_kv_cache_gb from 1e-05 to 1"),
        (100_000.0, r"GiB of memory are free: lower vllm_kv_cache_gb from 100000 to [\d.]+ or less"),
    ],
)
def test_a_cache_that_does_not_fit(vllm_model: str, gib: float, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        VLLMEngine.create(config(vllm_model), vllm_kv_cache_gb=gib)


def test_a_process_without_memory(vllm_model: str, tmp_path: Path) -> None:
    """Limited by the system, as in a container: the cache is larger than what it may still take."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -v 4000000\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(EngineError, match=r"no more memory; .*lower vllm_kv_cache_gb from 6 to 3"):
        VLLMEngine.create(config(vllm_model), vllm_python=str(python), vllm_kv_cache_gb=6)


@pytest.mark.parametrize("killed", ["host", "core"])
def test_a_process_that_is_killed_while_it_starts(vllm_model: str, killed: str) -> None:
    """As the kernel does when memory runs out."""
    groups: list[int] = []

    def kill() -> None:
        until(lambda: bool(hosts(os.getpid())))
        groups.extend(hosts(os.getpid()))
        if killed == "core":
            until(lambda: core_of(groups[0]) > 0)
        os.kill(groups[0] if killed == "host" else core_of(groups[0]), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(EngineError, match=r"memory probably does not suffice: lower vllm_kv_cache_gb from 1 to 0.5"):
        VLLMEngine.create(config(vllm_model))
    thread.join()
    assert not processes_of(groups[0])


def test_what_cannot_start_says_why(vllm_model: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="vllm_python: /nowhere/python does not start"):
        VLLMEngine.create(config(vllm_model), vllm_python="/nowhere/python")
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    with pytest.raises(EngineError, match=r"No module named '(torch|vllm)'"):
        VLLMEngine.create(config(vllm_model), vllm_python=str(bare / "bin" / "python"))
    with pytest.raises(EngineError, match="lora_r"):
        VLLMEngine.create(config(vllm_model, use_lora=True, lora_r=600), lora_sync="adapter")


# --- the run around it ----------------------------------------------------------------------------------------------

RUN = """
import sys
from mrl import MRLTrainer

def reward(completions, **_):
    if {fails!r} == "exception" and calls > 2:
        raise SystemExit("the reward ends the program")
    return [len(set(text)) + 0.01 * len(text) for text in completions]

calls = 0
def counted(completions, **columns):
    global calls
    calls += 1
    print("step", flush=True)
    return reward(completions, **columns)

MRLTrainer(
    model={model!r}, device="cpu", train_dataset=[{{"prompt": f"say {{i}}"}} for i in range(8)], reward_funcs=counted,
    run_dir={run_dir!r}, report_to=[], max_steps={steps}, batch_size=4, num_generations=4, max_completion_length=64,
    max_model_len=256, engine="vllm", num_rollout_workers=1, weight_sync_method={method!r}, weight_sync_dir={where!r},
).train()
"""


@pytest.mark.parametrize(
    ("ends", "method"),
    [("kill", "direct"), ("kill", "reload"), ("interrupt", "direct"), ("exception", "direct"), ("normally", "reload")],
)
def test_a_run_leaves_nothing(ends: str, method: str, vllm_model: str, tmp_path: Path) -> None:
    """However it ends: no process, no shared memory, no temporary folder, no weights."""
    temporary = Path(tempfile.mkdtemp(prefix="mrl-t-", dir="/tmp"))
    folder = tmp_path / "run"
    program = RUN.format(
        fails=ends,
        model=vllm_model,
        run_dir=str(folder),
        steps=2 if ends == "normally" else 10_000,
        method=method,
        where=str(temporary) if method == "reload" else None,
    )
    environment = os.environ | {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as trainer:
        assert trainer.stdout is not None
        for _ in range(2):
            assert trainer.stdout.readline() == "step\n", trainer.communicate()[1]
        (group,) = hosts(trainer.pid)
        shared = shared_by([trainer.pid, *processes_of(group)])
        if ends == "kill":
            trainer.kill()
        elif ends == "interrupt":
            trainer.send_signal(signal.SIGINT)
        trainer.communicate(timeout=60)
    until(lambda: not processes_of(group))
    assert (method == "direct") == any("/mrl-" in str(path) for path in shared)
    assert not [path for path in shared if path.exists()]
    assert not list(temporary.iterdir())
    assert not (folder / "weights").exists()
    temporary.rmdir()
