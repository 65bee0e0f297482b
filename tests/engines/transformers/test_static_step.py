"""Static decoding steps: the same completions as eager ones, also when every step is a replay of a recorded one.

A CUDA graph cannot run here. In its place steps are traced into a graph of torch operations: like a CUDA graph it keeps
the addresses it saw and every Python number it met, and runs no Python of the model again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrl.config import ModelConfig
from mrl.engines.transformers import cuda_graphs
from mrl.engines.transformers import decode as transformers_decode
from mrl.engines.transformers.engine import TransformersEngine
from mrl.engines.transformers.static_cache import StaticLayer
from mrl.engines.transformers.static_step import MIN_COLUMNS, WARM_UP_STEPS, StaticStep, size_for
from mrl.engines.transformers.trial import make_causal_lm
from mrl.errors import EngineError
from mrl.types import Completion, GenerateRequest, SamplingParams, WeightRef
from tests.engines.small_models import assert_same
from tests.engines.transformers.test_architectures import ARCHITECTURES, OWN, VOCAB, build
from tests.soak import but

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


def requests() -> list[GenerateRequest]:
    """Ragged prompts with one beginning, some of them shared, and completions from 2 to 43 tokens."""
    beginning = words(30, 0)
    prompts = [beginning + words(n, n) for n in (3, 17, 9, 1)]
    return [
        GenerateRequest(str(n), prompt, SamplingParams(max_tokens=2 + (31 * n) % 42), n)
        for n, prompt in enumerate(prompts * 3)
    ]


def generate(engine: TransformersEngine, asked: list[GenerateRequest]) -> list[Completion]:
    completions = asyncio.run(engine.generate(asked))
    engine.close()
    return completions


# --- the same completions ---------------------------------------------------------------------------------------------

RECORDED = [name for name, (path, _) in ARCHITECTURES.items() if path == OWN]


@pytest.mark.slow
@pytest.mark.parametrize("name", but(("gemma3",), RECORDED))
def test_replayed_steps_give_the_completions_of_eager_ones(name):
    """Five rows at a time, whose places the waiting requests take, and which are dropped as they end. And a recorded
    step has no operation whose result the host or a shape depends on, and no input but memory that stays in place."""
    model, traces = build(name), Traces()
    expected = generate(TransformersEngine(model, None, max_model_len=128), requests())
    assert_same(generate(static_engine(model, traces, max_rows=5), requests()), expected)
    assert traces.replays > len(traces.graphs) > 0
    for graph in traces.graphs:
        called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        assert not {target for target in called if target.rsplit(".", 1)[0] in SYNCS}
        assert any(target.startswith("aten.index_put_") for target in called)
        assert not [node for node in graph.graph.nodes if node.op == "placeholder"]


@pytest.mark.slow
def test_all_rows_at_once_are_dropped_as_they_end():
    model, traces = build("qwen2"), Traces()
    expected = generate(TransformersEngine(model, None, max_model_len=128), requests())
    assert_same(generate(static_engine(model, traces), requests()), expected)
    assert len(traces.graphs) > 2


@pytest.mark.slow
def test_looking_less_often_for_finished_rows_changes_nothing(monkeypatch):
    """Rows that ended run past their last position meanwhile, as they do on an accelerator."""
    model = build("mistral")
    asked = [
        GenerateRequest(str(n), words(4 + 29 * (n % 5), n), SamplingParams(max_tokens=125, stop_token_ids=(1, 2, 3)), n)
        for n in range(12)
    ]
    expected = generate(TransformersEngine(model, None, max_model_len=128), asked)
    monkeypatch.setitem(transformers_decode.STEPS_PER_CHECK, "cpu", 7)
    assert_same(generate(static_engine(model, Traces(), max_rows=5), asked), expected)


@pytest.mark.slow
def test_a_longer_request_that_comes_later_gets_larger_buffers():
    """The queue begins with the longest prompts: a short one may reach further, and recordings are made anew."""
    model = build("qwen2")
    asked = [GenerateRequest(str(n), words(40, n), SamplingParams(max_tokens=5 + n), n) for n in range(4)]
    asked += [GenerateRequest(str(n), words(9, n), SamplingParams(max_tokens=90), n) for n in range(4, 8)]
    expected = generate(TransformersEngine(model, None, max_model_len=128), asked)
    assert_same(generate(static_engine(model, Traces(), max_rows=4), asked), expected)


def test_unused_rows_and_what_lies_behind_a_rows_end_are_never_seen(monkeypatch):
    """With rubbish, large but finite, in the place of zeros."""
    model = build("gemma3")
    expected = generate(TransformersEngine(model, None, max_model_len=128), requests())
    resize = StaticLayer.resize

    def littered(self: StaticLayer, *args: Any) -> None:
        resize(self, *args)
        for buffer in self._buffers:
            buffer[buffer == 0] = 1e3

    monkeypatch.setattr(StaticLayer, "resize", littered)
    assert_same(generate(static_engine(model, None, max_rows=7), requests()), expected)


class Casts(TorchDispatchMode):
    """The shapes of what is cast to another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


