"""FSDP2: every rank keeps a part of every tensor, and gathers a layer's weights while it computes with them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from mrl.actor.parallel.world import Ranks
from mrl.modeling.forward import INSIDE, causal_lm_of
from mrl.modeling.precision import follow_input


def make_mesh(ranks: Ranks) -> DeviceMesh:
    """All ranks in one row."""
    return init_device_mesh(ranks.device.type, (ranks.size,))


def shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Shard a model, or a PEFT model's inner one, in place; its parts go to the mesh's device. Gradients become sums
    over the ranks, in float32.

    dtype: in which layers are gathered, None = as they are stored. What is outside the layers, embeddings, head and
    last norm, is gathered as it is stored: autocast does not round the residual stream either.
    """
    causal_lm = causal_lm_of(model)
    policy = MixedPrecisionPolicy()
    if dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers_of(causal_lm):
        for module in layer.modules():
            if dtype is not None and type(module) is nn.Linear:
                follow_input(module)  # passes in float32 are taken too, to measure what rounding does
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # Embeddings and head stay gathered between forward and backward pass: both need them.
    fully_shard(causal_lm, mesh=mesh, reshard_after_forward=False)
    for module in causal_lm.modules():
        if isinstance(module, FSDPModule):
            # A plain sum: the loss is weighted for the whole batch already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # Which experts a rank's tokens take must not decide how much it sends.
            module.set_reduce_scatter_unused_params(True, recurse=False)
    setattr(causal_lm, INSIDE, _call)
    register_fsdp_forward_method(causal_lm, INSIDE)


def layers_of(causal_lm: nn.Module) -> list[nn.Module]:
    """What is gathered at a time: the decoder's layers, or what the model says must not be split."""
    found = getattr(causal_lm.get_decoder(), "layers", None)  # type: ignore[operator]
    if isinstance(found, nn.ModuleList):
        return list(found)
    names = set(getattr(causal_lm, "_no_split_modules", None) or [])
    return [module for module in causal_lm.modules() if type(module).__name__ in names]


def _call(compute: object) -> object:
    return compute()  # type: ignore[operator]
