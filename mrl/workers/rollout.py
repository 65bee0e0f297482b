"""The rollout worker: an engine, the policy version it serves, and the checks around both."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mrl.config import ModelConfig
from mrl.engines import ENGINES, Engine
from mrl.errors import EngineError, SyncError
from mrl.sync.volume import pull
from mrl.system import scratch
from mrl.system.machine import machine_id
from mrl.types import Completion, GenerateRequest, TokenSequence, WeightRef
from mrl.weights.checksum import checksum
from mrl.weights.delta import DeltaReader
from mrl.weights.network import fetch
from mrl.weights.object_store import StoredReader

DEFAULT_ACCEPTS = frozenset({"module", "weights"})
"""Kinds of weights that an engine without `accepts` takes: a live module, or a folder of tensors."""

_LOADING = threading.Lock()
"""Engines that compute in this process take new weights one after the other: each of them uses every core."""


STRAGGLER_SECONDS = 1.0
"""How long the calls of a batch wait for one that does not come."""


@dataclass(frozen=True)
class CallBatch:
    """Calls that begin at the same moment, so that the same requests decode in one batch in every run, however long
    each call takes to arrive."""

    number: int
    calls: int


class RolloutWorker:
    """Generates with one engine. Lives on any backend; everything it is given is plain data.

    The engine is made with the first weights, so that a worker which is handed a live module loads no copy of its own.
    options: what the engine's `create` takes besides the model.
    """

    def __init__(self, engine: str, model: dict[str, Any], options: dict[str, Any] | None = None) -> None:
        self.engine_class = ENGINES.get(engine)
        self.model_config = ModelConfig(**model)
        self.options = options or {}
        self.engine: Engine | None = None
        self.folder: Path | None = None
        self.deltas: DeltaReader | None = None
        self.stored: dict[str, StoredReader] = {}
        """By kind of weights."""
        self.arriving: dict[int, list[asyncio.Future[None]]] = {}
        """Calls that wait for the others of their batch, by its number."""

    def load(self) -> None:
        """Serve the configured model as it is, as version 0. Raises ModelError, EngineError."""
        self.engine = self.engine_class.create(self.model_config, **self.options)

    # --- weights ----------------------------------------------------------------------------------------------------

    def initialize_for_weight_sync(self) -> dict[str, Any]:
        """Make ready for updates. Returns the kinds of weights it takes, their dtype (None = as the actor has them),
        and the machine it is on (`machine_id`)."""
        accepts = getattr(self.engine_class, "accepts", DEFAULT_ACCEPTS)
        if "module" not in accepts and self.engine is None:
            self.load()  # it runs elsewhere and starts from the model's own files
        return {"accepts": sorted(accepts), "dtype": getattr(self.engine, "dtype", None), "machine": machine_id()}

    def update_weights(self, ref: WeightRef) -> dict[str, Any]:
        """Serve `ref` from now on. Returns the version now active and the checksum of what is held.

        Raises SyncError; the weights from before are then still served, or, where the engine says so, none.
        """
        here = "module" in getattr(self.engine_class, "accepts", DEFAULT_ACCEPTS)
        with _LOADING if here else contextlib.nullcontext():
            if self.engine is None:
                self.engine = self.engine_class.create(self.model_config, ref.module, **self.options)
            ref = self._localize(ref)
            version = self.engine.load_weights(ref)
            return {"version": version, "checksum": None if ref.checksum is None else self._held_checksum(ref)}

    def reload_from_checkpoint(self, path: str, version: int = 0) -> dict[str, Any]:
        """Serve a checkpoint (a Hugging Face model folder) as `version`, with a new engine. Raises SyncError,
        EngineError, ModelError."""
        accepts = getattr(self.engine_class, "accepts", DEFAULT_ACCEPTS)
        if self.engine is not None and "model" in accepts:
            return self.update_weights(WeightRef(version, path=path, kind="model"))
        if "module" not in accepts:
            raise SyncError("this engine cannot be rebuilt from a checkpoint; use weight_sync_method: reload")
        self.close()
        self.engine = self.engine_class.create(self.model_config.model_copy(update={"model": path}), **self.options)
        self.engine.version = version
        return {"version": version, "checksum": None}

    # --- tokens -----------------------------------------------------------------------------------------------------

    async def generate(self, requests: list[GenerateRequest], call_batch: CallBatch | None = None) -> list[Completion]:
        """One completion per request, in order, each with the version that produced it. Raises EngineError.

        call_batch: the calls that begin with this one.
        """
        if call_batch is not None and call_batch.calls > 1:
            await self._wait_for_batch(call_batch)
        return await self._ready().generate(requests)

    async def compute_logprobs(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        """Logprob of every completion token after its prompt, at `temperature`. Raises EngineError."""
        sequences = [TokenSequence(tuple(p), tuple(c), temperature) for p, c in zip(prompts, completions, strict=True)]
        return await self._ready().logprobs(sequences)

    def capacity(self) -> int | None:
        """Requests it can work on at a time, whenever they arrive; None = it decodes one batch at a time."""
        limit: int | None = getattr(self.engine, "capacity", None)
        return limit

    async def progress(self) -> dict[str, int | None]:
        """For the run's progress display, answered while other calls run: the `version` served (None before the first
        weights) and the `sampled_tokens` since the engine was made (None where it does not count them)."""
        own = getattr(self.engine, "sampled_tokens", None)
        version = None if self.engine is None else self.engine.version
        return {"version": version, "sampled_tokens": None if own is None else await own()}

    # --- the engine's life ------------------------------------------------------------------------------------------

    async def health(self) -> dict[str, Any]:
        """The version served (None before the first weights, and after they were dropped), and what the engine says of
        itself. Raises EngineDied."""
        if self.engine is None:
            return {"version": None}
        own = getattr(self.engine, "health", None)
        return {"version": self.engine.version} | ({} if own is None else await own())

    async def sleep(self, level: int) -> None:
        """Free the device's memory; what is in flight ends first. level: 1 keeps the weights in host memory, 2 drops
        them, and nothing is served until weights were sent. Raises EngineError where the engine cannot."""
        await self._sleeper("sleep")(level)

    async def wake(self) -> None:
        """Take the memory back, with the weights from before. Weights that are sent wake it too. Raises EngineError."""
        await self._sleeper("wake")()

    def close(self) -> None:
        """Free the engine."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        if self.folder is not None:
            scratch.remove(self.folder)
            self.folder = self.deltas = None
            self.stored = {}

    # --- inner ------------------------------------------------------------------------------------------------------

    async def _wait_for_batch(self, call_batch: CallBatch) -> None:
        """Wait for the other calls of the batch; not for long, since one that was cancelled on the way never comes."""
        arrived = self.arriving.setdefault(call_batch.number, [])
        arrived.append(asyncio.get_running_loop().create_future())
        if len(arrived) < call_batch.calls:
            await asyncio.wait([arrived[-1]], timeout=STRAGGLER_SECONDS)
        for waiting in self.arriving.pop(call_batch.number, []):
            if not waiting.done():
                waiting.set_result(None)

    def _ready(self) -> Engine:
        if self.engine is None:
            raise EngineError("this rollout worker has no weights yet: sync weights to it before it generates")
        return self.engine

    def _sleeper(self, method: str) -> Callable[..., Awaitable[None]]:
        found: Callable[..., Awaitable[None]] | None = getattr(self._ready(), method, None)
        if found is None:
            raise EngineError("this engine cannot sleep; colocate needs engine: vllm")
        return found

    def _localize(self, ref: WeightRef) -> WeightRef:
        """Weights the engine can load: pulled from a shared disk, fetched from the actor or an object store, or with a
        delta applied."""
        elsewhere = ref.machine is not None and ref.machine != machine_id()
        if ref.pull_seconds is None and ref.kind != "delta" and not elsewhere and ref.stored is None:
            return ref
        if self.folder is None:
            in_memory = elsewhere or ref.stored is not None
            memory = scratch.SHARED_MEMORY if in_memory and os.access(scratch.SHARED_MEMORY, os.W_OK) else None
            self.folder = scratch.make("weights", memory)
        if ref.pull_seconds is not None:
            ref = pull(ref, self.folder / "pulled")
        if elsewhere:
            assert ref.token is not None
            fetch(ref.addresses, ref.token, ref.version, self.folder / "fetched")
            ref = replace(ref, path=str(self.folder / "fetched"))
        if ref.stored is not None:
            if ref.kind not in self.stored:
                self.stored[ref.kind] = StoredReader(self.folder / f"stored-{ref.kind}")
            ref = replace(ref, path=str(self.stored[ref.kind].read(ref.stored)), stored=None)
        if ref.kind == "delta":
            if self.deltas is None:
                self.deltas = DeltaReader(self.folder / "whole")
            ref = self.deltas.apply(ref)
        return ref

    def _held_checksum(self, ref: WeightRef) -> str | None:
        """The checksum of what the engine holds: as it says itself, or computed from its tensors."""
        own = getattr(self._ready(), "held", None)
        if own is not None:
            said: str | None = own()
            return said
        return self._checksum(ref)

    def _checksum(self, ref: WeightRef) -> str:
        import torch

        from mrl.weights.tensors import open_folder

        assert ref.path is not None
        held = self._ready().state_dict()
        with open_folder(ref.path) as tensors:
            if all(held[name].dtype == tensor.dtype for name, tensor in tensors.items()):
                return checksum(held, list(tensors))
            # It holds some in a narrower dtype: each has to be what was sent, rounded.
            for name, tensor in tensors.items():
                if not torch.equal(held[name].cpu(), tensor.to(held[name].dtype)):
                    return f"none, as {name} is another"
            return checksum(tensors)
