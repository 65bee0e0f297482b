"""Publishing the actor's weights: as files, in shared memory, as a model folder, as a delta."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.actor.lora import adapts_parameters, merged_state_dict, public_state_dict, saved_state_dict
from mrl.errors import SyncError
from mrl.system.machine import machine_id
from mrl.system.transfers import on_host
from mrl.types import WeightRef
from mrl.weights.checksum import checksum
from mrl.weights.delta import DeltaWriter
from mrl.weights.files import adapter_ref, publish, publish_folder, size_of, without_aliases
from mrl.weights.network import WeightServer
from mrl.weights.tensors import FILE, MappedFile


class Publisher:
    """Publishes the versions of one model's weights.

    Tensors have their Hugging Face names, adapters are merged, tied tensors written once. `dtype` is that of the
    samplers' weights ("float32", "bfloat16"; None = the actor's own): casting here halves the transfer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.memory: MappedFile | None = None
        self.deltas: DeltaWriter | None = None
        self.server: WeightServer | None = None

    def close(self) -> None:
        """Stop serving weights."""
        if self.server is not None:
            self.server.close()
            self.server = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to publish."""
        return public_state_dict(self.model)

    def files(
        self,
        folder: Path,
        version: int,
        *,
        dtype: str | None = None,
        adapter: bool = False,
        durable: bool = False,
        keep: int = 1,
    ) -> WeightRef:
        """Write the version to a new folder. Raises SyncError."""
        if adapter:
            return adapter_ref(
                publish_folder(self._write_adapter, folder, version, durable=durable, keep=keep), version
            )
        return publish(self.tensors(), folder, version, dtype=_dtype(dtype), durable=durable, keep=keep)

    def in_memory(
        self, folder: Path, version: int, *, dtype: str | None = None, adapter: bool = False, served: bool = False
    ) -> WeightRef:
        """Overwrite the one file in `folder` in place: one copy, no new pages. Raises SyncError.

        served: also serve it to other machines over the network.
        """
        ref = self.files(folder, version, adapter=True) if adapter else self._overwrite(folder, version, dtype)
        if served:
            assert ref.path is not None
            self.server = self.server or WeightServer()
            self.server.publish(Path(ref.path), version)
            ref.machine, ref.addresses, ref.token = machine_id(), self.server.addresses, self.server.token
        return ref

    def _overwrite(self, folder: Path, version: int, dtype: str | None) -> WeightRef:
        tensors, kind = without_aliases(self.tensors()), _dtype(dtype)
        try:
            if self.memory is None or self.memory.path.parent != folder or not self.memory.fits(tensors, kind):
                self.memory = None
                self.memory = MappedFile(folder / FILE, tensors, kind)
        except OSError as error:
            raise SyncError(
                f"{folder}: no room for the weights ({error.strerror}); use weight_sync_method: reload"
            ) from error
        found = checksum(self.memory.write(tensors))
        return WeightRef(version, path=str(folder), checksum=found, bytes=self.memory.size)

    def whole_model(self, folder: Path, version: int, *, dtype: str | None = None) -> WeightRef:
        """Write a Hugging Face model folder with configuration and tokenizer. Raises SyncError."""
        tensors = on_host(merged_state_dict(self.model), _dtype(dtype))  # `save_pretrained` names them
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

        def fill(partial: Path) -> None:
            inner.save_pretrained(partial, state_dict=tensors)
            self.tokenizer.save_pretrained(partial)

        path = publish_folder(fill, folder, version)
        return WeightRef(version, path=str(path), kind="model", bytes=size_of(path))

    def difference(
        self, folder: Path, version: int, *, dtype: str | None = None, full: bool, durable: bool = False
    ) -> WeightRef:
        """Write what changed since the last published version; full: everything. Raises SyncError."""
        if self.deltas is None:
            self.deltas = DeltaWriter()
        return self.deltas.publish(
            without_aliases(self.tensors()), folder, version, dtype=_dtype(dtype), full=full, durable=durable
        )

    def last_whole(self, folder: Path, version: int, *, durable: bool = False) -> WeightRef:
        """Write everything as `difference` last published it. Raises SyncError."""
        if self.deltas is None:
            raise SyncError("no difference was published yet")
        return self.deltas.last_whole(folder, version, durable=durable)

    def _write_adapter(self, partial: Path) -> None:
        if adapts_parameters(self.model):
            raise SyncError(
                "the adapter has parts for experts, whose weights this model holds in one tensor, and engines do not "
                "load such adapters; use lora_sync: merged, or lora_target_modules without the experts' layers"
            )
        self.model.save_pretrained(partial, state_dict=on_host(saved_state_dict(self.model)))
        for extra in partial.iterdir():
            if extra.name not in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.rmtree(extra) if extra.is_dir() else extra.unlink()


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype
