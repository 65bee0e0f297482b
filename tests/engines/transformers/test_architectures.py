"""Greedy decoding of many architectures, as tiny random models, equals `model.generate`; and how the way is chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from mrl.engines.transformers.engine import TransformersEngine
from mrl.engines.transformers.kv_cache import GrowingCache, GrowingLayer
from mrl.engines.transformers.lean_step import LeanStep
from mrl.engines.transformers.model import CausalLM
from mrl.engines.transformers.trial import make_causal_lm
from mrl.types import GenerateRequest, SamplingParams
from mrl.weights.hub_names import check_round_trip, from_hub, to_hub
from tests.soak import slow_but

VOCAB = 61
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
HEADS = {
    **NO_IDS,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # next-token distributions far from uniform
}
SHAPE = {**HEADS, "num_key_value_heads": 2}
GPT = {**NO_IDS, "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXED = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}

STEPS, OWN, MODELS, CACHE = "own steps", "own masks", "model's masks", "model's cache"
ARCHITECTURES: dict[str, tuple[str, Callable[[], PreTrainedConfig]]] = {
    "qwen2": (STEPS, lambda: tf.Qwen2Config(**SHAPE)),
    "qwen2, window in one layer": (
        OWN,
        lambda: tf.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    ),
    "qwen3": (STEPS, lambda: tf.Qwen3Config(**SHAPE, head_dim=8)),
    "llama": (STEPS, lambda: tf.LlamaConfig(**SHAPE)),
    "llama, biases, one key per query, stretched positions": (
        STEPS,
        lambda: tf.LlamaConfig(
            **HEADS,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0},
        ),
    ),
    "llama, eager": (MODELS, lambda: tf.LlamaConfig(**SHAPE, attn_implementation="eager")),
    "mistral": (STEPS, lambda: tf.MistralConfig(**SHAPE, head_dim=16, sliding_window=None)),
    "mistral, windows": (OWN, lambda: tf.MistralConfig(**SHAPE, sliding_window=7)),
    "gemma2": (OWN, lambda: tf.Gemma2Config(**SHAPE, head_dim=8, query_pre_attn_scalar=8, **MIXED)),
    "gemma2, softcap": (
        CACHE,
        lambda: tf.Gemma2Config(
            **SHAPE,
            head_dim=8,
            query_pre_attn_scalar=8,
            attn_implementation="eager",
            attn_logit_softcapping=2.0,
            **MIXED,
        ),
    ),
    "gemma3": (OWN, lambda: tf.Gemma3TextConfig(**SHAPE, head_dim=8, query_pre_attn_scalar=8, **MIXED)),
    "gpt2": (OWN, lambda: tf.GPT2Config(**GPT, initializer_range=0.3)),
    "gpt_neox": (OWN, lambda: tf.GPTNeoXConfig(**HEADS)),
    "gptj": (MODELS, lambda: tf.GPTJConfig(**GPT, rotary_dim=8, initializer_range=0.3)),
    "phi3": (OWN, lambda: tf.Phi3Config(**SHAPE, sliding_window=7)),
    "mixtral": (OWN, lambda: tf.MixtralConfig(**SHAPE, num_local_experts=4)),
    "qwen3_moe": (OWN, lambda: tf.Qwen3MoeConfig(**SHAPE, head_dim=8, num_experts=4, **EXPERTS)),
    "gpt_oss": (
        CACHE,
        lambda: tf.GptOssConfig(**SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2, **MIXED),
    ),
    "deepseek_v3": (
        OWN,
        lambda: tf.DeepseekV3Config(
            **HEADS, **MLA, **EXPERTS, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1
        ),
    ),
    "olmo3": (OWN, lambda: tf.Olmo3Config(**SHAPE, **MIXED)),
    "cohere2": (OWN, lambda: tf.Cohere2Config(**SHAPE, **MIXED)),
    "stablelm": (MODELS, lambda: tf.StableLmConfig(**SHAPE)),
    "falcon": (MODELS, lambda: tf.FalconConfig(**HEADS, alibi=False)),
    "lfm2": (CACHE, lambda: tf.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])),
    "qwen3_next": (
        CACHE,
        lambda: tf.Qwen3NextConfig(
            **SHAPE,
            **EXPERTS,
            head_dim=8,
            num_experts=4,
            shared_expert_intermediate_size=24,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
}


IN_SHORT = ("qwen3", "gemma2", "gpt2", "qwen3_moe", "deepseek_v3", "lfm2")
"""Of each family and each way one; all are in the slow suite."""


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(ARCHITECTURES[name][1]()).eval()


def requests() -> list[GenerateRequest]:
    """Ragged prompts, most with one beginning, and completions of several lengths beyond every window."""
    generator = torch.Generator().manual_seed(0)

    def words(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist())

    beginning = words(30)
    prompts = [beginning + words(n) for n in (3, 17, 9, 1)]
    return [
        GenerateRequest(str(n), prompt, SamplingParams(temperature=0, max_tokens=2 + (5 * n) % 13), n)
        for n, prompt in enumerate(prompts + prompts[:2])
    ]


def reference(model: PreTrainedModel, request: GenerateRequest) -> list[int]:
    ids = torch.tensor([request.prompt_ids])
    new = request.sampling.max_tokens
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0
    )
    return output[0, ids.shape[1] :].tolist()


def check(model: PreTrainedModel) -> None:
    """All rows at once, and three at a time with the others waiting."""
    expected = [reference(model, request) for request in requests()]
    for rows in (None, 3):
        engine = TransformersEngine(model, None, max_model_len=128, max_rows=rows)
        assert [c.token_ids for c in asyncio.run(engine.generate(requests()))] == expected
        engine.close()


@pytest.mark.parametrize("name", slow_but(IN_SHORT, ARCHITECTURES))
def test_greedy_equals_generate_and_goes_the_expected_way(name):
    model = build(name)
    check(model)
    assert make_causal_lm(model, 128, None).path == ARCHITECTURES[name][0]
    check_round_trip(model)
    own = model.state_dict()
    public = to_hub(model, own)
    back = {n: t for part in from_hub(model, public) for n, t in part.convert(model, public.__getitem__).items()}
    assert back.keys() == own.keys()
    assert all(torch.equal(back[n], tensor) for n, tensor in own.items()), "through the form of its files and back"


@pytest.mark.parametrize(
    "broken", slow_but(["attention", "decoding"], ["step", "mask", "attention", "replaced rows", "decoding"])
)
def test_a_way_whose_logits_differ_is_not_taken(broken, monkeypatch):
    """Each of these is right in shape and wrong in numbers; what is left is exact."""
    own_mask, put, update = CausalLM._mask, GrowingLayer.put, GrowingLayer.update
    if broken == "step":
        norm = LeanStep._norm
        monkeypatch.setattr(LeanStep, "_norm", lambda *args: norm(*args) * 1.02)
    elif broken == "mask":
        monkeypatch.setattr(CausalLM, "_mask", lambda *args: own_mask(*args).roll(1, dims=-1))
    elif broken == "attention":
        monkeypatch.setattr("mrl.modeling.attention._HANDLED", {"dropout", "softcap"})
        monkeypatch.setattr("mrl.modeling.attention.sdpa_attention_forward", wrong_attention)
    elif broken == "replaced rows":
        monkeypatch.setattr(GrowingLayer, "put", lambda self, slots, *args: put(self, slots * 0 + 1, *args))
    else:
        monkeypatch.setattr(GrowingLayer, "update", lambda self, k, v, *args: update(self, k, k, *args))
    model = build("llama")
    path = make_causal_lm(model, 128, None).path
    assert path == {"step": OWN, "mask": MODELS, "attention": MODELS}.get(broken, CACHE)
    check(model)


def wrong_attention(
    module: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **kwargs: object
) -> tuple[torch.Tensor, None]:
    return query.transpose(1, 2).contiguous() + value.mean(), None


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_own_steps_have_the_models_numbers_with_an_adapter_too(family):
    """Every logprob that was sampled with is the model's own; rows are ragged, replaced and dropped meanwhile."""
    model = build(family)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    for way in (model, adapted):
        engine = TransformersEngine(way, None, max_model_len=128, max_rows=5)
        sampled = [replace(r, sampling=replace(r.sampling, temperature=1.0)) for r in requests()]
        for request, completion in zip(sampled, asyncio.run(engine.generate(sampled)), strict=True):
            ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
            with torch.no_grad():
                logits = way(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].double()
            expected = logits.log_softmax(dim=-1).gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, atol=2e-5, rtol=0)
        engine.close()
    assert make_causal_lm(adapted, 128, None).path == STEPS


