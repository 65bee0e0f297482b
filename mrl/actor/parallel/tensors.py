"""Reading a model's weights, whole or sharded: a sharded tensor is gathered when rank 0 asks for it, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mrl.actor.lora import merged_dtype, merged_parts, merged_state_dict, public_state_dict, saved_state_dict
from mrl.actor.parallel.world import Ranks, World
from mrl.system.transfers import on_host
from mrl.weights.hub_names import converts, to_hub
from mrl.weights.sharded import is_sharded, whole
from mrl.weights.tensors import MadeTensors

T = TypeVar("T")


class ModelTensors(Protocol):
    """A model's tensors, by what they are for."""

    def public(self) -> Mapping[str, Tensor]:
        """Under the names of its Hugging Face files, adapters merged: `public_state_dict`."""
        ...

    def merged(self) -> dict[str, Tensor]:
        """Under the module's own names, adapters merged: `merged_state_dict`."""
        ...

    def saved(self) -> dict[str, Tensor]:
        """What `save_pretrained` writes; with an adapter only the adapter's: `saved_state_dict`."""
        ...


class LiveTensors:
    """Of a model that is whole here."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def public(self) -> Mapping[str, Tensor]:
        return public_state_dict(self.model)

    def merged(self) -> dict[str, Tensor]:
        return merged_state_dict(self.model)

    def saved(self) -> dict[str, Tensor]:
        return saved_state_dict(self.model)


def lead_with(world: World, model: Any, work: Callable[[ModelTensors], T]) -> T:
    """Have rank 0 do something with the model's tensors, the other ranks helping where they are sharded. The result, or
    the error, is every rank's."""
    if not isinstance(world, Ranks) or not is_sharded(model):
        return world.lead(lambda: work(LiveTensors(model)))
    parts = _Parts(model)
    if not world.first:
        while isinstance(asked := world.tell(None), _Ask):
            parts.make(asked)
        return world.lead(lambda: None)  # type: ignore[return-value]

    def lead() -> T:
        try:
            return work(_GatheredTensors(world, parts))
        finally:
            world.tell(None)

    return world.lead(lead)


class _Ask(tuple[str, str]):
    """Which tensor rank 0 wants: the table, and its name there."""


class _Parts:
    """A sharded model's tensors. Making a whole one takes all ranks."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.live, self.adapted = merged_parts(model)
        self.written = saved_state_dict(model)
        shared = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        prefix = "" if self.inner is model else "base_model.model."
        self.first_name = _first_names(self.written, shared)
        """By name: itself, or of tied tensors the first one's."""
        self.first_merged = _first_names(self.live, {name.removeprefix(prefix): p for name, p in shared.items()})

    def make(self, asked: tuple[str, str]) -> Tensor:
        kind, name = asked
        table: Mapping[str, Tensor] = self.written
        if kind == "merged":
            table = self.adapted if name in self.adapted.parts else self.live
        with torch.no_grad():
            return whole(table[name].detach())


class _Gathered(MadeTensors):
    """Some of the tensors, as rank 0 looks them up."""

    def __init__(self, ranks: Ranks, parts: _Parts, kind: str, names: list[str]) -> None:
        self.ranks, self.parts, self.kind = ranks, parts, kind
        table = parts.live if kind == "merged" else parts.written
        adapted = parts.adapted.parts if kind == "merged" else {}
        self.described = {
            name: torch.empty(
                (), dtype=merged_dtype(table[name]) if name in adapted else table[name].dtype, device=table[name].device
            ).expand(table[name].shape)
            for name in names
        }

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.described:
            raise KeyError(name)
        asked = _Ask((self.kind, name))
        self.ranks.tell(asked)
        return self.parts.make(asked)

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)


class _GatheredTensors:
    """Of a sharded model, for rank 0."""

    def __init__(self, ranks: Ranks, parts: _Parts) -> None:
        self.ranks, self.parts = ranks, parts

    def public(self) -> Mapping[str, Tensor]:
        if converts(self.parts.inner):  # they are joined or split, so that all are needed
            return to_hub(self.parts.inner, self.merged())
        return self._gathered("merged", self.parts.first_merged)

    def merged(self) -> dict[str, Tensor]:
        return self._all("merged", self.parts.first_merged)

    def saved(self) -> dict[str, Tensor]:
        return self._all("saved", self.parts.first_name)

    def _gathered(self, kind: str, first: dict[str, str]) -> _Gathered:
        return _Gathered(self.ranks, self.parts, kind, [name for name in first if first[name] == name])

    def _all(self, kind: str, first: dict[str, str]) -> dict[str, Tensor]:
        """In host memory; tied ones share it."""
        found = on_host(self._gathered(kind, first))
        return {name: found[first[name]] for name in first}


def _first_names(tensors: Mapping[str, Tensor], parameter: Mapping[str, int]) -> dict[str, str]:
    """parameter: by name, which it is."""
    seen: dict[int, str] = {}
    return {name: seen.setdefault(parameter[name], name) if name in parameter else name for name in tensors}
