"""How a GPU's memory is divided, by hand-made sums."""

from __future__ import annotations

from typing import Any

import pytest

from mrl import OrchestratorConfig
from mrl.engines.vllm.shares import ACTOR_KEEPS, GIB, VLLM_KEEPS, ModelSize, divide, utilization
from mrl.errors import ConfigError

HALF = ModelSize(494_000_000, 494_000_000, 2 * 24 * 2 * 64)
"""Qwen2.5-0.5B, all of it trained."""
SEVEN = ModelSize(7_600_000_000, 7_600_000_000, 2 * 28 * 4 * 128)


def config(**options: Any) -> OrchestratorConfig:
    return OrchestratorConfig.from_flat(engine="vllm", colocate=True, **options)


@pytest.mark.parametrize(("gib", "share"), [(8, 0.81), (16, 0.9), (24, 0.92), (80, 0.92)])
def test_vllm_gets_all_but_what_the_actors_process_keeps(gib: int, share: float) -> None:
    assert utilization(gib * GIB) == share
    assert gib * GIB * (1 - share) >= ACTOR_KEEPS


def test_a_small_model_on_a_small_gpu() -> None:
    found = divide(16 * GIB, HALF, config(), 4096, bytes_per_number=2)
    assert found.utilization == 0.9
    assert found.weights == HALF.parameters * 2
    assert found.training == HALF.parameters * 16
    assert found.activations == 16 * GIB - VLLM_KEEPS - found.training
    said = found.sentence(0)
    assert "GPU 0 (16.0 GiB)" in said
    assert "gpu_memory_utilization 0.9: 14.4 GiB, 0.9 GiB of it weights" in said
    assert "7.4 GiB for weights, gradients and optimizer state, about 6.1 GiB left" in said


@pytest.mark.parametrize(
    ("options", "per_parameter"),
    [
        ({}, 16),
        ({"offload_optimizer": True}, 8),
        ({"beta": 0.1}, 20),
        ({"beta": 0.1, "offload_optimizer": True}, 12),
    ],
)
def test_what_training_holds(options: dict[str, Any], per_parameter: int) -> None:
    found = divide(80 * GIB, HALF, config(**options), 4096, bytes_per_number=2)
    assert found.training == HALF.parameters * per_parameter


def test_an_adapter_trains_on_what_the_whole_model_does_not() -> None:
    with pytest.raises(ConfigError, match=r"needs 113\.2 GiB .*use_lora: true, offload_optimizer: true, use a"):
        divide(80 * GIB, SEVEN, config(), 4096, bytes_per_number=2)
    adapter = ModelSize(SEVEN.parameters, 40_000_000, SEVEN.cached_numbers)
    found = divide(80 * GIB, adapter, config(use_lora=True, beta=0.1), 4096, bytes_per_number=2)
    assert found.training == 4 * adapter.parameters + 16 * adapter.trained, "the reference is the model without it"
    narrow = ModelSize(SEVEN.parameters, 40_000_000, SEVEN.cached_numbers, linear=7_000_000_000)
    assert divide(24 * GIB, narrow, config(use_lora=True), 4096, bytes_per_number=2).activations > 5 * GIB
    with pytest.raises(ConfigError, match=r"training needs 28\.9 GiB .*21\.5 GiB besides .*: offload_optimizer: true"):
        divide(24 * GIB, adapter, config(use_lora=True), 4096, bytes_per_number=2)


@pytest.mark.parametrize(
    ("gib", "options", "length", "message"),
    [
        (24, {"gpu_memory_utilization": 0.95}, 512, r"use at most 0\.92"),
        (24, {"vllm_args": {"gpu_memory_utilization": 0.95}}, 512, r"use at most 0\.92"),
        (24, {"gpu_memory_utilization": 0.05}, 32768, r"leave no room .* 32768 tokens .*up to 0\.92"),
        (24, {"vllm_kv_cache_gb": 30.0}, 512, r"use at most 21\.2"),
        (24, {"vllm_kv_cache_gb": 0.01}, 16384, "lower max_model_len"),
        (1, {}, 512, "two processes need"),
    ],
)
def test_too_little_is_refused_with_what_would_do(gib: int, options: dict[str, Any], length: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        divide(gib * GIB, HALF, config(**options), length, bytes_per_number=2)


def test_an_explicit_share_is_kept_and_devices_share_the_weights() -> None:
    found = divide(24 * GIB, HALF, config(gpu_memory_utilization=0.3, tensor_parallel_size=2), 512, bytes_per_number=2)
    assert found.utilization == 0.3
    assert found.weights == HALF.parameters
