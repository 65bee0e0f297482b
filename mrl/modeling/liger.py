"""Liger's layer kernels (arXiv 2410.10989) in the actor's model: norms, rotary positions, gated MLPs, one kernel each.

Its fused losses are never used: there are only a few, with the gradient computed inside the kernel, while losses here
are an open set. Logits are tiled anyway (mrl.algorithms.logprobs).

Liger also patches transformers' modules, so models of the same architecture that this process loads later run its
kernels too.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from mrl.config import ModelConfig, TrainingConfig
from mrl.errors import ConfigError, ModelError
from mrl.modeling.forward import causal_lm_of
from mrl.models import load_config

KERNELS = {
    **dict.fromkeys(("rope", "rms_norm", "layer_norm", "swiglu", "geglu"), True),
    **dict.fromkeys(("cross_entropy", "fused_linear_cross_entropy"), False),
}
"""Liger's arguments; it ignores those an architecture has no kernel for."""

TOLERANCE = 1e-3
"""Largest difference of hidden states in float32, as a share of the largest of them."""


def check_liger(training: TrainingConfig, model: ModelConfig, device: torch.device) -> None:
    """Raise ConfigError or ModelError where `use_liger_kernel` cannot be had, before the model is loaded."""
    if not training.use_liger_kernel:
        return
    if device.type != "cuda":
        raise ConfigError(
            f"use_liger_kernel: Liger's kernels are for CUDA and the model is on {device.type}; leave it out"
        )
    if device.index:
        raise ConfigError(
            f"use_liger_kernel: Liger's kernels run on the first GPU a process sees, not on {device}; set "
            f"CUDA_VISIBLE_DEVICES to GPU {device.index} first and use device: cuda, or leave it out"
        )
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError("use_liger_kernel: the package is not installed; pip install 'mrl[liger]', or leave it out")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    model_type = load_config(model).model_type
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        known = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise ModelError(
            f"use_liger_kernel: Liger has no kernels for the architecture of {model.model!r} ({model_type}); leave it "
            f"out. It has them for {known}"
        )


def apply_liger(model: Any) -> None:
    """Patch a loaded model's layers with Liger's kernels; tensors and their names do not change.

    Raises ModelError where the hidden states of a few tokens then differ.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    before_LH = _hidden(model)
    _apply_liger_kernel_to_instance(model, **KERNELS)
    difference, scale = float((_hidden(model) - before_LH).abs().max()), float(before_LH.abs().max())
    if not difference <= TOLERANCE * scale:
        raise ModelError(
            f"use_liger_kernel: with Liger's kernels this model's hidden states differ by {difference:.2g} (they go up "
            f"to {scale:.2g}); leave it out"
        )


@torch.no_grad()
def _hidden(model: Any) -> Tensor:
    """Hidden states of a few tokens, [L, H]. Uses no random numbers: the run's generator must not advance."""
    lm = causal_lm_of(model)
    words = lm.config.get_text_config().vocab_size
    ids_1L = (torch.arange(17, device=lm.device) * 7919 % words)[None]
    hidden_1LH: Tensor = lm.get_decoder()(input_ids=ids_1L, use_cache=False).last_hidden_state
    return hidden_1LH[0].float()
