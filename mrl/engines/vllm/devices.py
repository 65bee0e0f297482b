"""Which GPUs vLLM's engines get: those the actor does not use, numbered among those visible to this process."""

from __future__ import annotations

from collections.abc import Mapping

from mrl.config import ServingConfig
from mrl.errors import ConfigError, EngineError

CUDA, HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"


def actors_gpu(device: str, seen: int) -> int | None:
    """The GPU number of the configured `device`; None for other devices. seen: number of visible GPUs."""
    kind, _, number = device.partition(":")
    return int(number or 0) if seen and kind in ("auto", "cuda") else None


def share_out(serving: ServingConfig, engines: int, seen: int, actor: int | None, ranks: int = 1) -> list[list[int]]:
    """The GPU numbers of each engine, as torch counts them here; empty if torch sees none and none are configured.

    seen: number of visible GPUs. actor: the actor's GPU, None = it has none; the first one of its `ranks`. Without
    `vllm_devices` engines get the GPUs that the actor does not use; with `colocate` the actor's first. Without
    `colocate` they share the actor's only if it is the single GPU. Raises ConfigError, which says what to change, when
    there are too few, or when GPUs are shared without a `gpu_memory_utilization` that leaves room.
    """
    size = serving.tensor_parallel_size
    if serving.vllm_devices:
        shares = [serving.devices_of(index) for index in range(engines)]
        if seen and max(serving.vllm_devices) >= seen:
            raise ConfigError(
                f"vllm_devices: {max(serving.vllm_devices)} is asked for and {seen} GPU(s) can be seen; they are "
                f"counted from 0, among those of {CUDA} (AMD's: {HIP}) where it is set"
            )
    elif not seen:
        return [[] for _ in range(engines)]
    else:
        trains = range(0) if actor is None else range(actor, actor + ranks)
        free = [gpu for gpu in range(seen) if gpu not in trains] if seen > 1 else [0] * engines
        if serving.colocate and actor is not None:
            free = [actor, *(gpu for gpu in range(seen) if gpu != actor)]
        if engines * size > len(free):
            raise ConfigError(_too_few(engines, size, len(free), trains))
        shares = [free[index * size : (index + 1) * size] for index in range(engines)]
    if not serving.colocate:
        _check_sharing(serving, shares, actor)
    return shares


def notices(shares: list[list[int]], actor: int | None) -> list[str]:
    """Messages for the user about the engines' GPUs."""
    if not any(actor in share for share in shares):
        return []
    return [f"engine: vllm: GPU {actor} is used by the actor and by vLLM, which leaves each less memory and speed."]


def environment(numbers: list[int], outer: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that make exactly these GPUs visible to a process. outer: this process's environment.

    On AMD, HIP_VISIBLE_DEVICES takes precedence over CUDA_VISIBLE_DEVICES if set; vLLM does not start when the two
    differ, so both are set then. ROCR_VISIBLE_DEVICES is not changed: the others number the GPUs that it leaves. Raises
    EngineError.
    """
    import torch

    if HIP in outer and torch.version.cuda is None:
        found = visible(numbers, outer[HIP], HIP)
        return {HIP: found, CUDA: found}
    return {CUDA: visible(numbers, outer.get(CUDA))}


def visible(numbers: list[int], outer: str | None, variable: str = CUDA) -> str:
    """The value of `variable` that makes these GPUs visible to a process.

    outer: its value here; `numbers` index its entries, which are GPU numbers of the machine, or UUIDs as a scheduler
    such as Slurm sets them. None = not set: `numbers` are the machine's. Raises EngineError.
    """
    if outer is None:
        return ",".join(map(str, numbers))
    entries: list[str] = []
    for entry in map(str.strip, outer.split(",")):
        if not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            break  # CUDA also stops reading here
        entries.append(entry)
    if missing := [number for number in numbers if number >= len(entries)]:
        raise EngineError(
            f"vllm_devices: {missing[0]} is asked for, and {variable}={outer} has {len(entries)} GPU(s), "
            "which are counted from 0"
        )
    return ",".join(entries[number] for number in numbers)


def _too_few(engines: int, size: int, free: int, trains: range) -> str:
    actors = f"the actor's ({'GPU' if len(trains) == 1 else 'GPUs'} {', '.join(map(str, trains))})"
    there = f"besides {actors} there are {free}" if trains else f"{free} GPU(s) can be seen"
    ways = [f"set num_rollout_workers: {free // size}"] if free >= size else []
    ways += [f"set tensor_parallel_size: {free // engines}"] if size > 1 and free >= engines else []
    ways += ["name other GPUs, the actor's included, with vllm_devices"] if trains and free else []
    return (
        f"engine: vllm: num_rollout_workers x tensor_parallel_size = {engines} x {size} GPUs are needed, and {there}: "
        f"{', or '.join(ways or ['set tensor_parallel_size: 1'])}"
    )


def _check_sharing(serving: ServingConfig, shares: list[list[int]], actor: int | None) -> None:
    """Raise ConfigError for engines that share a GPU without room: vLLM takes its fraction of the whole GPU, whatever
    else runs there."""
    fraction = serving.gpu_memory_utilization or serving.vllm_args.get("gpu_memory_utilization")
    for gpu in sorted({gpu for share in shares for gpu in share}):
        engines = sum(gpu in share for share in shares)
        if engines == 1 and gpu != actor:
            continue
        who = f"{engines} engine(s){' and the actor' if gpu == actor else ''}"
        if fraction is None or engines * fraction > 1 or (gpu == actor and engines * fraction == 1):
            takes = "almost all of its memory" if fraction is None else f"{fraction} of its memory"
            raise ConfigError(
                f"engine: vllm: {who} share GPU {gpu}, and each engine would take {takes}: set gpu_memory_utilization "
                f"to what they can have (such as {0.5 / engines:.2g}), num_rollout_workers: 1 if it is more, give the "
                "engines other GPUs with vllm_devices, or use engine: transformers"
            )
