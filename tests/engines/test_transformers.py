"""The `transformers` engine against `model.generate` and fresh forwards, on tiny random models of several kinds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    T5Config,
    T5ForConditionalGeneration,
)

from mrl.config import ModelConfig
from mrl.engines import transformers_decode, transformers_score
from mrl.engines.decode_queue import Limits
from mrl.engines.transformers import TransformersEngine
from mrl.engines.transformers_model import CausalLM
from mrl.errors import EngineError, SyncError
from mrl.types import Completion, GenerateRequest, SamplingParams, TokenSequence, WeightRef

VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,  # next-token distributions far from uniform
}
GPT2_SHAPE = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
MIXED_TYPES = ["sliding_attention", "full_attention"]
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama-eager": lambda: LlamaConfig(**SHAPE, attn_implementation="eager"),
    "gpt2": lambda: GPT2Config(**GPT2_SHAPE, bos_token_id=None, eos_token_id=None, initializer_range=0.3),
    # The windows are shorter than the sequences of the tests.
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=7),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=7, layer_types=MIXED_TYPES),
    "lfm2": lambda: Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
}
FULL_ATTENTION = ("qwen2", "llama", "llama-eager", "gpt2")


def build(architecture: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[architecture]()).eval()


def prompts_of(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in lengths]


def requests_for(
    prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, copies: int = 1
) -> list[GenerateRequest]:
    return [
        GenerateRequest(f"{p}.{c}", prompt, sampling, p * 100 + c)
        for p, prompt in enumerate(prompts)
        for c in range(copies)
    ]


def generate(engine: TransformersEngine, requests: list[GenerateRequest]) -> list[Completion]:
    return asyncio.run(engine.generate(requests))


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


@pytest.fixture(scope="module")
def qwen() -> PreTrainedModel:
    return build("qwen2")


@pytest.fixture
def engine(qwen: PreTrainedModel) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(qwen, None, max_model_len=128)
    yield engine
    engine.close()


# --- the right tokens and logprobs, for every kind of model ----------------------------------------------------------


def test_greedy_equals_generate_on_ragged_prompts(model):
    prompts = prompts_of([3, 17, 9, 17, 1, 12])
    engine = TransformersEngine(model, None, max_model_len=128)
    got = generate(engine, requests_for(prompts, SamplingParams(temperature=0, max_tokens=20)))
    for prompt, completion in zip(prompts, got, strict=True):
        assert completion.token_ids == greedy_reference(model, prompt, 20)
        assert completion.finish_reason == "length"
        assert completion.logprobs == [0.0] * 20


def greedy_reference(model: PreTrainedModel, prompt: tuple[int, ...], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    output = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=0)
    return output[0, len(prompt) :].tolist()


def test_logprobs_are_those_of_a_fresh_forward(model):
    requests = requests_for(prompts_of([2, 14, 8]), SamplingParams(temperature=0.8, max_tokens=15), copies=3)
    engine = TransformersEngine(model, None, max_model_len=128)
    completions = generate(engine, requests)
    sequences = [
        TokenSequence(r.prompt_ids, tuple(c.token_ids), 0.8) for r, c in zip(requests, completions, strict=True)
    ]
    scored = asyncio.run(engine.logprobs(sequences))
    for sequence, completion, score in zip(sequences, completions, scored, strict=True):
        expected = fresh_logprobs(model, sequence)
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)
        assert score == pytest.approx(expected, abs=1e-5)


def test_scoring_in_pieces_gives_the_same_logprobs(model, monkeypatch):
    sequences = [
        TokenSequence(p[:n], p[n:], 1.3) for p, n in zip(prompts_of([30, 22, 22, 9]), (4, 20, 1, 5), strict=True)
    ]
    engine = TransformersEngine(model, None, max_model_len=128)
    monkeypatch.setattr(transformers_score, "MAX_LOGITS", 4 * VOCAB * 5)
    for sequence, score in zip(sequences, asyncio.run(engine.logprobs(sequences)), strict=True):
        assert score == pytest.approx(fresh_logprobs(model, sequence), abs=1e-4)


def fresh_logprobs(model: PreTrainedModel, sequence: TokenSequence) -> list[float]:
    ids = torch.tensor([sequence.prompt_ids + sequence.completion_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].float() / sequence.temperature, -1)
    start = len(sequence.prompt_ids)
    return logprobs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].tolist()


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(top_p=0.7), SamplingParams(top_k=5), SamplingParams(min_p=0.1), SamplingParams(0.7, 0.9, 8, 0.05)],
    ids=["top_p", "top_k", "min_p", "all"],
)
def test_filtered_logprobs_are_renormalised(engine, qwen, sampling):
    requests = requests_for(prompts_of([6, 6, 11]), sampling, copies=4)
    for request, completion in zip(requests, generate(engine, requests), strict=True):
        ids = torch.tensor([request.prompt_ids + tuple(completion.token_ids)])
        with torch.no_grad():
            logits = qwen(ids).logits[0, len(request.prompt_ids) - 1 : -1] / sampling.temperature
        for step, token in enumerate(completion.token_ids):
            probs = logits[step].softmax(-1)
            kept = probs >= sampling.min_p * probs.max()
            if sampling.top_k:
                kept &= probs >= probs.topk(sampling.top_k).values[-1]
            probs = torch.where(kept, probs, 0.0) / probs[kept].sum()
            order = probs.argsort(descending=True)
            nucleus = order[: int((probs[order].cumsum(0) < sampling.top_p).sum()) + 1]
            assert token in nucleus
            expected = (probs[token] / probs[nucleus].sum()).log().item()
            assert completion.logprobs[step] == pytest.approx(expected, abs=1e-4)


def test_a_request_does_not_depend_on_its_neighbours(model):
    engine = TransformersEngine(model, None, max_model_len=128, max_batch_tokens=1200)
    alone = requests_for(prompts_of([10]), SamplingParams(max_tokens=16))[0]
    first = generate(engine, [alone])[0]
    crowd = requests_for(prompts_of([3, 10, 25, 7, 18]), SamplingParams(temperature=0.9, top_p=0.8, max_tokens=24), 8)
    for order in (1, -1):
        requests = [*crowd[:21], alone, *crowd[21:]][::order]
        completions = generate(engine, requests)
        assert [c.request_id for c in completions] == [r.id for r in requests]
        again = completions[requests.index(alone)]
        assert again.token_ids == first.token_ids
        assert again.logprobs == pytest.approx(first.logprobs, abs=1e-4)


def test_different_seeds_give_different_completions(engine):
    completions = generate(engine, requests_for(prompts_of([5]), SamplingParams(max_tokens=30), copies=20))
    assert len({tuple(c.token_ids) for c in completions}) == 20


# --- when completions end ---------------------------------------------------------------------------------------------


def test_stop_ids_end_a_completion_and_are_kept(engine, qwen):
    long = generate(engine, requests_for(prompts_of([8, 13]), SamplingParams(max_tokens=40), copies=6))
    stopping = generate(
        engine, requests_for(prompts_of([8, 13]), SamplingParams(max_tokens=40, stop_token_ids=(7, 19)), copies=6)
    )
    ended = 0
    for whole, cut in zip(long, stopping, strict=True):
        hits = [i for i, token in enumerate(whole.token_ids) if token in (7, 19)]
        end = hits[0] + 1 if hits else 40
        ended += bool(hits)
        assert cut.token_ids == whole.token_ids[:end]
        assert cut.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-4)
        assert cut.finish_reason == ("stop" if hits else "length")
    assert ended > 0


def test_the_models_own_eos_ids_end_a_completion(qwen):
    class Tokenizer:
        eos_token_id = 5

    qwen.generation_config.eos_token_id, before = [3, 4], qwen.generation_config.eos_token_id
    try:
        engine = TransformersEngine(qwen, Tokenizer(), max_model_len=128)
    finally:
        qwen.generation_config.eos_token_id = before
    completions = generate(engine, requests_for(prompts_of([8]), SamplingParams(temperature=3.0, max_tokens=100), 30))
    assert {c.token_ids[-1] for c in completions if c.finish_reason == "stop"} == {3, 4, 5}
    assert all(not {3, 4, 5}.intersection(c.token_ids[:-1]) for c in completions)


def test_length_limits_are_per_request_and_per_model(qwen):
    engine = TransformersEngine(qwen, None, max_model_len=20)
    short, long = prompts_of([4, 17])
    requests = [
        GenerateRequest("a", short, SamplingParams(max_tokens=1), 1),
        GenerateRequest("b", short, SamplingParams(max_tokens=9), 2),
        GenerateRequest("c", long, SamplingParams(max_tokens=9), 3),
        GenerateRequest("d", short, SamplingParams(max_tokens=900), 4),
    ]
    completions = generate(engine, requests)
    assert [len(c.token_ids) for c in completions] == [1, 9, 3, 16]
    assert {c.finish_reason for c in completions} == {"length"}
    assert [len(c.logprobs) for c in completions] == [1, 9, 3, 16]


# --- what it costs ----------------------------------------------------------------------------------------------------


class InputShapes:
    """Records the shape of everything that goes through the model's embedding."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.seen: list[tuple[int, int]] = []
        self._handle = model.get_input_embeddings().register_forward_hook(
            lambda _module, inputs, _output: self.seen.append(tuple(inputs[0].shape))
        )

    def __enter__(self) -> InputShapes:
        return self

    def __exit__(self, *_error: object) -> None:
        self._handle.remove()


