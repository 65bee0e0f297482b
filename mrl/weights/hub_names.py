"""Tensors under the names and in the shapes that a model's Hugging Face files have.

Some models hold parameters in another layout than their files: a layer's experts in one tensor where the files have
three for each, or a head under another name. The actor publishes weights as `save_pretrained` writes them, because
every engine loads those; loading converts back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mrl.errors import ModelError


def to_hub(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors`, under the names of `model.state_dict()`, as its files have them.

    Give all of them: a tensor in a file may be made of several. Split or joined ones are views or copies. Tied ones
    keep every name, in their order.
    """
    from transformers.core_model_loading import revert_weight_conversion

    if not _conversions(model):
        return dict(tensors)
    public: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))  # type: ignore[arg-type]
    kept = [name for name in tensors if name in public]  # of tied tensors the first name counts, here as there
    return {name: public[name] for name in [*kept, *(name for name in public if name not in tensors)]}


def converts(model: nn.Module) -> bool:
    """Whether the model's files have tensors in another form than the model: `to_hub` then needs all at once."""
    return bool(_conversions(model))


def hub_shapes(model: nn.Module) -> dict[str, Tensor]:
    """What the model's files hold, as tensors without data; of a sharded model, the whole tensors."""
    own = model.state_dict()
    return to_hub(model, {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in own.items()})


@dataclass
class FileTensors:
    """Tensors in the files that become one or several of the model's parameters."""

    target: str
    """The first one's name in the model."""
    names: list[str] = field(default_factory=list)
    """In the files, in the order in which they are joined."""
    converter: Any = None
    patterns: list[str] = field(default_factory=list)

    def convert(self, model: nn.Module, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Read them, and return the model's own."""
        if self.converter is None:
            return {self.target: read(self.names[0])}
        converter: Any = copy.deepcopy(self.converter)
        for name, pattern in zip(self.names, self.patterns, strict=True):
            converter.add_tensor(self.target, name, pattern, read(name))
        found = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def from_hub(model: nn.Module, names: Iterable[str]) -> list[FileTensors]:
    """How tensors in the files, by their names there, become the model's parameters."""
    conversions, own = copy.deepcopy(_conversions(model)), model.state_dict()
    if not conversions:
        return [FileTensors(name, [name]) for name in names]
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parts: dict[str, FileTensors] = {}
    for name in sorted(names, key=dot_natural_key):  # experts by their numbers
        target, pattern = rename_source_key(name, renamings, converters)
        if target not in own and name in own:
            target, pattern = name, None
        part = parts.setdefault(target, FileTensors(target))
        part.names.append(name)
        if pattern is not None:
            part.converter = by_pattern[pattern]
            part.patterns.append(pattern)
    return list(parts.values())


def check_round_trip(model: nn.Module) -> None:
    """Raise ModelError for a model whose files could not be loaded back into it while it runs."""
    public, own = hub_shapes(model), model.state_dict()
    try:
        found = {n: t for part in from_hub(model, public) for n, t in part.convert(model, public.__getitem__).items()}
    except Exception as error:  # whatever transformers' conversions raise for tensors they were not made for
        raise ModelError(f"{_name(model)}: its weights do not come back from their files' form ({error})") from None
    wrong = [name for name in own if name not in found or found[name].shape != own[name].shape]
    if wrong or len(found) != len(own):
        raise ModelError(
            f"{_name(model)}: its weights do not come back from their files' form "
            f"({', '.join(sorted({*wrong, *found.keys() - own.keys()})[:3])}), so no worker could load them and no run "
            "be resumed; use another model, or mode: simple"
        )


def _conversions(model: nn.Module) -> list[Any]:
    """Those that transformers loaded the model with, or would; `save_pretrained` uses the same."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    if not isinstance(model, PreTrainedModel):
        return []
    loaded_by: list[Any] | None = getattr(model, "_weight_conversions", None)
    if loaded_by is not None:
        return loaded_by
    return [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]


def _name(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
