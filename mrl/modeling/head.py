"""A model's output head, decomposed so that full logits are never in memory.

What a model does to head(hidden) is tested, not looked up: models scale or softcap their logits in many ways. Where the
head cannot be decomposed, or a probe disagrees, there is no `OutputHead` and the model's own logits are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mrl.algorithms.logprobs import LogitTransform, LowRank, logprobs_from_logits, token_logprobs

SOFTCAP_NAMES = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config fields that hold the softcap of the logits."""


@dataclass(frozen=True)
class OutputHead:
    """How logits are computed from hidden states: times `hidden_scale`, through the linear layer, then `transform`."""

    hidden_scale: float
    transform: LogitTransform

    def logprobs(
        self, linear: Any, hidden_NH: Tensor, targets_N: Tensor, temperature: float, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """See `token_logprobs`. linear: the model's output embeddings, with or without a LoRA adapter."""
        if self.hidden_scale != 1.0:
            hidden_NH = hidden_NH * self.hidden_scale
        base, low_rank = _parts(linear, hidden_NH)
        return token_logprobs(
            hidden_NH,
            base.weight,
            base.bias,
            targets_N,
            temperature,
            low_rank=low_rank,
            transform=self.transform,
            **options,
        )

    def logits(self, linear: Any, hidden_NH: Tensor) -> Tensor:
        """All logits of some tokens, N×V, float32."""
        return self.transform(linear(hidden_NH.float() * self.hidden_scale)).float()


@torch.no_grad()
def find_head(causal_lm: Any, device: torch.device) -> OutputHead | None:
    """The head of a causal language model, or None where its logits are not a known function of its hidden states."""
    linear = causal_lm.get_output_embeddings()
    config = causal_lm.config.get_text_config()
    probe_BL = torch.arange(8, device=device)[None] % config.vocab_size
    try:
        _parts(linear, torch.zeros(1, linear.in_features, device=device))
        hidden_BLH = causal_lm.get_decoder()(input_ids=probe_BL, use_cache=False).last_hidden_state
    except (AttributeError, TypeError):
        return None
    transform = _transform(causal_lm, linear, probe_BL)
    if transform is None:
        return None
    hidden_scale = _hidden_scale(causal_lm, linear, probe_BL, hidden_BLH)
    if hidden_scale is None:
        return None
    head = OutputHead(hidden_scale, transform)
    targets_N = (probe_BL[0] * 7 + 3) % config.vocab_size
    got_N, _ = head.logprobs(linear, hidden_BLH[0], targets_N, 1.0, compute_dtype=hidden_BLH.dtype)
    expected_N, _ = logprobs_from_logits(causal_lm(input_ids=probe_BL, use_cache=False).logits[0], targets_N)
    return head if torch.allclose(got_N, expected_N, rtol=1e-4, atol=1e-4) else None


def _parts(linear: Any, hidden_NH: Tensor) -> tuple[Any, LowRank | None]:
    """The linear layer, and the active LoRA adapter's low-rank update of it. Raises TypeError for other layers."""
    if type(linear) is nn.Linear:
        return linear, None
    adapters = getattr(linear, "active_adapters", [])
    base = getattr(linear, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(linear, "lora_A") or linear.merged:
        raise TypeError(f"{type(linear).__name__} is neither a linear layer nor a LoRA adapter beside one")
    if linear.disable_adapters or not adapters:
        return base, None
    if (
        len(adapters) > 1
        or getattr(linear, "use_dora", {}).get(adapters[0])
        or linear.lora_B[adapters[0]].bias is not None
    ):
        raise TypeError("only one plain LoRA adapter at a time is a low-rank update")
    name = adapters[0]
    low_NR = linear.lora_A[name](linear.lora_dropout[name](hidden_NH.to(linear.lora_A[name].weight.dtype)))
    return base, LowRank(low_NR * linear.scaling[name], linear.lora_B[name].weight)


def _transform(causal_lm: Any, linear: Any, probe_BL: Tensor) -> LogitTransform | None:
    """What the model does to logits, found by replacing the head's output with a ramp that goes far beyond any cap."""
    ramp_V = torch.linspace(-200, 200, linear.out_features, device=probe_BL.device)
    hook = linear.register_forward_hook(lambda _, args, out: ramp_V.to(out.dtype).expand_as(out))
    try:
        seen_V = causal_lm(input_ids=probe_BL, use_cache=False).logits[0, -1].float()
    finally:
        hook.remove()
    if seen_V.shape != ramp_V.shape:
        return None
    middle = (ramp_V.abs() < 1e-2 * 200) & (ramp_V != 0)  # where a cap bends least
    config = causal_lm.config.get_text_config()
    caps = [float(cap) for name in SOFTCAP_NAMES if (cap := getattr(config, name, None))]
    steepness = (seen_V[middle] / ramp_V[middle]).mean().item() if middle.any() else 1.0
    candidates = [LogitTransform(scale, cap) for cap in [None, *caps] for scale in {1.0, *_scales(config), steepness}]
    for candidate in candidates:
        if torch.allclose(candidate(ramp_V), seen_V, rtol=1e-5, atol=1e-4):
            return candidate
    return None


def _scales(config: Any) -> list[float]:
    """Exact factors from the config; more precise than measured ones."""
    found = [getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier", "logits_scaling")]
    numbers = [float(value) for value in found if isinstance(value, (int, float)) and value]
    return numbers + [1 / number for number in numbers]


def _hidden_scale(causal_lm: Any, linear: Any, probe_BL: Tensor, hidden_BLH: Tensor) -> float | None:
    """The factor applied to hidden states before the head (MiniCPM divides them); None = not a plain factor."""
    inputs: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        causal_lm(input_ids=probe_BL, use_cache=False)
    finally:
        hook.remove()
    given_BLH = inputs[-1] if inputs else None
    if given_BLH is None or given_BLH.shape != hidden_BLH.shape:
        return None
    if torch.allclose(given_BLH, hidden_BLH, rtol=1e-5, atol=1e-6):
        return 1.0
    scale = ((given_BLH * hidden_BLH).sum() / hidden_BLH.square().sum()).item()
    return scale if torch.allclose(given_BLH, hidden_BLH * scale, rtol=1e-4, atol=1e-5) else None