def test_shared_prompts_are_computed_once(engine, qwen):
    with InputShapes(qwen) as shapes:
        generate(engine, requests_for(prompts_of([12, 12]), SamplingParams(max_tokens=5), copies=9))
    assert shapes.seen == [(2, 12)] + [(18, 1)] * 4


def test_finished_rows_leave_the_batch(engine, qwen):
    prompt = prompts_of([6])[0]
    requests = [GenerateRequest(str(n), prompt, SamplingParams(max_tokens=n), n) for n in range(1, 9)]
    with InputShapes(qwen) as shapes:
        generate(engine, requests)
    rows = [rows for rows, columns in shapes.seen if columns == 1]
    assert rows == [8, 6, 6, 4, 3, 2, 1]


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("architecture", ["gpt2", "mistral", "lfm2"])
def test_looking_less_often_for_finished_rows_changes_nothing(architecture, rows, monkeypatch):
    model = build(architecture)
    engine = TransformersEngine(model, None, max_model_len=128, max_rows=rows)
    sampling = SamplingParams(max_tokens=125, stop_token_ids=(1, 2, 3, 4))
    requests = requests_for(prompts_of([4, 120]), sampling, copies=6)  # finished long rows run past their last position
    expected = generate(engine, requests)
    monkeypatch.setitem(transformers_decode.STEPS_PER_CHECK, "cpu", 7)
    got = generate(engine, requests)
    assert [(c.token_ids, c.finish_reason) for c in got] == [(c.token_ids, c.finish_reason) for c in expected]


