"""Publishing the actor's weights: as files, in memory, as a model folder, as a delta."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.actor.lora import adapts_parameters
from mrl.actor.parallel.tensors import LiveTensors, ModelTensors
from mrl.errors import SyncError
from mrl.system import scratch
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
        self.source: ModelTensors = LiveTensors(model)
        """Where the tensors come from; of a sharded model, what rank 0 reads while it leads."""
        self.memory: MappedFile | None = None
        self.shared: Path | None = None
        """Folder in shared memory."""
        self.deltas: DeltaWriter | None = None
        self.server: WeightServer | None = None
        self.stored: Any = None
        """The newest version's objects, as long as this process has no newer one."""

    def close(self) -> None:
        """Stop serving weights, and free the shared memory."""
        if self.server is not None:
            self.server.close()
            self.server = None
        self.stored = None
        if self.shared is not None:
            self.memory = None
            scratch.remove(self.shared)
            self.shared = None

    def memory_folder(self) -> Path:
        """A folder in shared memory, which lives as long as this process; what dead processes have left is removed
        before it is made. Raises SyncError."""
        if self.shared is None:
            if not os.access(scratch.SHARED_MEMORY, os.W_OK):
                raise SyncError(
                    f"weight_sync_method: direct needs {scratch.SHARED_MEMORY} between processes; use reload"
                )
            self.shared = scratch.make("shared", scratch.SHARED_MEMORY)
        return self.shared

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors to publish."""
        return self.source.public()

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
        self, version: int, *, dtype: str | None = None, adapter: bool = False, served: bool = False
    ) -> WeightRef:
        """Overwrite the one file in `memory_folder` in place: one copy, no new pages. Raises SyncError.

        served: also serve it to other machines over the network.
        """
        folder = self.memory_folder()
        ref = self.files(folder, version, adapter=True) if adapter else self._overwrite(folder, version, dtype)
        if served:
            assert ref.path is not None
            self.server = self.server or WeightServer()
            self.server.publish(Path(ref.path), version)
            ref.machine, ref.addresses, ref.token = machine_id(), self.server.addresses, self.server.token
        return ref

    def in_object_store(self, version: int, *, dtype: str | None = None, adapter: bool = False) -> WeightRef:
        """Write the version to Ray's object store. Raises SyncError."""
        from mrl.weights.object_store import put_folder, put_tensors

        self.stored = None  # before there is another one: the store need not hold both
        if adapter:
            folder = scratch.make("adapter")
            try:
                ref = self.files(folder, version, adapter=True)
                assert ref.path is not None
                self.stored = put_folder(Path(ref.path))
            finally:
                scratch.remove(folder)
            ref.path, ref.stored = None, self.stored
            return ref
        self.stored, found = put_tensors(without_aliases(self.tensors()), _dtype(dtype))
        return WeightRef(version, checksum=found, bytes=sum(self.stored.sizes.values()), stored=self.stored)

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
        tensors = on_host(self.source.merged(), _dtype(dtype))  # `save_pretrained` names them
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
        self.model.save_pretrained(partial, state_dict=on_host(self.source.saved()))
        for extra in partial.iterdir():
            if extra.name not in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.rmtree(extra) if extra.is_dir() else extra.unlink()


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype
