"""Static decoding steps: the same completions as eager ones, also when every step is a replay of a recorded one.

A CUDA graph cannot run here. In its place steps are traced into a graph of torch operations: like a CUDA graph it keeps
the addresses it saw and every Python number it met, and runs no Python of the model again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from mrl.engines import cuda_graphs, transformers_decode
from mrl.engines.static_cache import StaticLayer
from mrl.engines.static_step import MIN_COLUMNS, WARM_UP_STEPS, StaticStep, size_for
from mrl.engines.transformers import TransformersEngine
from mrl.engines.transformers_model import CausalLM
from mrl.errors import EngineError
from mrl.types import Completion, GenerateRequest, SamplingParams
from tests.engines.test_architectures import ARCHITECTURES, OWN, VOCAB, build

SYNCS = {"aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.equal", "aten.is_nonzero"}
"""Operations that make the host wait for the device, or whose shapes depend on data."""


class Traces:
    """A `Recorder` of traces, in the place of CUDA graphs."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.replays = 0

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        return run()

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = make_fx(run)()
        self.graphs.append(graph)

        def replay() -> Tensor:
            self.replays += 1
            return graph()

        return replay


def static_engine(model: PreTrainedModel, traces: Traces | None, **limits: int) -> TransformersEngine:
    engine = TransformersEngine(model, None, max_model_len=128, decode_step="static", **limits)
    assert engine._lm is not None
    engine._lm.new_recorder = lambda: traces
    return engine


def words(n: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def requests(temperature: float = 1.0) -> list[GenerateRequest]:
    """Ragged prompts with one beginning, some of them shared, and completions from 2 to 80 tokens."""
    beginning = words(30, 0)
    prompts = [beginning + words(n, n) for n in (3, 17, 9, 1)]
    return [
        GenerateRequest(str(n), prompt, SamplingParams(temperature, max_tokens=2 + (31 * n) % 79), n)
        for n, prompt in enumerate(prompts * 5)
    ]


def generate(engine: TransformersEngine, asked: list[GenerateRequest]) -> list[Completion]:
    completions = asyncio.run(engine.generate(asked))
    engine.close()
    return completions


def assert_same(got: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one.request_id, one.token_ids, one.finish_reason) == (
            other.request_id,
            other.token_ids,
            other.finish_reason,
        )
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


# --- the same completions ---------------------------------------------------------------------------------------------

RECORDED = [name for name, (path, _) in ARCHITECTURES.items() if path == OWN]


@pytest.mark.parametrize("name", RECORDED)
def test_replayed_steps_give_the_completions_of_eager_ones(name):
    """All rows at once, dropped as they end; and five at a time, whose places the waiting ones take."""
    model = build(name)
    expected = generate(TransformersEngine(model, None, max_model_len=128), requests())
    for rows in (None, 5):
        traces = Traces()
        assert_same(generate(static_engine(model, traces, max_rows=rows), requests()), expected)
        assert traces.replays > len(traces.graphs) > 0