def test_prefill_is_cut_by_tokens_and_merged(qwen):
    prompts = prompts_of([30, 5, 30, 11, 6])
    requests = requests_for(prompts, SamplingParams(max_tokens=6), copies=2)
    engine = TransformersEngine(qwen, None, max_model_len=40)
    expected = generate(engine, requests)
    engine._limits = Limits(max_model_len=40, max_batch_tokens=10_000, max_rows=99, prefill_tokens=40)
    with InputShapes(qwen) as shapes:
        got = generate(engine, requests)
    assert shapes.seen == [(1, 30), (1, 30), (3, 11)] + [(10, 1)] * 5
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]


def test_the_cache_grows_beyond_its_first_room(monkeypatch, qwen):
    monkeypatch.setattr("mrl.engines.transformers_decode.FIRST_ROOM", 4)
    engine = TransformersEngine(qwen, None, max_model_len=128)
    prompt = prompts_of([6])[0]
    got = generate(engine, requests_for([prompt], SamplingParams(temperature=0, max_tokens=60)))[0]
    assert got.token_ids == greedy_reference(qwen, prompt, 60)


def run_with(
    model: PreTrainedModel, requests: list[GenerateRequest], **limits: int
) -> tuple[list[Completion], list[tuple[int, int]]]:
    """Completions under the limits, and the shapes that went through the model."""
    engine = TransformersEngine(model, None, max_model_len=128, **limits)
    with InputShapes(model) as shapes:
        completions = generate(engine, requests)
    engine.close()
    return completions, shapes.seen


