"""The vLLM process: one `AsyncLLM`, controlled over a socket.

    python -m mrl.engines.vllm.process.host SOCKET

It connects to the socket, reads the engine's settings, answers `{"ready": ...}`, and then answers each
`{"id", "method", "args"}` with `{"id", "result"}` or `{"id", "error", "kind"}`. When the socket closes it exits with
all processes that it started.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from mrl.engines.vllm.process.ending import end_group
from mrl.engines.vllm.process.extension import NAME, WorkerExtension
from mrl.engines.vllm.process.wire import read, write
from mrl.system import scratch
from mrl.weights.checksum import checksum as fingerprint
from mrl.weights.tensors import open_folder

ADAPTER = 1
"""vLLM's id of the only adapter."""


class Refused(Exception):
    """The request cannot be served; the engine can go on."""


class Host:
    """An engine and the version it serves."""

    def __init__(self, settings: dict[str, Any], version: int) -> None:
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        extension = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"
        arguments = {
            **_platform_defaults(settings),
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "enable_prefix_caching": True,
            "worker_extension_cls": extension,
            "weight_transfer_config": WeightTransferConfig(backend=NAME),
            **settings,
        }
        engine_args = AsyncEngineArgs(**arguments)
        vllm_config = engine_args.create_engine_config()
        if current_platform.is_cpu() and vllm_config.parallel_config.distributed_executor_backend == "uni":
            # On CPU vLLM spawns its process, which imports everything again: half of the start-up time. Spawning is
            # needed only to bind several workers' threads to cores; here there is one worker.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self.llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=engine_args.disable_log_stats)
        self.first_version = version
        self.lora: Any = None
        self.broken: str | None = None
        self.held: str | None = None
        """Checksum of the tensors last loaded; None before the first."""
        self.loading, self.paused, self.asleep = asyncio.Lock(), False, False
        self.prompt_tokens = self.cached_tokens = 0
        self.moves, self.load_seconds = 0, 0.0
        self.weights: tuple[Path, ...] = ()
        self._count_moves()

    async def start(self) -> dict[str, Any]:
        await self.llm.collective_rpc("mrl_set_up")
        await self.llm.collective_rpc("mrl_skip_ranks")
        await self.llm.update_weight_version(str(self.first_version))
        config = self.llm.vllm_config
        cache = config.cache_config
        return {
            "vocab_size": config.model_config.get_vocab_size(),
            "max_model_len": config.model_config.max_model_len,
            "cached_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
        }

    # --- tokens -----------------------------------------------------------------------------------------------------

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """One completion: ids, logprobs, finish reason and [version, first token] spans."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = dict(request["sampling"])
        params = SamplingParams(
            **sampling,
            seed=request["seed"],
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=bool(sampling.get("stop")),
            include_stop_str_in_output=True,
        )
        whole = await self._run(request["prompt_ids"], params, request["id"])
        output = whole.outputs[0]
        token_ids = list(output.token_ids)
        logprobs = list(output.logprobs.logprobs) if output.logprobs else []
        return {
            "token_ids": token_ids,
            "logprobs": [0.0] * len(token_ids) if params.temperature == 0 else logprobs,
            "finish_reason": output.finish_reason,
            "versions": [[int(span.version), span.start] for span in output.weight_versions or []],
            "prefilled": len(request["prompt_ids"]) - (whole.num_cached_tokens or 0),
        }

    async def score(self, prompt_ids: list[int], completion_ids: list[int], temperature: float) -> list[float]:
        """Logprob of each completion token. The last one is scored as the next token, so that a sequence may have the
        model's full length."""
        from vllm import SamplingParams

        if not completion_ids:
            return []
        *before, last = completion_ids
        params = SamplingParams(
            temperature=temperature,
            max_tokens=1,
            logprob_token_ids=[last],
            prompt_logprobs=0 if before else None,
            detokenize=False,
        )
        ids = [*prompt_ids, *before]
        result = await self._run(ids, params, None)
        known = [result.prompt_logprobs[at][ids[at]].logprob for at in range(len(prompt_ids), len(ids))]
        return [*known, result.outputs[0].logprobs[0][last].logprob]

    async def abort(self, ids: list[str]) -> None:
        await self.llm.abort(ids)

    async def pause(self, mode: str) -> None:
        await self.llm.pause_generation(mode=mode, clear_cache=False)
        self.paused = True

    async def resume(self) -> None:
        self._refuse_asleep()
        await self.llm.resume_generation()
        self.paused = False

    async def sleep(self, level: int) -> None:
        if not self.llm.model_config.enable_sleep_mode:
            raise Refused("vLLM cannot sleep on this device, or was not told to: vllm_args {enable_sleep_mode: true}")
        if level not in (1, 2):
            raise Refused(f"sleep has levels 1 and 2, found {level}")
        if level == 2 and self.llm.vllm_config.lora_config is not None:
            raise Refused(
                "sleeping at level 2 drops the base weights too, which an adapter's update does not bring back: sleep "
                "at level 1, or use lora_sync: merged"
            )
        self._refuse_asleep()
        async with self.loading:
            if level == 2:
                self.broken = "they were dropped when it went to sleep at level 2"
            self.asleep = self.paused = True  # set first: if sleeping fails midway, it is not awake either
            await self.llm.sleep(level, mode="wait")

    async def wake(self) -> None:
        """After level 2 the memory is uninitialised, so nothing is generated before weights are loaded."""
        async with self.loading:
            await self.llm.wake_up()
            self.asleep = False
            await self._resume()

    async def pulse(self) -> dict[str, int]:
        """`working`: requests that should be getting tokens now. `moves`: grows with each token.

        Asks no other process, so it answers while vLLM's own processes are busy. Raises if one of them is dead.
        """
        if self.llm.errored:
            raise self.llm.dead_error
        idle = self.paused or self.loading.locked()
        return {"working": 0 if idle else self.llm.get_num_unfinished_requests(), "moves": self.moves}

    async def health(self) -> dict[str, Any]:
        await self.llm.check_health()
        return {
            "version": None if self.broken is not None else int(await self.llm.get_weight_version()),
            "asleep": self.asleep,
            "paused": await self.llm.is_paused(),
            "in_flight": self.llm.get_num_unfinished_requests(),
            "broken": self.broken,
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_tokens,
            "load_seconds": self.load_seconds,
        }

    # --- weights ----------------------------------------------------------------------------------------------------

    async def load(self, path: str, version: int, checksum: str | None) -> str | None:
        """Load every tensor from a folder, between two tokens of running requests. Returns their checksum.

        Requests in flight continue with their KV cache recomputed under the new weights. A sleeping engine wakes up.
        """
        self.weights = (Path(path), Path(path).parent)
        async with self._updating():
            return await self._load(path, version, checksum)

    async def _load(self, path: str, version: int, checksum: str | None) -> str | None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        before = self.broken
        try:
            with self._broken_unless_done(f"the update to version {version} was begun and did not finish"):
                await self.llm.start_weight_update()
                await self.llm.update_weights(WeightTransferUpdateRequest({"path": path, "checksum": checksum}))
                await self.llm.finish_weight_update(str(version))
        except Exception:
            workers = await self.llm.collective_rpc("mrl_held")
            if all(worker["whole"] and worker["checksum"] == self.held for worker in workers):
                self.broken = before  # refused before anything was changed
            raise
        workers = await self.llm.collective_rpc("mrl_held")
        held = {worker["checksum"] for worker in workers}
        self.load_seconds = max(worker["seconds"] for worker in workers)
        if len(held) > 1:
            self.broken = f"its processes hold different weights after the update to version {version}: {held}"
            raise Refused(self.broken)
        self.held = held.pop()
        return self.held

    async def load_adapter(self, path: str, version: int, checksum: str | None) -> str:
        """Load a LoRA adapter from a folder in place of the previous one. Returns the checksum of its tensors."""
        from vllm.lora.request import LoRARequest

        self.weights = (Path(path), Path(path).parent)
        with open_folder(path) as tensors:
            found = fingerprint(tensors)
        if checksum is not None and found != checksum:
            raise Refused(f"{path} has checksum {found}, expected {checksum}")
        async with self._updating():
            request = LoRARequest("policy", ADAPTER, path, load_inplace=True)
            with self._broken_unless_done(f"the adapter of version {version} could not be loaded"):
                if not await self.llm.add_lora(request):
                    raise Refused(f"vLLM did not load the adapter in {path}")
            # Requests use this one without load_inplace: with it vLLM would reload the files at every request.
            self.lora = LoRARequest("policy", ADAPTER, path)
            await self.llm.update_weight_version(str(version))
            return found

    # --- inner ------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _updating(self) -> AsyncIterator[None]:
        """Weights may be changed inside: generation is paused. A sleeping engine first allocates memory for the
        weights, and afterwards for the KV cache; if the update fails, it stays asleep."""
        async with self.loading:
            if self.asleep:
                await self.llm.wake_up(["weights"])
                yield
                await self.llm.wake_up(["kv_cache"])
                self.asleep = False
                await self._resume()
                return
            await self.llm.pause_generation(mode="keep", clear_cache=True)
            try:
                yield
            finally:
                await self._resume()

    @contextlib.contextmanager
    def _broken_unless_done(self, why: str) -> Iterator[None]:
        """The weights are changed inside. An error, or being cancelled on the way, leaves them broken; requests that
        come meanwhile wait."""
        try:
            yield
        except BaseException:
            self.broken = why
            raise
        self.broken = None

    def _refuse_asleep(self) -> None:
        if self.asleep:
            raise Refused("this engine is asleep, without the memory it needs: wake it first")

    async def _resume(self) -> None:
        """After an update or sleep: continue, or abort the requests in flight if the weights are incomplete."""
        if self.broken is not None:
            await self.llm.pause_generation(mode="abort", clear_cache=True)
        await self.llm.resume_generation()
        self.paused = False

    def _count_moves(self) -> None:
        """Count tokens where vLLM processes a step's outputs: to us it only returns whole completions."""
        take_in = self.llm.output_processor.process_outputs

        def counting(outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
            self.moves += len(outputs)
            return take_in(outputs, *args, **kwargs)

        self.llm.output_processor.process_outputs = counting

    async def _run(self, ids: list[int], params: Any, request_id: str | None) -> Any:
        from vllm import TokensPrompt
        from vllm.utils import random_uuid

        self._refuse_broken()
        self._refuse_asleep()  # it would wait forever
        prompt, name = TokensPrompt(prompt_token_ids=ids), request_id or random_uuid()
        outputs = [output async for output in self.llm.generate(prompt, params, name, lora_request=self.lora)]
        self._refuse_broken()
        self.prompt_tokens += len(ids)
        self.cached_tokens += outputs[-1].num_cached_tokens or 0
        return outputs[-1]

    def _refuse_broken(self) -> None:
        if self.broken is not None:
            raise Refused(f"this engine has no whole weights: {self.broken}; load weights first")


def _platform_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Defaults that depend on the machine."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {"dtype": "bfloat16"}
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 30,
        # After a chunked prefill vLLM rewinds the request's random generator, which it cannot do on CPU.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(settings["max_model_len"], 8192),
    }
    if settings.get("tensor_parallel_size", 1) == 1:
        # The model runs in vLLM's engine process instead of another one behind it: that starts twice as fast.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        defaults["distributed_executor_backend"] = "uni"
    else:  # by default vLLM gives each worker its own NUMA node, which small machines do not have
        cores, size = sorted(os.sched_getaffinity(0)), settings["tensor_parallel_size"]
        shares = [cores[i * len(cores) // size : (i + 1) * len(cores) // size] or cores[:1] for i in range(size)]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, own)) for own in shares))
    return defaults


async def serve(socket: str) -> None:
    """Serve until the other side closes the socket."""
    reader, writer = await asyncio.open_unix_connection(socket)
    # vLLM's processes must not inherit the socket: when the host dies, the other side has to see it close.
    os.register_at_fork(after_in_child=functools.partial(os.close, writer.get_extra_info("socket").fileno()))
    first = await read(reader)
    try:
        host = Host(first["settings"], first["version"])
        write(writer, {"ready": await host.start()})
        await writer.drain()
    except Exception as error:
        write(writer, {"failed": f"{type(error).__name__}: {error}"})
        await writer.drain()
        return
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(message: dict[str, Any]) -> None:
        try:
            result = await getattr(host, message["method"])(*message["args"])
            write(writer, {"id": message["id"], "result": result})
        except asyncio.CancelledError:
            raise
        except Exception as error:
            kind = "dead" if host.llm.errored else "refused"
            write(writer, {"id": message["id"], "error": f"{error or type(error).__name__}", "kind": kind})
        finally:
            running.pop(message["id"], None)

    try:
        while True:
            message = await read(reader)
            if "cancel" in message:
                task = running.get(message["cancel"])
                if task is not None:
                    task.cancel()
                continue
            running[message["id"]] = asyncio.create_task(answer(message))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the owner closed it, or is gone
    finally:
        host.llm.shutdown(timeout=5)
        for folder in host.weights:
            scratch.remove_abandoned(folder)


def main() -> None:
    """Serve, then end the whole process group: vLLM's own processes must not outlive this one.

    Also removes the temporary folders of owners that were killed.
    """
    try:
        asyncio.run(serve(sys.argv[1]))
    finally:
        for parent in (Path(sys.argv[1]).parent.parent, scratch.SHARED_MEMORY):
            scratch.sweep(parent)
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getpgrp() == os.getpid():
            end_group(os.getpgrp())
    atexit._run_exitfuncs()  # semaphores, for one, are removed here
    os._exit(0)  # Python would take seconds to tear down what vLLM imported


if __name__ == "__main__":
    main()
