"""Logprobs of given tokens from hidden states and the output head, without full logits.

Full logits cost N×V floats (16×512 tokens, vocabulary 151,936: 5 GB, three times that in the backward pass). Here one
tile (some tokens × a slice of the vocabulary) exists at a time, and is recomputed in the backward pass. The sum over
the vocabulary is carried from tile to tile as in online softmax (arXiv 1805.02867). A tile stays in the processor's
cache, so this is faster than full logits although it multiplies by the head four times instead of three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.products import add_product, product

CPU_TILE = (1024, 4096)
"""Tokens × vocabulary slice of a tile: 16 MB in float32. 2 to 16 MB take the same time, 150 MB a third more."""
GPU_TILE = (4096, 16384)


@dataclass(frozen=True)
class LogitTransform:
    """How a model turns head(hidden) into logits: softcap · tanh(scale · x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


@dataclass(frozen=True)
class LowRank:
    """A low-rank update of the head, which adds input_NR @ output_VR^T to its logits (LoRA: scaled A·hidden, and B)."""

    input_NR: Tensor
    output_VR: Tensor


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float = 1.0,
    *,
    low_rank: LowRank | None = None,
    transform: LogitTransform | None = None,
    entropy: bool = True,
    entropy_grad: bool = False,
    compute_dtype: torch.dtype | None = None,
    tile: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at each target, and the entropy of that distribution in nats; N each, float32
    (float64 for float64 inputs).

    logits = transform(hidden @ weight^T + low rank + bias), multiplied in `compute_dtype` (default: the weight's),
    accumulated and kept in float32. Differentiable in hidden, weight, bias and the low-rank pair; on the CPU, tokens
    whose gradient is 0 cost nothing in the backward pass. The entropy has a gradient with `entropy_grad`, and is 0
    without `entropy`.
    tile: number of tokens and vocabulary entries of a tile.
    """
    device = hidden_NH.device
    settings = _Settings(
        temperature=temperature,
        transform=transform or LogitTransform(),
        dtype=compute_dtype or weight_VH.dtype,
        entropy=entropy or entropy_grad,
        entropy_grad=entropy_grad,
        tile=tile or (CPU_TILE if device.type == "cpu" else GPU_TILE),
    )
    low = (None, None) if low_rank is None else (low_rank.input_NR, low_rank.output_VR)
    with torch.autocast(device.type, enabled=False):
        return _TiledLogprobs.apply(hidden_NH, weight_VH, bias_V, *low, targets_N, settings)


def logprobs_from_logits(
    logits_NV: Tensor, targets_N: Tensor, temperature: float = 1.0, *, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """The same from given logits, with gradients into them; from the entropy only with `entropy_grad`."""
    log_p_NV = torch.log_softmax(logits_NV.float() / temperature, dim=-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy_N = -(log_p_NV.exp() * log_p_NV).sum(dim=-1)
    return log_p_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N


@dataclass(frozen=True)
class _Settings:
    temperature: float
    transform: LogitTransform
    dtype: torch.dtype
    entropy: bool
    entropy_grad: bool
    tile: tuple[int, int]

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, low_in, low_out, targets_N, settings):  # type: ignore[no-untyped-def]
        head = _Head(hidden, weight, bias, low_in, low_out, settings)
        count = len(targets_N)
        logit_N, total_N, moment_N = (hidden.new_zeros(count, dtype=settings.sum_dtype) for _ in range(3))
        largest_N = torch.full_like(logit_N, -torch.inf)
        for vocab in head.vocab_tiles():
            for tokens, logits_CW in head.logits(vocab):
                column_C, inside_C = _columns(targets_N[tokens], vocab)
                at_target_C = logits_CW.gather(1, column_C[:, None]).squeeze(1)
                logit_N[tokens] = torch.where(inside_C, at_target_C, logit_N[tokens])
                before_C, largest_C = largest_N[tokens], torch.maximum(largest_N[tokens], logits_CW.amax(dim=1))
                shrink_C = (before_C - largest_C).exp()
                logits_CW -= largest_C[:, None]
                if settings.entropy:  # sum of e^x · x, moved along with the maximum
                    p_CW = logits_CW.exp()
                    moved_C = torch.where(total_N[tokens] > 0, before_C - largest_C, 0.0) * total_N[tokens]
                    moment_N[tokens] = (moment_N[tokens] + moved_C) * shrink_C + torch.linalg.vecdot(p_CW, logits_CW)
                else:
                    p_CW = logits_CW.exp_()
                total_N[tokens] = total_N[tokens] * shrink_C + p_CW.sum(dim=1)
                largest_N[tokens] = largest_C
        log_z_N = largest_N + total_N.log()
        entropy_N = total_N.log() - moment_N / total_N if settings.entropy else torch.zeros_like(log_z_N)
        ctx.save_for_backward(hidden, weight, bias, low_in, low_out, targets_N, log_z_N, entropy_N)
        ctx.settings = settings
        if not settings.entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        return logit_N - log_z_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N, grad_entropy_N):  # type: ignore[no-untyped-def]
        settings: _Settings = ctx.settings
        hidden, weight, bias, low_in, low_out, targets_N, log_z_N, entropy_N = ctx.saved_tensors
        needed = [need and t is not None for need, t in zip(ctx.needs_input_grad, ctx.saved_tensors, strict=False)][:5]
        grad_entropy_N = grad_entropy_N if settings.entropy_grad else None
        active = grad_N != 0 if grad_entropy_N is None else (grad_N != 0) | (grad_entropy_N != 0)
        # On an accelerator this would synchronise, for the host to know which tokens to skip.
        rows = None if not hidden.is_cpu or bool(active.all()) else active.nonzero().squeeze(1)

        def kept(value: Tensor | None) -> Tensor | None:
            return value if rows is None or value is None else value[rows]

        head = _Head(kept(hidden), weight, bias, kept(low_in), low_out, settings)
        tiles = _Gradients(head, needed, kept(grad_N), kept(grad_entropy_N))
        grads = tiles.run(kept(targets_N), kept(log_z_N), kept(entropy_N))
        for index, whole in ((0, hidden), (3, low_in)):
            part = grads[index]
            if rows is not None and part is not None:
                grads[index] = torch.zeros_like(whole).index_copy_(0, rows, part.to(whole.dtype))
        return (*grads, None, None)


class _Head:
    """Tiles of logits divided by the temperature; all tiles share one buffer."""

    def __init__(self, hidden, weight, bias, low_in, low_out, settings: _Settings) -> None:  # type: ignore[no-untyped-def]
        self.hidden_NH = hidden.to(settings.dtype)
        self.weight, self.bias, self.low_out, self.settings = weight, bias, low_out, settings
        self.low_NR = None if low_in is None else low_in.to(settings.dtype)
        self.factor = settings.transform.scale / settings.temperature
        tokens, vocab = settings.tile
        self.tokens = [slice(i, min(i + tokens, len(hidden))) for i in range(0, len(hidden), tokens)]
        self.vocab = [slice(i, min(i + vocab, len(weight))) for i in range(0, len(weight), vocab)]
        size = min(tokens, len(hidden)) * min(vocab, len(weight))
        self.memory = torch.empty(size, dtype=settings.sum_dtype, device=hidden.device)

    def vocab_tiles(self) -> Iterator[slice]:
        """Slices of the vocabulary. Casts of the head's weights exist for one slice at a time."""
        for vocab in self.vocab:
            self.weight_WH = self.weight[vocab].to(self.settings.dtype)
            self.low_WR = None if self.low_out is None else self.low_out[vocab].to(self.settings.dtype)
            self.bias_W = None if self.bias is None else self.bias[vocab].to(self.settings.sum_dtype)
            yield vocab

    def logits(self, vocab: slice) -> Iterator[tuple[slice, Tensor]]:
        """(tokens, their logits for this vocabulary slice). The caller may change it; the next tile overwrites it."""
        transform = self.settings.transform
        for tokens in self.tokens:
            shape = (tokens.stop - tokens.start, vocab.stop - vocab.start)
            logits_CW = self.memory[: shape[0] * shape[1]].view(shape)
            product(self.hidden_NH[tokens], self.weight_WH.T, out=logits_CW)
            if self.low_NR is not None and self.low_WR is not None:
                add_product(logits_CW, self.low_NR[tokens], self.low_WR.T)
            if self.bias_W is not None:
                logits_CW += self.bias_W
            if transform.softcap is not None:
                logits_CW.mul_(transform.scale / transform.softcap).tanh_()
                logits_CW.mul_(transform.softcap / self.settings.temperature)
            elif self.factor != 1.0:
                logits_CW.mul_(self.factor)
            yield tokens, logits_CW


class _Gradients:
    """The backward pass. With p the softmax, g and e the gradients of logprob and entropy H, for logit x of token v:

    d/dx = g (1[v = target] - p) - e p (log p + H)
    """

    def __init__(self, head: _Head, needed: list[bool], grad_N: Any, grad_entropy_N: Any) -> None:
        self.head, self.needed = head, needed
        self.grad_N, self.grad_entropy_N = grad_N, grad_entropy_N
        # Without an entropy term g is a factor of the whole row: it multiplies hidden states instead of logits.
        row_N = -head.factor * (grad_N if grad_entropy_N is None else torch.ones_like(grad_N))
        self.row_N1 = row_N[:, None]

    def run(self, targets_N: Any, log_z_N: Any, entropy_N: Any) -> list[Tensor | None]:
        """Gradients of hidden, weight, bias and the low-rank pair; None for those that are not needed."""
        head, (for_hidden, for_weight, for_bias, for_low_in, for_low_out) = self.head, self.needed
        dtype, sum_dtype = head.settings.dtype, head.settings.sum_dtype

        def like(value: Tensor | None, need: bool) -> Tensor | None:
            return torch.zeros_like(value, dtype=sum_dtype) if need and value is not None else None

        def scaled(value: Tensor | None) -> Tensor | None:
            return None if value is None else (value * self.row_N1).to(dtype)

        hidden_NH, low_in_NR = like(head.hidden_NH, for_hidden), like(head.low_NR, for_low_in)
        weight_VH = torch.empty_like(head.weight) if for_weight else None
        low_out_VR = torch.empty_like(head.low_out) if for_low_out else None
        bias_V = torch.empty_like(head.bias) if for_bias else None
        scaled_hidden_NH = scaled(head.hidden_NH) if for_weight else None
        scaled_low_NR = scaled(head.low_NR) if for_low_out else None
        for vocab in head.vocab_tiles():
            width = vocab.stop - vocab.start
            sums = {
                name: value.new_zeros(width, *value.shape[1:], dtype=sum_dtype)
                for name, value in (("weight", weight_VH), ("low", low_out_VR), ("bias", bias_V))
                if value is not None
            }
            for tokens, logits_CW in head.logits(vocab):
                wrong_CW = self._towards(logits_CW, tokens, vocab, targets_N, log_z_N, entropy_N)
                if "bias" in sums:
                    sums["bias"] += wrong_CW.T @ self.row_N1[tokens, 0].to(sum_dtype)
                product_CW = wrong_CW.to(dtype)
                for grad, other in ((hidden_NH, head.weight_WH), (low_in_NR, head.low_WR)):
                    if grad is not None and other is not None:
                        add_product(grad[tokens], product_CW, other)
                for name, rows in (("weight", scaled_hidden_NH), ("low", scaled_low_NR)):
                    if name in sums and rows is not None:
                        add_product(sums[name], product_CW.T, rows[tokens])
            for name, whole in (("weight", weight_VH), ("low", low_out_VR), ("bias", bias_V)):
                if whole is not None:
                    whole[vocab] = sums[name]
        return [
            None if hidden_NH is None else hidden_NH.mul_(self.row_N1),
            weight_VH,
            bias_V,
            None if low_in_NR is None else low_in_NR.mul_(self.row_N1),
            low_out_VR,
        ]

    def _towards(self, logits_CW: Tensor, tokens: slice, vocab: slice, targets_N: Any, log_z_N: Any, entropy_N: Any):  # type: ignore[no-untyped-def]
        """Gradient of a tile's logits before `transform`, up to the factor `row_N1`; C×W."""
        settings = self.head.settings
        softcap, slope_CW = settings.transform.softcap, None
        if softcap is not None:  # tanh' = 1 - tanh²
            slope_CW = (logits_CW * (settings.temperature / softcap)).square_().neg_().add_(1)
        log_p_CW = logits_CW.sub_(log_z_N[tokens, None])
        column_C, inside_C = _columns(targets_N[tokens], vocab)
        if self.grad_entropy_N is None:
            wrong_CW = log_p_CW.exp_()
            at_target_C = -inside_C.to(wrong_CW.dtype)
        else:
            share_CW = (log_p_CW + entropy_N[tokens, None]).mul_(self.grad_entropy_N[tokens, None])
            wrong_CW = log_p_CW.exp_().mul_(share_CW.add_(self.grad_N[tokens, None]))
            at_target_C = torch.where(inside_C, -self.grad_N[tokens], 0.0).to(wrong_CW.dtype)
        wrong_CW.scatter_add_(1, column_C[:, None], at_target_C[:, None])
        return wrong_CW if slope_CW is None else wrong_CW.mul_(slope_CW)


def _columns(targets_C: Tensor, vocab: slice) -> tuple[Tensor, Tensor]:
    """Each target's column in a tile, and whether it is in the tile."""
    column_C = targets_C - vocab.start
    inside_C = (column_C >= 0) & (column_C < vocab.stop - vocab.start)
    return column_C.clamp(0, vocab.stop - vocab.start - 1), inside_C
