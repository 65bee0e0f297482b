"""Logprobs of packed rows and taken-apart heads against one sequence at a time with all its logits, on many models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algorithms.logprobs import LogitTransform
from mrl.config import ModelConfig
from mrl.modeling.forward import Forward
from mrl.modeling.packed_attention import pack_rows
from mrl.modeling.token_batch import TokenBatch, make_token_batch
from mrl.models import autocast_dtype
from mrl.types import Sample, TrainBatch

SMALL = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}
TEMPERATURE = 0.8

# model, changes to its config, whether its rows can be packed, what it does to its logits
MODELS: list[tuple[str, dict[str, Any], bool, LogitTransform | None]] = [
    ("Qwen2", {}, True, LogitTransform()),
    ("Llama", {"tie_word_embeddings": True}, True, LogitTransform()),
    ("Mistral", {"sliding_window": 7}, True, LogitTransform()),
    (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
        True,
        LogitTransform(),
    ),
    ("Gemma2", {"head_dim": 8, "sliding_window": 7}, False, LogitTransform(softcap=30.0)),  # caps attention too
    ("Gemma3Text", {"head_dim": 8, "sliding_window": 7}, True, LogitTransform()),
    ("Gemma3Text", {"head_dim": 8, "final_logit_softcapping": 5.0}, True, LogitTransform(softcap=5.0)),
    ("NanoChat", {}, True, LogitTransform(softcap=15.0)),
    ("Granite", {"logits_scaling": 4.0}, True, LogitTransform(scale=0.25)),
    ("Cohere", {"logit_scale": 0.0625}, True, LogitTransform(scale=0.0625)),
    ("MiniCPM3", {"num_key_value_heads": 4}, True, LogitTransform()),  # scales its hidden states instead
    ("GptOss", {"head_dim": 8, "num_local_experts": 4, "sliding_window": 7}, False, LogitTransform()),  # sinks
    ("FalconH1", {**MAMBA, "lm_head_multiplier": 0.3}, False, LogitTransform(0.3)),
    ("Llama4Text", {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2}, False, None),
]


@pytest.mark.parametrize(("name", "changes", "packs", "transform"), MODELS)
def test_logprobs_and_gradients_are_the_plain_ones(
    name: str, changes: dict[str, Any], packs: bool, transform: LogitTransform | None
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, "pad_token_id": 0, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    forward, rows = Forward(model, None, packing=True), make_ragged()
    assert forward.packs == packs
    assert (forward.head is None) == (transform is None)
    if forward.head is not None and transform is not None:
        assert forward.head.transform.scale == pytest.approx(transform.scale)
        assert forward.head.transform.softcap == transform.softcap
    check_against_plain(model, forward, rows)


def test_a_call_from_another_thread_attends_as_it_would_alone() -> None:
    """How rows are laid out goes with the call: nothing in the shared model says so meanwhile."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SMALL)).eval()
    forward, ids = Forward(model, None, packing=True), torch.arange(3, 40)[None]
    alone = model(input_ids=ids).logits
    found: list[torch.Tensor] = []

    def meanwhile(*_: Any) -> None:
        hook.remove()
        thread = threading.Thread(target=lambda: found.append(model(input_ids=ids).logits))
        thread.start()
        thread.join()

    hook = model.model.layers[1].register_forward_pre_hook(meanwhile)
    check_against_plain(model, forward, make_ragged())
    assert torch.equal(found[0], alone)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_lora_on_the_head(tied: bool, checkpointing: bool) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SMALL, tie_word_embeddings=tied)
    base = transformers.AutoModelForCausalLM.from_config(config)
    model: Any = get_peft_model(base, LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "lm_head"]))
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.3)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        model.train()
    forward = Forward(model, None, packing=True)
    assert forward.head is not None
    check_against_plain(model, forward, make_ragged())
    with model.disable_adapter(), torch.no_grad():
        without, _ = forward.logprobs(model, make_ragged())
    with torch.no_grad():
        assert (forward.logprobs(model, make_ragged())[0] - without).abs().max() > 0.1


def test_packing_can_be_left_out() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SMALL)).eval()
    forward = Forward(model, None, packing=False)
    assert not forward.packs
    check_against_plain(model, forward, make_ragged())


