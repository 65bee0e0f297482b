"""The contents of an actor's checkpoint: captured at once, written later, restored exactly."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.actor.lora import saved_state_dict
from mrl.actor.optimizer import load_optimizer
from mrl.actor.parallel.shards import SHARDS, read_shards
from mrl.errors import CheckpointError, MRLError
from mrl.store.checkpoints import SERVED
from mrl.system.transfers import on_host
from mrl.weights.sharded import is_sharded, part_like, write_into

MISMATCH_PROBE = "trainer/gap_probe.json"
"""File in a checkpoint."""


@dataclass
class Snapshot:
    """The training state at one moment. copied: its tensors are copies, so training may continue during `write`."""

    model: Any
    tokenizer: Any
    tensors: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    rng: dict[str, Any]
    copied: bool
    mismatch_probe: dict[str, Any] = field(default_factory=dict)
    """`MismatchProbe.state`."""
    shards: Path | None = None
    """Folder with the optimizer's state instead of `optimizer`, from all ranks; it becomes part of the checkpoint."""

    def write(self, folder: Path, served: str | None = None) -> None:
        """Write model, tokenizer, optimizer, schedule and RNG states into `folder`, and a copy of the file `served`."""
        self.model.save_pretrained(folder, state_dict=on_host(self.tensors))
        self.tokenizer.save_pretrained(folder)
        if self.shards is None:
            torch.save(self.optimizer, folder / "trainer" / "optimizer.pt")
        else:
            os.replace(self.shards, folder / SHARDS)
        torch.save(self.scheduler, folder / "trainer" / "scheduler.pt")
        torch.save(self.rng, folder / "trainer" / "rng.pt")
        (folder / MISMATCH_PROBE).write_text(json.dumps(self.mismatch_probe))
        if served is not None:
            shutil.copyfile(served, folder / SERVED)


def take_snapshot(
    model: Any, tensors: dict[str, Tensor], tokenizer: Any, optimizer: Any, scheduler: Any, *, copy: bool
) -> Snapshot:
    """The current state. tensors: the model's (`saved_state_dict`). optimizer: None where its state is in shards. copy:
    copy tensors to host memory."""
    optimizer_state = {} if optimizer is None else optimizer.state_dict()
    rng: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state_all()
    return Snapshot(
        model,
        tokenizer,
        _copy(tensors, {}) if copy else tensors,
        _copy(optimizer_state, {}) if copy else optimizer_state,
        dict(scheduler.state_dict()),
        rng,
        copied=copy,
    )


def fits_in_memory_twice(model: Any, optimizer: Any) -> bool:
    """Whether host memory has room for two copies of the training state."""
    import psutil

    tensors = [*saved_state_dict(model).values(), *(t for s in optimizer.state.values() for t in s.values())]
    size = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
    return bool(psutil.virtual_memory().available > 2 * size)


def load_snapshot(folder: Path, model: Any, optimizer: Any, scheduler: Any, *, updates: int) -> None:
    """Load a checkpoint into a freshly initialised actor. updates: optimizer updates up to the checkpoint.

    The optimizer's options and the learning-rate schedule stay those of this configuration. Raises CheckpointError when
    the checkpoint does not fit the model.
    """
    try:
        _load_tensors(folder, model)
        state = _optimizer_state(folder, model, optimizer)
        load_optimizer(optimizer, scheduler, state, updates)
        rng = torch.load(folder / "trainer" / "rng.pt", weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, ValueError, KeyError, MRLError) as error:
        raise CheckpointError(f"{folder}: does not fit this model and configuration ({error})") from error
    torch.set_rng_state(rng["cpu"])
    if torch.cuda.is_available():
        # With fewer devices now, the other states are ignored; with more, the rest keep their initial states.
        for device, cuda_state in enumerate(rng.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda_state, device)


def _optimizer_state(folder: Path, model: Any, optimizer: Any) -> dict[str, Any]:
    """What the optimizer of this process loads, whatever number of processes wrote it."""
    if (folder / SHARDS).exists():
        return read_shards(folder / SHARDS, model, optimizer)
    state: dict[str, Any] = torch.load(
        folder / "trainer" / "optimizer.pt", weights_only=True, map_location="cpu", mmap=is_sharded(model)
    )
    if is_sharded(model):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, values in state["state"].items():
            own = parameters[index]
            state["state"][index] = {
                name: part_like(own, value) if value.shape == own.shape else value for name, value in values.items()
            }
    return state


def _load_tensors(folder: Path, model: Any) -> None:
    if hasattr(model, "get_base_model"):
        from peft import get_peft_model_state_dict, set_peft_model_state_dict
        from safetensors.torch import load_file

        if is_sharded(model):
            own = get_peft_model_state_dict(model, state_dict=model.state_dict())
            for name, tensor in load_file(folder / "adapter_model.safetensors").items():
                write_into(own[name], tensor)
            return
        outcome: Any = set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
        if outcome.unexpected_keys:
            raise ValueError(f"tensors of another adapter: {', '.join(outcome.unexpected_keys[:3])}")
        return
    from mrl.engines.transformers.weights import load_directory

    load_directory(model, str(folder))


def _copy(value: Any, seen: dict[int, Tensor]) -> Any:
    """A copy in host memory; tensors that share memory share it in the copy too."""
    if isinstance(value, Tensor):
        if value.data_ptr() not in seen or seen[value.data_ptr()].shape != value.shape:
            seen[value.data_ptr()] = value.detach().to("cpu", copy=True)
        return seen[value.data_ptr()]
    if isinstance(value, Mapping):
        return {key: _copy(inner, seen) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(inner, seen) for inner in value]
    return value
