"""From rows of tokens to the logprobs of their completions: without padding where the model can, and without logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms.logprobs import logprobs_from_logits
from mrl.modeling.attention import install
from mrl.modeling.gather import Gather, make_gather
from mrl.modeling.head import find_head
from mrl.modeling.packed_attention import Line, NotPackableError, make_line, watch_windows
from mrl.modeling.precision import keep_logits_wide
from mrl.modeling.rows import Rows
from mrl.system.transfers import to_device


@dataclass(frozen=True)
class Layout:
    """Where each trained token of a micro-batch is predicted: token n is completion token `slot_N` of row `row_N`, and
    `sources` fetches the hidden states before them: from the line, or where there is none, from the rows put end to
    end."""

    row_N: Tensor
    slot_N: Tensor
    sources: Gather
    line: Line | None


class Forward:
    """How a causal language model is run over rows, and the copies of it (a reference model) too.

    What it can do is tried on it, not looked up. `head`: its head taken apart, or None where the model's own logits are
    needed (more memory, same numbers). `packs`: whether its rows may go as one line without padding.
    """

    def __init__(self, model: Any, autocast_dtype: torch.dtype | None, *, packing: bool) -> None:
        self.device = next(model.parameters()).device
        self.autocast_dtype = autocast_dtype
        with torch.no_grad(), evaluating(model):
            self.head = find_head(causal_lm_of(model), self.device)
            self.packs = packing and packs_exactly(causal_lm_of(model), self.device)
        if self.head is None:
            keep_logits_wide(causal_lm_of(model))
        self.notices: list[str] = []
        """What a user should know of it."""
        name = type(causal_lm_of(model)).__name__
        if packing and not self.packs:
            self.notices.append(f"packing: {name} is trained on padded rows, its attention does not allow other ones")
        if self.head is None:
            self.notices.append(
                f"{name} makes its logits in a way of its own: all logits of a micro-batch are in memory"
            )

    def logprobs(
        self, model: Any, rows: Rows, *, entropy: bool = True, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the tokens the policy sampled, at the sampler's temperature; B×T, 0 elsewhere."""
        layout: Layout = rows.layout or self._layout(rows)
        rows.layout = layout
        targets_N = rows.completion_BT[layout.row_N, layout.slot_N]
        causal_lm = causal_lm_of(model)
        with self._autocast():
            if self.head is None:
                logits = causal_lm(**_inputs(rows, layout)).logits
                logprobs_N, entropy_N = logprobs_from_logits(
                    _predicting(logits, layout), targets_N, rows.temperature, entropy_grad=entropy_grad
                )
            else:
                hidden = causal_lm.get_decoder()(**_inputs(rows, layout)).last_hidden_state
                logprobs_N, entropy_N = self.head.logprobs(
                    causal_lm.get_output_embeddings(),
                    _predicting(hidden, layout),
                    targets_N,
                    rows.temperature,
                    entropy=entropy,
                    entropy_grad=entropy_grad,
                    compute_dtype=self.autocast_dtype,
                )
        empty_BT = torch.zeros(rows.mask_BT.shape, device=self.device)
        where = (layout.row_N, layout.slot_N)
        return empty_BT.index_put(where, logprobs_N), empty_BT.index_put(where, entropy_N)

    def logits(self, model: Any, rows: Rows) -> Tensor:
        """All logits of the tokens the policy sampled, before any temperature; N×V in the order of `rows.mask_BT`,
        float32. For few tokens."""
        layout = self._layout(rows)
        causal_lm = causal_lm_of(model)
        with self._autocast():
            if self.head is None:
                return _predicting(causal_lm(**_inputs(rows, layout)).logits, layout).float()
            hidden = causal_lm.get_decoder()(**_inputs(rows, layout)).last_hidden_state
        return self.head.logits(causal_lm.get_output_embeddings(), _predicting(hidden, layout))

    def _layout(self, rows: Rows) -> Layout:
        samples = rows.samples
        slots = [np.flatnonzero(np.asarray(s.mask)) for s in samples]  # the masks in `rows` are on the device
        row_N, slot_N = np.repeat(np.arange(len(slots)), [len(slots_n) for slots_n in slots]), np.concatenate(slots)
        line = None
        if self.packs:
            # The last token predicts nothing that is asked for.
            line, places = make_line(
                [s.prompt_ids for s in samples], [s.completion_ids[:-1] for s in samples], self.device
            )
            before = [place[len(s.prompt_ids) - 1 :] for s, place in zip(samples, places, strict=True)]
            source_N = np.concatenate([place[slots_n] for place, slots_n in zip(before, slots, strict=True)])
        else:
            prompt_N = np.array([len(s.prompt_ids) for s in samples])[row_N]
            source_N = row_N * rows.ids_BL.shape[1] + prompt_N + slot_N - 1
        row_and_slot_2N = to_device(self.device, torch.from_numpy(np.stack([row_N, slot_N]).astype(np.int64)))
        return Layout(row_and_slot_2N[0], row_and_slot_2N[1], make_gather(source_N, self.device), line)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)


def causal_lm_of(model: Any) -> Any:
    """The Hugging Face model inside a PEFT one; adapters live in its layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode meanwhile: no dropout, no gradient checkpointing."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def packs_exactly(causal_lm: Any, device: torch.device) -> bool:
    """Whether rows on one line, a shared prompt among them, have the hidden states they have by themselves."""
    config = causal_lm.config.get_text_config()
    before = config._attn_implementation
    if not install(config):
        return False
    exactly = _packs_exactly(causal_lm, config, device)
    if not exactly:
        config._attn_implementation = before
    return exactly


def _packs_exactly(causal_lm: Any, config: Any, device: torch.device) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"} or getattr(config, "attention_chunk_size", None):
        return False  # attention that a short probe would not tell from full attention
    ids = [(7 * i + 3) % config.vocab_size for i in range(24)]
    prompts, completions = [ids[:5], ids[:5], ids[9:12]], [ids[5:9], ids[14:23], ids[11:13]]
    line, places = make_line(prompts, completions, device)
    run = causal_lm.get_decoder()
    try:
        with watch_windows() as windows:
            line_NH = run(**line.inputs())[0][0]
        slides = "sliding_attention" in kinds or (
            getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        )
        if slides and not any(window is not None for window in windows):
            return False  # it would slide by a mask that it is not given
        for prompt, completion, place in zip(prompts, completions, places, strict=True):
            row_LH = run(input_ids=torch.tensor([prompt + completion], device=device), use_cache=False)[0][0]
            if not torch.allclose(line_NH[to_device(device, torch.from_numpy(place))], row_LH, rtol=1e-3, atol=1e-4):
                return False
    except (NotPackableError, TypeError, RuntimeError, AttributeError):
        return False
    return True


def _inputs(rows: Rows, layout: Layout) -> dict[str, Any]:
    if layout.line is None:
        return {"input_ids": rows.ids_BL, "use_cache": False}
    return layout.line.inputs()


def _predicting(states: Tensor, layout: Layout) -> Tensor:
    """The states before each trained token: from B×L×H, or from a line's 1×N×H."""
    return layout.sources(states.flatten(0, 1))