def test_a_head_that_is_no_linear_layer_leaves_the_logits_to_the_model() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SMALL)).eval()

    class Odd(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden).square()

    odd = Odd(32, 260, bias=False)
    odd.weight = model.lm_head.weight
    model.lm_head = odd
    forward = Forward(model, None, packing=True)
    assert forward.head is None
    assert any("logits" in notice for notice in forward.notices)
    check_against_plain(model, forward, make_ragged())


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_a_packed_sequence_holds_every_row_and_each_prompt_once(rows: list[tuple[int, int]], seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, 50, (1 + 4 * kind,), generator=rng).tolist() for kind in range(4)]
    given_prompts = [prompts[kind] for kind, _ in rows]
    completions = [torch.randint(0, 50, (n,), generator=rng).tolist() for _, n in rows]
    packed, places = pack_rows(given_prompts, completions, torch.device("cpu"))
    distinct = {tuple(prompt) for prompt in given_prompts}
    assert packed.ids_1N.shape[1] == sum(map(len, distinct)) + sum(map(len, completions))
    for prompt, completion, place in zip(given_prompts, completions, places, strict=True):
        assert packed.ids_1N[0, place].tolist() == prompt + completion
        assert packed.positions_1N[0, place].tolist() == list(range(len(place)))
    token_M, place_N = packed.to_places.row_P, packed.to_packed.row_P
    assert len(token_M) == sum(rows * longest for rows, longest in packed.blocks)
    assert torch.equal(token_M[place_N], torch.arange(packed.ids_1N.shape[1]))
    for tokens_R, places_RK in packed.to_places.back:
        assert (token_M[places_RK] == tokens_R[:, None]).all()
    known = torch.cat([places_RK.flatten() for _, places_RK in packed.to_places.back])
    assert len(known) == len(set(known.tolist())) == sum(map(len, places))


def make_ragged() -> TokenBatch:
    """Two prompts, three completions each, from one token to thirty; some tokens are the environment's."""
    rng = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 255, (n,), generator=rng).tolist() for n in (9, 17)]
    samples = []
    for row, length in enumerate((3, 12, 20, 5, 1, 30)):
        completion = torch.randint(1, 255, (length,), generator=rng).tolist()
        mask = [int(i != 2) for i in range(length)]
        samples.append(Sample(prompts[row % 2], completion, [0.0] * length, mask, 0))
    return make_token_batch(TrainBatch(samples, [1.0] * 6, 6, 1, TEMPERATURE), torch.device("cpu"))


def check_against_plain(model: Any, forward: Forward, tokens: TokenBatch) -> None:
    """Value, and gradient of a random weighing of the logprobs; also the entropy and its gradient."""
    weights_BT = torch.randn(tokens.mask_BT.shape, generator=torch.Generator().manual_seed(2)) * tokens.mask_BT
    trained = [p for p in model.parameters() if p.requires_grad]
    logprobs_BT, entropy_BT = forward.logprobs(model, tokens, entropy_grad=True)
    loss = ((logprobs_BT + 0.3 * entropy_BT) * weights_BT).sum()
    mine = torch.autograd.grad(loss, trained, allow_unused=True)
    total = torch.zeros(())
    for row, sample in enumerate(tokens.samples):
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        log_p = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float() / TEMPERATURE, -1)
        length = len(sample.completion_ids)
        log_p_TV = log_p[len(sample.prompt_ids) - 1 : -1]
        expected = log_p_TV.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
        entropy = -(log_p_TV.exp() * log_p_TV).sum(-1)
        mask = torch.tensor(sample.mask)
        torch.testing.assert_close(logprobs_BT[row, :length], expected * mask, atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(entropy_BT[row, :length], entropy * mask, atol=1e-4, rtol=1e-4)
        total = total + ((expected + 0.3 * entropy) * weights_BT[row, :length]).sum()
    theirs = torch.autograd.grad(total, trained, allow_unused=True)
    for one, other in zip(mine, theirs, strict=True):
        if other is None:
            assert one is None
            continue
        assert one is not None
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one / scale, other / scale, atol=2e-5, rtol=1e-3)


def test_the_precision_is_that_of_the_devices_own_kind_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two kinds, of which the second has bfloat16; torch answers for the current one (a fake)."""
    current = [0]

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        current.append(device.index or 0)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: current[-1] == 1)
    for device, expected in (("cuda", None), ("cuda:0", None), ("cuda:1", torch.bfloat16), ("cpu", None)):
        assert autocast_dtype(ModelConfig(device=device), torch.device(device)) is expected
