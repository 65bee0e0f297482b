"""A sharded optimizer's state in files (torch.distributed.checkpoint): every rank writes its parts, and any number of
processes reads them."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mrl.actor.parallel.files import gather_files
from mrl.actor.parallel.world import World
from mrl.errors import CheckpointError
from mrl.weights.sharded import is_sharded

SHARDS = "trainer/optimizer"
"""Folder in a checkpoint."""


def write_shards(world: World, folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Write the optimizer's state into a new folder, all ranks together, which need not see it: rank 0 gets what others
    wrote. Raises CheckpointError.

    Names are the parameters' and the state's (`model.norm.weight.exp_avg`).
    """
    world.lead(lambda: _make(folder))
    seen = folder.is_dir()
    own = None if seen else tempfile.TemporaryDirectory(prefix="mrl-shards-")
    state = {
        f"{name}.{key}": value
        for name, parameter in _named(model, optimizer)
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder if own is None else own.name))
        if not all(world.everyone(seen)):
            gather_files(world, folder, None if own is None else Path(own.name))
    except (CheckpointException, OSError) as error:
        raise CheckpointError(
            f"the optimizer's state could not be written to {folder} ({_cause(error)}); free space there, or choose "
            "another run_dir"
        ) from error
    finally:
        if own is not None:
            own.cleanup()


def read_shards(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes: of sharded parameters this rank's parts. Raises ValueError for another
    model's."""
    reader = dcp.FileSystemReader(folder)
    stored = dict(reader.read_metadata().state_dict_metadata)
    wanted: dict[str, Tensor] = {}
    state: dict[int, dict[str, Tensor]] = {}
    for index, (name, parameter) in enumerate(_named(model, optimizer)):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            found = stored.pop(f"{name}.{key}", None)
            if found is None:
                continue
            size = getattr(found, "size", torch.Size())
            if key != "step" and size != parameter.shape:
                raise ValueError(f"{name} is {list(parameter.shape)}, and {list(size)} in {folder}")
            here = torch.zeros(size)
            if key != "step" and is_sharded(model):
                here = torch.zeros_like(parameter, requires_grad=False)
            wanted[f"{name}.{key}"] = here
            state.setdefault(index, {})[key] = here
    if stored:
        raise ValueError(f"{folder} has state of parameters that are not trained here: {', '.join([*stored][:3])}")
    if wanted:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads what it needs
            dcp.load(wanted, storage_reader=reader, no_dist=True)
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _make(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be made ({error.strerror})") from error


def _named(model: Any, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """The optimizer's parameters in its order, by their names."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(name_of[id(p)], p) for group in optimizer.param_groups for p in group["params"]]


def _cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None) or {}
    found = next((failure[0] for failure in failures.values()), error)
    return (str(found).strip() or type(found).__name__).splitlines()[0]