def test_waiting_requests_take_the_places_of_those_that_ended(model):
    """With 4 rows, 4 long completions and 36 short ones: nothing waits for the long ones, and nothing changes."""
    prompts = prompts_of([21, 9, 14, 3, 30])
    lengths = [80 if number % 10 == 0 else 2 + number % 7 for number in range(40)]
    requests = [
        GenerateRequest(str(n), prompts[n % 5], SamplingParams(max_tokens=length), n)
        for n, length in enumerate(lengths)
    ]
    expected, _ = run_with(model, requests)
    got, shapes = run_with(model, requests, max_rows=4)
    for one, other in zip(got, expected, strict=True):
        assert (one.request_id, one.token_ids, one.finish_reason) == (
            other.request_id,
            other.token_ids,
            other.finish_reason,
        )
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    steps = [rows for rows, columns in shapes if columns == 1]
    assert max(steps) == 4
    if CausalLM(model, 128, None).replaces_rows:
        assert len(steps) < 1.6 * sum(lengths) / 4
        assert sum(rows for rows, columns in shapes if columns > 1) == len(prompts)


def test_a_prompt_whose_requests_do_not_fit_together_is_computed_once(qwen):
    requests = requests_for(prompts_of([50, 7]), SamplingParams(max_tokens=6), copies=9)
    got, shapes = run_with(qwen, requests, max_rows=2)
    assert [shape for shape in shapes if shape[1] > 1] == [(1, 50), (1, 7)]
    assert [c.token_ids for c in got] == [c.token_ids for c in run_with(qwen, requests)[0]]


def test_rows_and_their_longest_length_stay_within_the_limits(qwen):
    requests = requests_for(prompts_of([10, 20, 10]), SamplingParams(max_tokens=10), copies=6)

    def most_rows(**limits: int) -> int:
        return max(rows for rows, columns in run_with(qwen, requests, **limits)[1] if columns == 1)

    assert most_rows() == 18
    assert most_rows(max_rows=12) == 12
    assert most_rows(max_batch_tokens=150) == 7  # of 20 tokens; 5 of 30
    assert most_rows(max_batch_tokens=150, max_rows=6) == 6


def test_what_all_prompts_begin_with_is_computed_once(qwen):
    beginning, *rests = prompts_of([40, 3, 17, 9])
    requests = requests_for([beginning + rest for rest in rests], SamplingParams(max_tokens=5), copies=2)
    got, shapes = run_with(qwen, requests)
    assert shapes == [(1, 40), (3, 17)] + [(6, 1)] * 4
    for request, completion in zip(requests, got, strict=True):
        assert completion.token_ids == run_with(qwen, [request])[0][0].token_ids
    apart = requests_for([(1, *beginning), (2, *beginning)], SamplingParams(max_tokens=2))
    assert run_with(qwen, apart)[1][0] == (2, 41)


# --- the module it was given ------------------------------------------------------------------------------------------