class TracesUnderAutocast(Traces):
    """Tracing switches off autocast's memory of what it has cast, which a capture does not: look beforehand."""

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        with Casts() as casts:
            run()
        self.cast_shapes = casts.shapes
        replay = super().record(run)

        def as_recorded() -> Tensor:
            with torch.autocast("cpu", enabled=False):  # the casts are in the recording
                return replay()

        return as_recorded


@pytest.mark.slow
def test_recordings_under_autocast_need_no_casts_of_weights_and_end_with_the_call():
    """The casts are made while warming up; in the next call, after an update, they are others."""
    model, traces = build("llama"), TracesUnderAutocast()
    engines = [
        TransformersEngine(model, None, max_model_len=128, decode_step="static", autocast_dtype=torch.bfloat16)
        for _ in range(2)
    ]
    engines[1]._lm.new_recorder = lambda: traces
    for _ in range(2):
        direct, replayed = (asyncio.run(engine.generate(requests())) for engine in engines)
        assert_same(replayed, direct)
        assert traces.cast_shapes
        assert not {tuple(p.shape) for p in model.parameters() if p.dim() == 2} & set(traces.cast_shapes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1.05


# --- what a recorded step is ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_size_is_recorded_once_and_only_when_it_lasts():
    model, traces = build("llama"), Traces()
    asked = [GenerateRequest(str(n), words(10, 0), SamplingParams(max_tokens=100), n) for n in range(6)]
    generate(static_engine(model, traces), asked)
    # 6 rows: up to 64 columns, up to 96, and the rest of the 112 that the longest completion needs.
    assert len(traces.graphs) == 3
    assert traces.replays == 99 - 3 * WARM_UP_STEPS
    traces = Traces()
    short = [GenerateRequest(str(n), words(10, 0), SamplingParams(max_tokens=WARM_UP_STEPS + 1), n) for n in range(6)]
    generate(static_engine(model, traces), short)
    assert not traces.graphs


def test_buffers_keep_their_place_between_steps_and_batches():
    """What a recording holds is addresses."""
    model, places = build("llama"), []
    real = StaticStep._run

    def watched(self: StaticStep, rows: int, room: int) -> Tensor:
        buffers = [buffer for layer in self.cache.static_layers for buffer in layer._buffers]
        own = (self.ids_R, self.logits_RV, self.cache.positions_R, self.cache.rows_R)
        places.append(tuple(tensor.data_ptr() for tensor in (*buffers, *own)))
        result = real(self, rows, room)
        assert result.data_ptr() == self.logits_RV.data_ptr()
        return result

    engine = static_engine(model, None, max_rows=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticStep, "_run", watched)
        asked = [GenerateRequest(str(n), words(9, n), SamplingParams(max_tokens=20 + n), n) for n in range(12, 0, -1)]
        generate(engine, asked)
    assert len(places) > 40
    assert len(set(places)) == 1


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (13, 16), (65, 96)])
def test_sizes_are_few_and_at_most_half_too_much(count, size):
    assert size_for(count) == size
    assert all(n <= size_for(n) <= 1.5 * n for n in range(1, 2000))
    assert len({size_for(n) for n in range(1, 1025)}) == 20
    assert MIN_COLUMNS % 8 == 0


# --- where it is not possible -----------------------------------------------------------------------------------------


class Refuses(Traces):
    """CUDA, when a model does what a graph cannot hold."""

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("wanted", ["auto", "static"])
def test_a_model_that_cannot_be_recorded_goes_on_unrecorded(wanted):
    model = build("qwen2")
    expected = generate(TransformersEngine(model, None, max_model_len=128), requests())
    engine = static_engine(model, Refuses())
    lm = engine._lm
    lm.decode_step = wanted
    with pytest.warns(UserWarning, match="decode_step: Qwen2ForCausalLM could not be recorded .* not permitted"):
        assert_same(generate(engine, requests()), expected)
    assert lm.static == (wanted == "static")


