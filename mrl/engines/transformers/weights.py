"""Loading a directory of safetensors into a live model: everything is checked before the first byte is written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mrl.errors import SyncError
from mrl.weights.hub_names import from_hub, hub_shapes
from mrl.weights.sharded import local, write_into

_NAMES_SHOWN = 8


def load_directory(module: nn.Module, directory: str) -> None:
    """Copy the tensors under `directory` into `module`'s, in place and cast to their dtypes; into sharded ones, parts.

    Names and shapes are those of Hugging Face files (mrl.weights.hub_names). For tied tensors (a head and its
    embedding) one is enough; several must be equal. Raises SyncError that names the tensors when a file is missing or
    damaged, or a name or shape does not match; `module` is then untouched.
    """
    if hasattr(module, "peft_config"):
        raise SyncError(f"{directory} cannot be loaded into a model wrapped by PEFT: give the engine the plain model")
    file_of = _tensor_files(Path(directory))
    own, wanted = module.state_dict(), hub_shapes(module)
    groups = _shared(module, own, wanted)
    _check_names(wanted, groups, set(file_of), directory)
    _check_tensors(wanted, groups, file_of, directory)
    with torch.no_grad(), ExitStack() as files:
        opened = {path: files.enter_context(safe_open(path, framework="pt")) for path in sorted(set(file_of.values()))}
        for part in from_hub(module, file_of):
            for name, tensor in part.convert(module, lambda name: opened[file_of[name]].get_tensor(name)).items():
                write_into(own[name], tensor)


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Which file holds each tensor, read from the files' headers and checked against the index if there is one."""
    index = directory / "model.safetensors.index.json"
    try:
        if index.exists():
            listed: dict[str, str] = json.loads(index.read_text())["weight_map"]
            paths = sorted({directory / name for name in listed.values()})
        else:
            listed, paths = {}, sorted(directory.glob("*.safetensors"))
        if not paths:
            raise SyncError(f"{directory} holds no .safetensors file")
        file_of: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                file_of.update(dict.fromkeys(file.keys(), path))
    except (OSError, SafetensorError, KeyError, ValueError) as e:
        raise SyncError(f"weights in {directory} cannot be read: {e}") from e
    if absent := set(listed) - set(file_of):
        raise SyncError(f"{index} lists tensors that its files do not hold: {_names(absent)}")
    return file_of


def _check_names(wanted: dict[str, Tensor], groups: list[list[str]], given: set[str], directory: str) -> None:
    if unknown := given - set(wanted):
        raise SyncError(f"{directory} has tensors the model does not know: {_names(unknown)}")
    missing = [names[0] for names in groups if not given.intersection(names)]
    if missing:
        raise SyncError(f"{directory} lacks tensors of the model: {_names(missing)}")


def _check_tensors(
    wanted: dict[str, Tensor], groups: list[list[str]], file_of: dict[str, Path], directory: str
) -> None:
    wrong = []
    for path in set(file_of.values()):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                shape = tuple(file.get_slice(name).get_shape())
                if shape != tuple(wanted[name].shape):
                    wrong.append(f"{name} is {list(shape)}, the model's {list(wanted[name].shape)}")
    if wrong:
        raise SyncError(f"{directory} has tensors of another shape: {'; '.join(sorted(wrong)[:_NAMES_SHOWN])}")
    for names in groups:
        stored = [name for name in names if name in file_of]
        first = _read(file_of, stored[0]) if len(stored) > 1 else None
        for other in stored[1:]:
            if first is not None and not torch.equal(first, _read(file_of, other)):
                raise SyncError(f"{directory} has different values for {stored[0]} and {other}, tied in the model")


def _shared(module: nn.Module, own: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[list[str]]:
    """Names in files, grouped by the module's memory they load into. Fused or split tensors never count as tied."""
    groups: dict[tuple[int, tuple[int, ...]] | str, list[str]] = {}
    for name, tensor in own.items():
        here = local(tensor)
        key = (here.data_ptr(), tuple(tensor.shape)) if here.numel() else name
        groups.setdefault(key, []).append(name)
    in_files = {part.target: part.names[0] for part in from_hub(module, wanted) if part.converter is None}
    tied = [[in_files[name] for name in names if name in in_files] for names in groups.values()]
    known = {name for names in tied for name in names}
    return [names for names in tied if names] + [[name] for name in wanted if name not in known]


def _read(file_of: dict[str, Path], name: str) -> Tensor:
    with safe_open(file_of[name], framework="pt") as file:
        return file.get_tensor(name)


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN
    return ", ".join(ordered[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