def test_a_shared_module_needs_no_sync_and_is_left_as_it_was():
    model = build("qwen2")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model.model.layers[0].eval()  # a part its owner froze stays so
    model.model.layers[1].mlp.gate_proj.weight.grad = torch.ones_like(model.model.layers[1].mlp.gate_proj.weight)
    flags = [m.training for m in model.modules()]
    engine = TransformersEngine(model, None, max_model_len=128)
    requests = requests_for(prompts_of([7, 9]), SamplingParams(temperature=0, max_tokens=12))
    before = generate(engine, requests)
    assert [m.training for m in model.modules()] == flags
    assert model.is_gradient_checkpointing
    assert model.config._attn_implementation == "sdpa"
    assert model.model.layers[1].mlp.gate_proj.weight.grad.eq(1).all()
    loss = model(torch.tensor([requests[0].prompt_ids]), labels=torch.tensor([requests[0].prompt_ids])).loss
    loss.backward()

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    assert engine.load_weights(WeightRef(4, module=model)) == 4
    after = generate(engine, requests)
    assert after[0].token_ids == greedy_reference(model.eval(), requests[0].prompt_ids, 12)
    assert after[0].token_ids != before[0].token_ids
    assert (before[0].policy_version, after[0].policy_version) == (0, 4)


def test_a_module_with_a_lora_adapter_is_sampled_with_it():
    from peft import LoraConfig, get_peft_model

    base = build("llama")
    prompt = prompts_of([9])[0]
    greedy = requests_for([prompt], SamplingParams(temperature=0, max_tokens=12))
    engine = TransformersEngine(base, None, max_model_len=128)
    without = generate(engine, greedy)[0].token_ids
    adapted = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "up_proj"]))
    engine.load_weights(WeightRef(1, module=adapted))
    got = generate(engine, greedy)[0].token_ids
    assert got == greedy_reference(adapted.eval(), prompt, 12)
    assert got != without
    with pytest.raises(EngineError, match="PEFT"):
        engine.state_dict()


def test_autocast_is_applied(qwen):
    engine = TransformersEngine(qwen, None, max_model_len=128, autocast_dtype=torch.bfloat16)
    requests = requests_for(prompts_of([6, 10]), SamplingParams(max_tokens=10), copies=2)
    for request, completion in zip(requests, generate(engine, requests), strict=True):
        exact = fresh_logprobs(qwen, TokenSequence(request.prompt_ids, tuple(completion.token_ids)))
        assert completion.logprobs == pytest.approx(exact, abs=0.5)
        assert completion.logprobs != pytest.approx(exact, abs=1e-5)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerateRequest("r7", (), SamplingParams(), 0), "'r7' has an empty prompt"),
        (GenerateRequest("r7", (1,) * 128, SamplingParams(), 0), r"'r7' has a prompt of 128 tokens.*127"),
        (GenerateRequest("r7", (1, VOCAB), SamplingParams(), 0), "'r7' has id 61 in its prompt.*61 ids"),
        (GenerateRequest("r7", (1, -1), SamplingParams(), 0), "'r7' has id -1"),
        (GenerateRequest("r7", (1,), SamplingParams(), -3), "'r7' has seed -3"),
        (GenerateRequest("r7", (1,), SamplingParams(temperature=-1.0), 0), "'r7' has temperature=-1.0"),
        (GenerateRequest("r7", (1,), SamplingParams(temperature=float("nan")), 0), "temperature=nan"),
        (GenerateRequest("r7", (1,), SamplingParams(top_p=0.0, max_tokens=0), 0), "top_p=0.0.*max_tokens=0"),
        (GenerateRequest("r7", (1,), SamplingParams(top_k=-1, min_p=1.5), 0), "top_k=-1.*min_p=1.5"),
        (GenerateRequest("r7", (1,), SamplingParams(stop=("",)), 0), "empty string"),
        (GenerateRequest("r7", (1,), SamplingParams(stop=("x",)), 0), "tokenizer"),
    ],
)
def test_impossible_requests_are_refused_by_name(engine, request_, message):
    with pytest.raises(EngineError, match=message):
        generate(engine, [*requests_for(prompts_of([3]), SamplingParams(max_tokens=2)), request_])


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (TokenSequence((), (1,)), "empty prompt"),
        (TokenSequence((1,), (99,)), "id 99 in its completion"),
        (TokenSequence((1,) * 100, (1,) * 29), "129 tokens"),
        (TokenSequence((1,), (1,), 0.0), "temperature=0.0"),
    ],
)
def test_impossible_sequences_are_refused(engine, sequence, message):
    with pytest.raises(EngineError, match=message):
        asyncio.run(engine.logprobs([TokenSequence((1,), (2,)), sequence]))


