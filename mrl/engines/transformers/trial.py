"""Finds the fastest way to run a model that gives the logits of plain forwards, by trying each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from mrl.engines.transformers.kv_cache import GrowingCache
from mrl.engines.transformers.model import CausalLM, Path, StepKind
from mrl.engines.transformers.prefill import Prefilled
from mrl.engines.transformers.static_step import StaticStep
from mrl.errors import EngineError
from mrl.modeling.attention import REPLACED, install

_LENGTHS = (6, 9, 4)
"""Prompt lengths of the trial: two rows of a batch, and one that replaces the first."""


def make_causal_lm(
    module: nn.Module, max_model_len: int, autocast_dtype: torch.dtype | None, decode_step: StepKind = "auto"
) -> CausalLM:
    """The model, set to the fastest path whose logits are those of plain forwards.

    Raises EngineError for a model the decode loop cannot serve (see `CausalLM`), and for one that cannot take static
    steps where `decode_step` asks for them.
    """
    lm = CausalLM(module, max_model_len, autocast_dtype, decode_step)
    lm.path = fastest_path(lm)
    lm.static = _decodes_static(lm)
    return lm


def fastest_path(lm: CausalLM) -> Path:
    """Try the paths, the fastest first. "model's cache" is not tried: it is the fallback.

    A model whose plain logits are not finite gets the fastest path, since nothing can be compared, and an error when it
    generates.
    """
    windows = None if lm.windows is None else set(lm.windows)
    positions = getattr(lm.text_config, "max_position_embeddings", None)
    if windows is None or len(windows - {None}) > 1 or (isinstance(positions, int) and positions < max(_LENGTHS) + 2):
        return "model's cache"
    candidates: list[Path] = []
    before = lm.text_config._attn_implementation
    if before in REPLACED and getattr(lm.inner, "_supports_attention_backend", False):
        if lm.lean is not None and windows == {None}:
            candidates.append("own steps")
        candidates.append("own masks")
    if windows == {None}:
        candidates.append("model's masks")
    expected = _plain_logits(lm) if candidates else []
    finite = all(bool(logits.isfinite().all()) for logits in expected)
    for path in candidates:
        lm.path = path
        if path in ("own steps", "own masks"):
            install(lm.text_config)
        if not finite or _agrees(lm, expected, _eager_trial):
            return path
        lm.text_config._attn_implementation = before
    return "model's cache"


def _decodes_static(lm: CausalLM) -> bool:
    if lm.decode_step == "eager" or (lm.decode_step == "auto" and lm.device.type != "cuda"):
        return False
    static = takes_static_steps(lm)
    if lm.decode_step == "static" and not static:
        raise EngineError(
            f"decode_step: {type(lm.inner).__name__} does not give the same logits with a cache of fixed size; "
            "use auto or eager"
        )
    return static


def takes_static_steps(lm: CausalLM) -> bool:
    """Whether steps on a cache of fixed size give the logits of plain forwards too."""
    path = lm.path
    if path not in ("own steps", "own masks"):
        return False
    expected = _plain_logits(lm)
    lm.path = path
    return not all(bool(logits.isfinite().all()) for logits in expected) or _agrees(lm, expected, _static_trial)


def _sequences(lm: CausalLM) -> list[list[int]]:
    """Each prompt with two more tokens. No random numbers: loading a model must not advance the caller's generator."""
    return [[(17 + 31 * row + 7919 * t) % lm.vocab_size for t in range(n + 2)] for row, n in enumerate(_LENGTHS)]


def _plain_logits(lm: CausalLM) -> list[Tensor]:
    """Logits after every token of each sequence, [T, V], without cache, mask or batching."""
    lm.path = "model's cache"
    with lm.inference():
        return [
            lm.inner(input_ids=torch.tensor([ids], device=lm.device), use_cache=False).logits[0].float()
            for ids in _sequences(lm)
        ]


TrialLogits = list[tuple[int, int, Tensor]]
"""(sequence, position of its last token, logits [V] after it) for each forward of a trial."""


