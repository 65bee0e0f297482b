"""How an actor and vLLM divide one GPU's memory when they take turns on it (`colocate`).

The idle side keeps only its CUDA context and workspaces on the GPU. Weights, gradients, optimizer state and KV cache
are there for one side at a time, so each may use almost the whole GPU. What does not fit is refused before anything is
loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError

GIB = 2**30
ACTOR_KEEPS = 1.5 * GIB
"""GPU memory of the actor's process while vLLM generates: CUDA context, cuBLAS workspaces. Estimated."""
VLLM_KEEPS = 2.5 * GIB
"""GPU memory of a sleeping vLLM: the same, plus CUDA graphs and NCCL buffers. Estimated."""
MOST = 0.92
"""vLLM's default of `gpu_memory_utilization`, which leaves some room for unplanned allocations."""


@dataclass(frozen=True)
class ModelSize:
    """The numbers that determine a model's memory."""

    parameters: int
    trained: int
    """Parameters with a gradient: all of them, or the adapter's."""
    cached_numbers: int
    """KV cache entries of one token; 0 = not known."""
    linear: int = 0
    """Parameters of linear layers not tied to an embedding: below an adapter these are stored in bfloat16."""


@dataclass(frozen=True)
class Shares:
    """What each side gets in its turn, in bytes."""

    gpu: int
    utilization: float
    """vLLM's `gpu_memory_utilization`."""
    weights: float
    """vLLM's copy of the weights, on each GPU."""
    training: float
    """Memory needed at the end of a backward pass, without activations."""

    @property
    def activations(self) -> float:
        """What is left for activations and logits while training."""
        return self.gpu - VLLM_KEEPS - self.training

    def sentence(self, number: int) -> str:
        """A message for the user. number: of the GPU."""
        return (
            f"colocate: GPU {number} ({_gib(self.gpu)}) belongs to vLLM while it generates (gpu_memory_utilization "
            f"{self.utilization:g}: {_gib(self.gpu * self.utilization)}, {_gib(self.weights)} of it weights), and to "
            f"the actor while it trains ({_gib(self.training)} for weights, gradients and optimizer state, about "
            f"{_gib(self.activations)} left for activations)."
        )


def utilization(gpu: int) -> float:
    """The largest `gpu_memory_utilization` on a GPU of `gpu` bytes that the actor's process uses too."""
    return min(MOST, math.floor((gpu - ACTOR_KEEPS) / gpu * 100) / 100)


def divide(
    gpu: int, size: ModelSize, config: OrchestratorConfig, max_model_len: int, *, bytes_per_number: int
) -> Shares:
    """The shares of a GPU of `gpu` bytes. bytes_per_number: of the weights and the cache that vLLM holds.

    Raises ConfigError, which says what to change, when a side has too little for its minimum.
    """
    serving, devices = config.serving, config.serving.tensor_parallel_size
    most, asked = utilization(gpu), explicit_utilization(config)
    if most <= 0:
        raise ConfigError(
            f"colocate: the GPU has {_gib(gpu)}, and two processes need {_gib(ACTOR_KEEPS + VLLM_KEEPS)} before any "
            "weights; use engine: transformers"
        )
    if asked is not None and asked > most:
        raise ConfigError(
            f"gpu_memory_utilization: {asked:g} leaves the actor's process on the same GPU ({_gib(gpu)}) too little "
            f"while vLLM generates; with colocate use at most {most:.2f}, or leave it out"
        )
    share = most if asked is None else asked
    weights = size.parameters * bytes_per_number / devices
    one = max_model_len * size.cached_numbers * bytes_per_number / devices
    cache = gpu * share - weights if serving.vllm_kv_cache_gb is None else serving.vllm_kv_cache_gb * GIB
    if serving.vllm_kv_cache_gb is not None and weights + cache > gpu * most:
        raise ConfigError(
            f"vllm_kv_cache_gb: with colocate the GPU has {_gib(gpu * most)} for vLLM, weights of {_gib(weights)} "
            f"included; use at most {max(0, gpu * most - weights) / GIB:.1f}"
        )
    if cache < one or cache <= 0:
        raise ConfigError(
            f"colocate: vLLM gets {_gib(gpu * share)} of the GPU, and its weights ({_gib(weights)}) leave no room for "
            f"keys and values of one sequence of {max_model_len} tokens ({_gib(one)}): lower max_model_len"
            f"{'' if asked is None or asked == most else f', raise gpu_memory_utilization up to {most:.2f}'}, or use a "
            "smaller model"
        )
    shares = Shares(gpu, share, weights, training_bytes(size, config))
    if shares.activations <= 0:
        ways = [] if config.model.use_lora else ["use_lora: true"]
        ways += [] if config.training.offload_optimizer else ["offload_optimizer: true"]
        raise ConfigError(
            f"colocate: training needs {_gib(shares.training)} for weights, gradients and optimizer state before any "
            f"activations, and the GPU has {_gib(gpu - VLLM_KEEPS)} besides the sleeping vLLM: "
            f"{', '.join([*ways, 'use a smaller model, or a larger GPU'])}"
        )
    return shares


def training_bytes(size: ModelSize, config: OrchestratorConfig) -> float:
    """Weights, gradients, AdamW's state and the reference model: float32, except linear layers below an adapter."""
    moments = 0 if config.training.offload_optimizer else 8
    if config.model.use_lora:
        narrow = 2 * size.linear if config.model.dtype != "float32" else 0
        weights = 4 * (size.parameters + size.trained) - narrow
    else:
        weights = 4 * size.parameters * (2 if config.algorithm.beta > 0 else 1)
    return float(weights + (4 + moments) * size.trained)


def explicit_utilization(config: OrchestratorConfig) -> float | None:
    """The user's `gpu_memory_utilization`, from the option or from `vllm_args`; None = not set."""
    said = config.serving.gpu_memory_utilization or config.serving.vllm_args.get("gpu_memory_utilization")
    return None if said is None else float(said)


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