@pytest.mark.parametrize("name", ["gptj", "lfm2"])
def test_a_model_without_static_steps_is_refused_only_where_they_are_asked_for(name):
    model = build(name)
    with pytest.raises(EngineError, match=r"decode_step: .*use auto or eager"):
        TransformersEngine(model, None, max_model_len=128, decode_step="static")
    TransformersEngine(model, None, max_model_len=128).close()


def test_static_steps_with_other_logits_are_not_taken(monkeypatch):
    put = StaticLayer.put
    monkeypatch.setattr(StaticLayer, "put", lambda self, slots, *args: put(self, slots * 0, *args))
    with pytest.raises(EngineError, match="does not give the same logits"):
        make_causal_lm(build("llama"), 128, None, "static")


def test_auto_is_eager_on_cpu():
    assert not make_causal_lm(build("llama"), 128, None).static


def test_the_option_reaches_the_engine_and_the_modules_it_adopts(tiny_model):
    engine = TransformersEngine.create(ModelConfig(model=tiny_model, max_model_len=32, decode_step="static"))
    assert engine._lm is not None
    first = engine._lm
    assert first.static
    engine.load_weights(WeightRef(1, module=AutoModelForCausalLM.from_pretrained(tiny_model)))
    assert engine._lm is not first
    assert engine._lm.static
    engine.close()


# --- CUDA's part ------------------------------------------------------------------------------------------------------


class FakeCuda:
    """What `CudaGraphs` calls of torch.cuda, written down. There is no device here, so this shows the order alone, and
    which device is the current one: a capture waits for that before it begins, and a stream that is set changes it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current, self.begun_on = 0, list[int]()

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index or 0
        yield
        self.current = before

    def graph_pool_handle(self) -> str:
        return "pool"

    def Stream(self, device: Any) -> FakeCuda:  # noqa: N802
        return self

    current_stream = Stream

    def wait_stream(self, other: Any) -> None:
        self.calls.append("wait")

    def stream(self, stream: Any) -> FakeCuda:
        return self

    def CUDAGraph(self) -> FakeCuda:  # noqa: N802
        return self

    def graph(self, graph: Any, *, pool: str, stream: Any, capture_error_mode: str) -> FakeCuda:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        return self

    def set_stream(self, stream: Any) -> None:
        self.calls.append("set_stream")
        self.current = 1

    def replay(self) -> None:
        self.calls.append("replay")

    def __enter__(self) -> None:
        self.calls.append("enter")
        self.begun_on.append(self.current)

    def __exit__(self, *_error: object) -> None:
        self.calls.append("exit")


def test_cuda_graphs_warm_up_on_the_recording_stream_and_replay_into_one_tensor(monkeypatch):
    fake, output = FakeCuda(), torch.ones(2)
    monkeypatch.setattr(cuda_graphs.torch, "cuda", fake)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: fake.calls.append("record_stream"))

    def run() -> Tensor:
        fake.calls.append("run")
        return output

    graphs = cuda_graphs.CudaGraphs(torch.device("cuda:1"))
    assert graphs.warm_up(run) is output
    assert fake.calls == ["wait", "enter", "run", "exit", "wait", "record_stream"]
    fake.calls.clear()
    replay = graphs.record(run)
    assert fake.calls == ["enter", "run", "exit", "set_stream"]
    assert replay() is replay() is output
    assert fake.calls[4:] == ["replay", "replay"]
    assert fake.begun_on == [1, 1]
    assert fake.current == 0, "the thread's own device is left as it was"


def test_a_capture_that_fails_gives_the_thread_its_stream_back(monkeypatch):
    class Invalidated(FakeCuda):
        def __exit__(self, *_error: object) -> None:
            raise RuntimeError("capture was invalidated")

    fake = Invalidated()
    monkeypatch.setattr(cuda_graphs.torch, "cuda", fake)
    with pytest.raises(RuntimeError, match="invalidated"):
        cuda_graphs.CudaGraphs(torch.device("cpu")).record(lambda: torch.ones(1))
    assert fake.calls == ["enter", "set_stream"]