def _agrees(lm: CausalLM, expected: Sequence[Tensor], trial: Callable[[CausalLM], TrialLogits]) -> bool:
    """Whether ragged prompts, decoding and a replaced row give the logits of plain forwards."""
    exact = lm.inner.dtype == torch.float32 and lm.autocast_dtype is None
    scale = max(float(logits.abs().max()) for logits in expected)
    tolerance = (1e-3 if exact else 5e-2) * scale
    try:
        with lm.inference():
            pairs = trial(lm)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError):
        return False  # the model does not support such masks, or such a cache
    return all(bool(((got - expected[row][at]).abs() <= tolerance).all()) for row, at, got in pairs)


def _eager_trial(lm: CausalLM) -> TrialLogits:
    """On `GrowingCache`: prefill, decode, replace a row, decode."""
    ids = _sequences(lm)
    short, long, third = _LENGTHS
    cache, pairs = cast(GrowingCache, lm.new_cache()), []

    def run(
        tokens_BT: list[list[int]], real_BL: list[list[int]] | None, first_B: list[int], into: GrowingCache
    ) -> Tensor:
        tokens = torch.tensor(tokens_BT, device=lm.device)
        positions = torch.tensor(first_B, device=lm.device)[:, None] + torch.arange(tokens.shape[1], device=lm.device)
        real = None if real_BL is None else torch.tensor(real_BL, dtype=torch.bool, device=lm.device)
        return lm.forward(tokens, positions.clamp(min=0), real, into, keep=1)[:, 0].float()

    padding = long - short
    prompts = [[0] * padding + ids[0][:short], ids[1][:long]]
    logits = run(prompts, [[0] * padding + [1] * short, [1] * long], [-padding, 0], cache)
    pairs += [(0, short - 1, logits[0]), (1, long - 1, logits[1])]

    seen = [[0] * padding + [1] * (short + 1), [1] * (long + 1)]
    logits = run([[ids[0][short]], [ids[1][long]]], seen, [short, long], cache)
    pairs += [(0, short, logits[0]), (1, long, logits[1])]

    part = cast(GrowingCache, lm.new_cache())
    logits = run([ids[2][:third]], None, [0], part)
    pairs.append((2, third - 1, logits[0]))
    first = torch.zeros(1, dtype=torch.int64, device=lm.device)
    cache.put(first, 2, part, first, third, room=1)
    padding = long + 1 - third
    seen = [[0] * padding + [1] * (third + 1), [1] * (long + 2)]
    logits = run([[ids[2][third]], [ids[1][long + 1]]], seen, [third, long + 1], cache)
    return [*pairs, (2, third, logits[0]), (1, long + 1, logits[1])]


def _static_trial(lm: CausalLM) -> TrialLogits:
    """On `StaticCache`: the same, each row at its own column."""
    ids, (short, long, third) = _sequences(lm), _LENGTHS
    step = StaticStep(lm, max(_LENGTHS) + 2)
    pairs: TrialLogits = []

    def put(row: int, slot: int) -> None:
        prompt = tuple(ids[row][: _LENGTHS[row]])
        cache = cast(GrowingCache, lm.new_cache())
        positions = torch.arange(len(prompt), device=lm.device)[None]
        logits_PV = lm.forward(torch.tensor([prompt], device=lm.device), positions, None, cache, keep=1)[:, 0]
        index = torch.zeros(1, dtype=torch.int64, device=lm.device)
        step.put(
            Prefilled([prompt], cache, logits_PV, [len(prompt)]), index, index + slot, 2, room=2, max_length=long + 2
        )

    def forward(rows: list[int], lengths: list[int]) -> None:
        """lengths: of each row's sequence, including the token given to the step."""
        tokens = [ids[row][length - 1] for row, length in zip(rows, lengths, strict=True)]
        step.measure(min(lengths) - 1, max(lengths) - 1)
        logits = step.forward(torch.tensor(tokens, device=lm.device), torch.tensor(lengths, device=lm.device)).clone()
        pairs.extend(
            (row, length - 1, logits[at].float()) for at, (row, length) in enumerate(zip(rows, lengths, strict=True))
        )

    step.clear()
    put(0, 0)
    put(1, 1)
    forward([0, 1], [short + 1, long + 1])
    put(2, 0)
    forward([2, 1], [third + 1, long + 2])
    return pairs