def test_layers_that_somebody_watches_and_other_numbers_take_the_models_own_steps():
    watched, half = build("llama"), build("llama").bfloat16()
    watched.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    assert make_causal_lm(watched, 128, None).path == OWN
    assert make_causal_lm(half, 128, None).path == OWN
    assert make_causal_lm(build("llama"), 128, torch.bfloat16).path == OWN


def test_choosing_moves_no_random_numbers_and_costs_a_few_short_forwards():
    model = build("qwen2")
    state = torch.get_rng_state()
    seen: list[int] = []
    model.register_forward_hook(lambda _module, _inputs, output: seen.append(output.logits.shape[1]))
    make_causal_lm(model, 128, None)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(seen) <= 10


# --- the cache by itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 4])
def test_a_layer_under_any_order_of_operations_holds_each_rows_states(window):
    """Random appends, replacements, drops and forgotten columns against plain lists of each row's states."""
    generator = torch.Generator().manual_seed(0)

    def states(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, 2, columns, 3, generator=generator)

    def pick(high: int) -> int:
        return int(torch.randint(0, high, (1,), generator=generator))

    for _ in range(20):
        layer, held = GrowingLayer(window), []
        first = states(3, 5)
        layer.update(first, first + 1)
        held = list(first.clone())
        for _ in range(30):
            kind = pick(4)
            if kind == 0 and len(held) > 1:
                kept = sorted({pick(len(held)) for _ in held}, reverse=pick(2) == 0)
                if pick(2):
                    layer.reorder_cache(torch.tensor(kept))
                else:
                    layer.keep(len(kept), torch.arange(len(kept)), torch.tensor(kept))
                held = [held[row] for row in kept]
            elif kind == 1:
                columns = 1 + pick(12)
                part, other = GrowingLayer(), states(2, columns)
                part.update(other, other + 1)
                slots = [pick(len(held)), len(held)]
                layer.put(torch.tensor(slots), len(held) + 1, part, torch.tensor([1, 0]), columns, room=pick(3))
                held.append(other[0])
                held[slots[0]] = other[1]
            elif kind == 2:
                layer.start = max(layer.start, layer.end - max(row.shape[1] for row in held))
            new = states(len(held), 1 + 2 * pick(2))
            keys, values = layer.update(new, new + 1)
            held = [torch.cat([row, more], dim=1) for row, more in zip(held, new, strict=True)]
            assert keys.shape[2] == values.shape[2]
            for row, expected in enumerate(held):
                seen = min(expected.shape[1], keys.shape[2])
                assert seen == expected.shape[1] or (window is not None and seen == window and new.shape[2] == 1)
                assert torch.equal(keys[row, :, keys.shape[2] - seen :], expected[:, -seen:])
                assert torch.equal(values[row, :, keys.shape[2] - seen :], expected[:, -seen:] + 1)
                assert keys.isfinite().all()


def test_rows_are_taken_out_and_put_side_by_side():
    """Layers of different shapes too; what comes before a shorter row is finite."""
    config = ARCHITECTURES["llama"][1]()
    cache = GrowingCache(config, [None, None])
    states = [torch.randn(3, heads, 6, 5 - heads) for heads in (1, 2)]
    for layer in range(2):
        cache.update(states[layer], states[layer][..., :1] + 1, layer)
    cache.keep_columns(5)
    rows = [cache.row(2, 5, 4), cache.row(0, 2, 2).first(1)]
    assert list(map(len, rows)) == [4, 1]
    assert rows[0].nbytes == 4 * (4 + 1 + 2 * 3 + 2) * 4
    other = cache.empty()
    other.fill(rows, room=3)
    assert other.get_seq_length() == 4
    for layer in range(2):
        heads = states[layer].shape[1]
        new = torch.zeros(2, heads, 1, 5 - heads)
        keys, values = other.update(new, new[..., :1], layer)
        assert torch.equal(keys[0, :, :4], states[layer][2, :, 1:5])
        assert torch.equal(values[1, :, 3], states[layer][0, :, 4, :1] + 1)
        assert not keys[1, :, :3].any()
        assert keys.shape[2] == 5