def test_an_empty_completion_has_no_logprobs(engine):
    assert asyncio.run(engine.logprobs([TokenSequence((1, 2), ())])) == [[]]
    assert generate(engine, []) == []


@pytest.mark.parametrize("architecture", FULL_ATTENTION)
def test_weights_that_are_not_finite_are_an_error(architecture):
    model = build(architecture)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "norm" in n or "ln_f" in n)[0] = float("nan")
    engine = TransformersEngine(model, None, max_model_len=128)
    with pytest.raises(EngineError, match=r"'\d\.0' are not finite"):
        generate(engine, requests_for(prompts_of([4, 6]), SamplingParams(max_tokens=4)))


def test_models_and_sizes_it_cannot_serve_are_refused(qwen):
    t5 = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=8))
    with pytest.raises(EngineError, match="encoder-decoder"):
        TransformersEngine(t5, None, max_model_len=16)
    with pytest.raises(EngineError, match="128 positions"):
        TransformersEngine(qwen, None, max_model_len=129)
    with pytest.raises(EngineError, match="max_rows=0"):
        TransformersEngine(qwen, None, max_model_len=16, max_rows=0)
    with pytest.raises(EngineError, match="max_batch_tokens=9"):
        TransformersEngine(qwen, None, max_model_len=10, max_batch_tokens=9)
    with pytest.raises(EngineError, match="not Linear"):
        TransformersEngine(torch.nn.Linear(2, 2), None, max_model_len=16)


def test_a_module_that_cannot_be_served_is_not_adopted(engine, qwen):
    with pytest.raises(SyncError, match="not Linear"):
        engine.load_weights(WeightRef(1, module=torch.nn.Linear(2, 2)))
    assert engine.version == 0
    assert len(generate(engine, requests_for(prompts_of([3]), SamplingParams(max_tokens=2)))[0].token_ids) == 2


# --- calls beside each other ------------------------------------------------------------------------------------------


async def test_calls_queue_up(engine):
    requests = requests_for(prompts_of([4, 6]), SamplingParams(max_tokens=8))
    together = await asyncio.gather(
        *(engine.generate([r]) for r in requests), engine.logprobs([TokenSequence((1,), (2,))])
    )
    assert [c[0].token_ids for c in together[:2]] == [c.token_ids for c in await engine.generate(requests)]


async def test_a_cancelled_call_stops_the_loop_and_frees_the_engine(engine, qwen):
    started = threading.Event()
    handle = qwen.register_forward_hook(lambda *_: started.set())
    task = asyncio.create_task(
        engine.generate(requests_for(prompts_of([4]), SamplingParams(max_tokens=120), copies=40))
    )
    await asyncio.to_thread(started.wait, 10)
    handle.remove()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await engine.generate(requests_for(prompts_of([3]), SamplingParams(max_tokens=1)))) == 1


async def test_a_closed_engine_says_so(qwen):
    engine = TransformersEngine(qwen, None, max_model_len=128)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate([])
    with pytest.raises(SyncError, match="closed"):
        engine.load_weights(WeightRef(1, module=qwen))


async def test_closing_ends_a_running_call(qwen):
    engine = TransformersEngine(qwen, None, max_model_len=128)
    started = threading.Event()
    handle = qwen.register_forward_hook(lambda *_: started.set())
    task = asyncio.create_task(engine.generate(requests_for(prompts_of([4]), SamplingParams(max_tokens=120), 40)))
    await asyncio.to_thread(started.wait, 10)
    handle.remove()
    await asyncio.to_thread(engine.close)
    with pytest.raises(EngineError, match="closed"):
        await task


def test_rows_come_from_the_configuration(tiny_model):
    engine = TransformersEngine.create(ModelConfig(model=tiny_model, max_model_len=32, max_decode_rows=3))
    with InputShapes(engine._lm.inner) as shapes:
        generate(engine, requests_for(prompts_of([4]), SamplingParams(max_tokens=3), copies=7))
    assert max(rows for rows, _ in shapes.seen) == 3
