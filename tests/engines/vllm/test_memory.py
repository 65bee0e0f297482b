"""Which option to change, and to what, from what vLLM 0.32 says when memory does not suffice.

Its words here are those it prints, on CPU from runs of ours, for GPUs from its source. The CPU ones also come from the
real vLLM in `test_vllm_failures.py`.
"""

from __future__ import annotations

import pytest

from mrl.engines.vllm.memory import advice

GB = 2**30
SETTINGS = {"max_model_len": 4096, "tensor_parallel_size": 1, "max_num_seqs": 256, "dtype": "bfloat16"}
ONE = (
    "ValueError: To serve at least one request with the model's max seq len (4096), ({} GiB KV cache is needed, which "
    "is larger than the available KV cache memory ({} GiB). Based on the available memory, the estimated maximum model "
    "length is {}. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or "
    "decreasing `max_model_len` when initializing the engine."
)
SHARE = (
    "ValueError: Free memory on device cuda:0 ({}/79.18 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 71.26 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
CACHE = (
    "ValueError: Available memory on node 0 (20.78/23.54 GiB) on kv cache allocation is less than requested memory for "
    "kv (1000.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by others."
)
TORCH = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.18 GiB in total"
SAMPLER = (
    "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering "
    "`max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
)


@pytest.mark.parametrize(
    ("said", "code", "changes", "expected"),
    [
        (
            ONE.format("0.44", "0.25", 2304),
            None,
            {"kv_cache_memory_bytes": GB // 4},
            ["lower max_model_len from 4096 to 2304", "raise vllm_kv_cache_gb from 0.25 to 0.49"],
        ),
        (
            ONE.format("0.0", "0.0", 128),  # too small for two decimals
            None,
            {"kv_cache_memory_bytes": int(0.0003 * GB)},
            ["max_model_len from 4096 to 128", "vllm_kv_cache_gb from 0.0003 to 0.011"],
        ),
        (
            ONE.format("14.00", "11.50", 3360),
            None,
            {"gpu_memory_utilization": 0.8},
            [
                "max_model_len from 4096 to 3360",
                "gpu_memory_utilization from 0.8 so that it may take 2.50 GiB more",
                "from 1 to 2",
            ],
        ),
        (
            "No available memory for the cache blocks. Try",
            None,
            {"kv_cache_memory_bytes": 9},
            ["vllm_kv_cache_gb", "1"],
        ),
        ("No available memory for the cache blocks. Try", None, {}, ["gpu_memory_utilization to 0.97", "from 1 to 2"]),
        (CACHE, None, {"kv_cache_memory_bytes": 1000 * GB}, ["lower vllm_kv_cache_gb from 1000 to 16"]),
        (SHARE.format("20.5"), None, {"gpu_memory_utilization": 0.9}, ["gpu_memory_utilization from 0.9 to 0.23"]),
        (SHARE.format("0.5"), None, {}, ["end what uses them", "vllm_devices"]),
        (TORCH, None, {}, ["tensor_parallel_size from 1 to 2", "vllm_max_num_seqs from 256 to 128"]),
        (TORCH, None, {"dtype": "float32"}, ["dtype: bfloat16"]),
        (SAMPLER, None, {}, ["lower vllm_max_num_seqs from 256 to 64"]),
        ("(tail)", -9, {"kv_cache_memory_bytes": 8 * GB}, ["killed", "lower vllm_kv_cache_gb from 8 to 4"]),
        (
            "Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            None,
            {},
            ["vllm_kv_cache_gb from 1 to 0.5"],
        ),
        ("OSError: [Errno 12] Cannot allocate memory", 1, {}, ["vllm_kv_cache_gb from 1 to 0.5"]),
    ],
)
def test_what_to_change(said: str, code: int | None, changes: dict[str, object], expected: list[str]) -> None:
    sentence = advice(f"before\n{said}\nafter", code, SETTINGS | changes)
    assert sentence is not None
    for part in expected:
        assert part in sentence


def test_other_failures_get_no_advice() -> None:
    assert advice("ValueError: Qwen9 is not supported", 1, SETTINGS) is None
    assert advice("Engine core initialization failed.\nTraceback (most recent call last):", 1, SETTINGS) is None
    assert advice("", None, SETTINGS) is None
