"""What runs in vLLM's environment needs nothing of ours there; what it leaves behind is removed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mrl.engines.vllm.process import wire
from mrl.engines.vllm.process.ending import end_group, shared_memory


@pytest.mark.slow
def test_its_modules_need_only_torch() -> None:
    program = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'pydantic', 'transformers', 'safetensors', 'datasets', 'peft', 'yaml'}:\n"
        "            raise ImportError(name + ' is not for this environment')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import mrl.engines.vllm.process.wire, mrl.engines.vllm.process.ending\n"
        "import mrl.weights.checksum, mrl.weights.tensors\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


async def test_messages_arrive_whole_and_in_order(tmp_path) -> None:  # type: ignore[no-untyped-def]
    got: list[object] = []
    finished = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                got.append(await wire.read(reader))
        except asyncio.IncompleteReadError:
            writer.close()
            finished.set()

    server = await asyncio.start_unix_server(take, str(tmp_path / "s"))
    _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
    sent = [{"ids": list(range(100_000)), "logprobs": [-0.1234567890123456789]}, None, "ü", 2**62]
    for message in sent:
        wire.write(writer, message)
    await writer.drain()
    writer.close()
    await finished.wait()
    server.close()
    assert got == sent


@pytest.mark.parametrize("how", ["running", "stopped", "killed at once"])
def test_a_killed_group_leaves_no_shared_memory(how: str) -> None:
    program = (
        "import time, multiprocessing\nfrom multiprocessing import shared_memory\n"
        "kept = shared_memory.SharedMemory(create=True, size=1000)\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(kept.name, 'sem.' + lock._semlock.name[1:], flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        files = {Path("/dev/shm") / name for name in process.stdout.readline().split()}
        known = shared_memory(process.pid)
        assert known == files
        start = time.monotonic()
        if how == "stopped":
            os.killpg(process.pid, signal.SIGSTOP)
        if how == "killed at once":  # with Python's tracker of such files
            os.killpg(process.pid, signal.SIGKILL)
            end_group(process.pid, known)
        else:
            end_group(process.pid)
        assert time.monotonic() - start < 3
    assert not [path for path in files if path.exists()]
