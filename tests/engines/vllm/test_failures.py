"""The real vLLM that does not start or lacks memory: it is said why. And runs of it that end: nothing stays behind.

What happens to an engine that dies or hangs while it works is seen in `tests/workers/test_vllm_restart.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from mrl.config import ModelConfig
from mrl.engines.vllm.engine import VLLMEngine
from mrl.errors import EngineError
from tests.engines.vllm.processes import core_of, found, hosts, processes_of, shared_by, until

pytestmark = pytest.mark.vllm


def config(model: str, **changes: object) -> ModelConfig:
    return ModelConfig(model=model, device="cpu", max_model_len=512, **changes)


# --- starting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gib", "message"),
    [
        (0.0003, "lower max_model_len from 512 to 128, or raise vllm_kv_cache_gb from 0.0003 to 0.0014"),
        # These words of vLLM's are also in test_vllm_memory.py.
        pytest.param(0.00001, "raise vllm_kv_cache_gb from 1e-05 to 1", marks=pytest.mark.soak),
        pytest.param(
            100_000.0,
            r"GiB of memory are free: lower vllm_kv_cache_gb from 100000 to [\d.]+ or less",
            marks=pytest.mark.soak,
        ),
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
    others = hosts(os.getpid())  # engines that other tests share

    def started() -> list[int]:
        return [group for group in hosts(os.getpid()) if group not in others]

    def core() -> int | None:
        """Not a command that is just being started, which looks the same for a moment."""
        first = core_of(groups[0])
        time.sleep(0.1)
        return first if first == core_of(groups[0]) else None

    def kill() -> None:
        until(lambda: bool(started()))
        groups.extend(started())
        if killed == "host":
            os.kill(groups[0], signal.SIGKILL)
        else:
            until(lambda: core() is not None)
            os.kill(found(core_of(groups[0])), signal.SIGKILL)

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
    [
        ("kill", "direct"),
        ("interrupt", "reload"),
        pytest.param("kill", "reload", marks=pytest.mark.soak),
        pytest.param("interrupt", "direct", marks=pytest.mark.soak),
        pytest.param("exception", "direct", marks=pytest.mark.soak),
        pytest.param("normally", "reload", marks=pytest.mark.soak),
    ],
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
