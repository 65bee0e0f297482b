"""Advice when vLLM runs out of memory: its log messages, turned into options and values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from signal import SIGKILL
from typing import Any

_GIB = 2**30


def advice(said: str, exit_code: int | None, settings: dict[str, Any]) -> str | None:
    """One sentence naming the options to change and the values to try; None if memory was not the problem.

    said: what vLLM logged and raised. exit_code: of its process, negative for a signal, None while it runs.
    settings: vLLM's engine arguments.
    """
    for pattern, explain in _RULES:
        found = re.search(pattern, said, re.DOTALL)
        if found is not None:
            return explain(found, settings)
    if exit_code == -SIGKILL:
        return _host_memory(None, settings)
    return None


def _cache_for_one(found: re.Match[str], settings: dict[str, Any]) -> str:
    length, needed, there, fits = found.groups()
    longest = int(fits or 0)
    ways = [f"lower max_model_len from {length} to {longest}"] if longest else []
    bytes_ = settings.get("kv_cache_memory_bytes")
    if bytes_ is None:
        more = float(needed) - float(there)
        ways.append(f"raise {_utilization(settings)} so that it may take {more:.2f} GiB more")
        ways.append(_more_devices(settings))
    else:  # vLLM prints two decimals, which is too coarse for a small model
        enough = max(float(needed), bytes_ / _GIB * int(length) / longest if longest else 0.0)
        ways.append(f"raise vllm_kv_cache_gb from {_short(bytes_ / _GIB)} to {_rounded(enough * 1.1, math.ceil)}")
    return f"keys and values of one sequence of {length} tokens do not fit: {_either(ways)}"


def _cache_for_none(found: re.Match[str], settings: dict[str, Any]) -> str:
    bytes_ = settings.get("kv_cache_memory_bytes")
    if bytes_ is not None:
        return f"no keys and values fit: raise vllm_kv_cache_gb from {_short(bytes_ / _GIB)} to 1"
    used = settings.get("gpu_memory_utilization", 0.9)
    ways = [] if used >= 0.97 else [f"raise {_utilization(settings)} to {min(used + 0.1, 0.97):.2f}"]
    return f"the weights leave no room for keys and values: {_either([*ways, _more_devices(settings)])}"


def _cache_too_large(found: re.Match[str], settings: dict[str, Any]) -> str:
    free = float(found[1])
    bytes_ = settings.get("kv_cache_memory_bytes")
    change = "set vllm_kv_cache_gb" if bytes_ is None else f"lower vllm_kv_cache_gb from {_short(bytes_ / _GIB)}"
    return f"{free} GiB of memory are free: {change} to {_rounded(free * 0.8, math.floor)} or less"


def _share_too_large(found: re.Match[str], settings: dict[str, Any]) -> str:
    free, total = float(found[1]), float(found[2])
    fraction = math.floor((free / total - 0.02) * 100) / 100
    if fraction <= 0:
        return f"{free} of {total} GiB are free: end what uses them, or choose other devices with vllm_devices"
    return (
        f"{free} of {total} GiB are free: lower {_utilization(settings)} to {fraction:.2f}, "
        "or choose other devices with vllm_devices"
    )


def _too_many_sequences(found: re.Match[str], settings: dict[str, Any]) -> str:
    count = int(found[1])
    return f"sampling for {count} sequences does not fit: lower vllm_max_num_seqs from {count} to {max(count // 4, 1)}"


def _device_memory(found: re.Match[str], settings: dict[str, Any]) -> str:
    ways = [*_half_precision(settings), _more_devices(settings)]
    if (count := settings.get("max_num_seqs", 1)) > 1:
        ways.append(f"lower vllm_max_num_seqs from {count} to {count // 2}")
    return f"the device's memory does not suffice: {_either(ways)}"


def _host_memory(found: re.Match[str] | None, settings: dict[str, Any]) -> str:
    what = "it got no more memory" if found is not None else "it was killed without a word"
    bytes_ = settings.get("kv_cache_memory_bytes", _GIB)
    ways = [f"lower vllm_kv_cache_gb from {_short(bytes_ / _GIB)} to {_rounded(bytes_ / _GIB / 2, math.floor)}"]
    ways += [*_half_precision(settings), "start fewer engines with num_rollout_workers"]
    return f"{what}; the machine's memory probably does not suffice: {_either(ways)}"


_RULES: list[tuple[str, Callable[[re.Match[str], dict[str, Any]], str]]] = [
    (
        r"max seq len \((\d+)\), \(([\d.]+) GiB KV cache is needed.{0,80}?memory \(([\d.]+) GiB\)\."
        r"(?: Based on the available memory, the estimated maximum model length is (\d+))?",
        _cache_for_one,
    ),
    (r"No available memory for the cache blocks", _cache_for_none),
    (r"\(([\d.]+)/[\d.]+ GiB\) on kv cache allocation is less than requested", _cache_too_large),
    (r"\(([\d.]+)/([\d.]+) GiB\) on startup is less than", _share_too_large),
    (r"out of memory occurred when warming up \w+ .{0,30}?(\d+) dummy requests", _too_many_sequences),
    (r"(?:CUDA|HIP|XPU) out of memory|torch\.OutOfMemoryError", _device_memory),
    (r"MemoryError|bad_alloc|[cC]an(?:no|')t allocate memory", _host_memory),
    (r"Engine core initialization failed(?!.*Traceback)", lambda found, settings: _host_memory(None, settings)),
]


def _utilization(settings: dict[str, Any]) -> str:
    value = settings.get("gpu_memory_utilization")
    return "gpu_memory_utilization" + ("" if value is None else f" from {value}")


def _more_devices(settings: dict[str, Any]) -> str:
    size = settings.get("tensor_parallel_size", 1)
    return f"raise tensor_parallel_size from {size} to {2 * size}"


def _half_precision(settings: dict[str, Any]) -> list[str]:
    return ["set dtype: bfloat16"] if settings.get("dtype", "float32") == "float32" else []


def _either(ways: list[str]) -> str:
    return ", or ".join(ways)


def _short(value: float) -> str:
    return f"{float(f'{value:.3g}'):.12g}"


def _rounded(value: float, direction: Callable[[float], int]) -> str:
    """Rounded up or down to two significant digits."""
    digits = 1 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{direction(round(value * 10**digits, 6)) / 10**digits:.12g}"
