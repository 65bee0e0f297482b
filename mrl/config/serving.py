"""Options of the engines that generate, where they differ from the trained model's own."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mrl.config.section import Section, refuse_changed
from mrl.errors import ConfigError

_LOCAL = (
    *("vllm_python", "tensor_parallel_size", "gpu_memory_utilization", "vllm_kv_cache_gb", "vllm_enforce_eager"),
    *("vllm_devices", "vllm_max_num_seqs", "vllm_args", "vllm_start_timeout", "vllm_stall_timeout", "colocate"),
)
_REMOTE = ("vllm_urls", "vllm_api_key_env", "vllm_model_name")
_BOTH = ("lora_sync", "repeatable_sampling")


class ServingConfig(Section):
    """vLLM: where it runs, how much it takes, how it gets its weights (docs/vllm.md)."""

    vllm_python: str | None = None
    """Python interpreter of another environment that has vLLM, e.g. `/envs/vllm/bin/python`; None = this one."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Devices each engine splits the model over."""
    vllm_devices: list[int] = Field(default_factory=list)
    """Numbers of the GPUs for the engines, `tensor_parallel_size` for each in turn, counted among those of
    CUDA_VISIBLE_DEVICES where it is set; empty = those that the actor does not use."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Fraction of a GPU's memory an engine may take, weights included; None = vLLM's own, almost all, or with
    `colocate` what the actor's process leaves. Needed where engines share a GPU otherwise."""
    colocate: bool = False
    """One GPU for the actor and vLLM, which take turns: vLLM's weights and cache leave it while the actor trains, the
    actor's weights and optimizer state while vLLM generates. Needs host memory for both (docs/gpu.md)."""
    vllm_kv_cache_gb: float | None = Field(None, gt=0)
    """GiB for keys and values; None = what `gpu_memory_utilization` leaves on a GPU, 1 on CPU."""
    vllm_enforce_eager: bool | None = None
    """Neither compile nor capture graphs: starts faster, generates slower. None = so on CPU only."""
    vllm_max_num_seqs: int = Field(256, ge=1)
    """Most sequences an engine decodes together."""
    vllm_args: dict[str, Any] = Field(default_factory=dict)
    """Any other of vLLM's engine arguments, by their Python names, e.g. `{"max_num_batched_tokens": 8192}`."""
    vllm_start_timeout: float = Field(900.0, gt=0)
    """Seconds an engine may take to start."""
    vllm_stall_timeout: float = Field(120.0, gt=0)
    """Seconds without a sign of life, or without a token for the requests it works on, after which an engine is killed
    and replaced; more than its longest step takes, such as the prefill of the longest prompt."""
    vllm_urls: list[str] = Field(default_factory=list)
    """Running `vllm serve` servers for engine `vllm-remote`, e.g. `http://gpu-box:8000`; one worker for each."""
    vllm_api_key_env: str | None = None
    """Environment variable that holds the servers' API key."""
    vllm_model_name: str | None = None
    """The model's name on the servers; None = the first they list."""
    lora_sync: Literal["adapter", "merged"] = "adapter"
    """With `use_lora`, what vLLM gets: the `adapter` alone (small; vLLM applies it beside the base weights), or all
    weights with it `merged` in (slower to send, faster to generate with)."""

    repeatable_sampling: bool | None = None
    """Whether each completion is drawn from its own seed, so that it does not depend on what is sampled beside it;
    None = yes, but no with engine `vllm`, which seeds of their own keep from its fastest samplers (docs/vllm.md)."""

    def devices_of(self, index: int) -> list[int]:
        """The GPUs of engine `index`. Raises ConfigError when there are not enough."""
        size = self.tensor_parallel_size
        own = self.vllm_devices[index * size : (index + 1) * size]
        if self.vllm_devices and len(own) < size:
            raise ConfigError(
                f"vllm_devices: {len(self.vllm_devices)} GPUs are not enough for engine {index}: num_rollout_workers x "
                f"tensor_parallel_size ({size}) are needed"
            )
        return own

    def options_of(self, engine: str) -> dict[str, Any]:
        """What the engine's `create` takes. Raises ConfigError for options that it has no use for."""
        if engine == "vllm":
            refuse_changed(self, _REMOTE, "engine: vllm-remote")
            names: tuple[str, ...] = (*_LOCAL, *_BOTH)
        elif engine == "vllm-remote":
            refuse_changed(self, _LOCAL, "engine: vllm")
            if not self.vllm_urls:
                raise ConfigError("engine: vllm-remote needs vllm_urls, the addresses of running `vllm serve` servers")
            names = (*_REMOTE, *_BOTH)
        else:
            refuse_changed(self, _LOCAL, "engine: vllm")
            refuse_changed(self, _REMOTE, "engine: vllm-remote")
            refuse_changed(self, _BOTH, "engine: vllm or vllm-remote")
            return {}
        return {name: getattr(self, name) for name in names}

    def samples_repeatably(self, engine: str) -> bool:
        """Whether the engine draws each completion from its own seed."""
        return engine != "vllm" if self.repeatable_sampling is None else self.repeatable_sampling
