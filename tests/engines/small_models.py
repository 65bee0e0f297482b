"""Models of every kind the `transformers` engine decodes, a few thousand parameters each, and requests to them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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
)

from mrl.engines.transformers.engine import TransformersEngine
from mrl.types import Completion, GenerateRequest, SamplingParams, TokenSequence

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


def greedy_reference(model: PreTrainedModel, prompt: tuple[int, ...], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    output = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=0)
    return output[0, len(prompt) :].tolist()


def fresh_logprobs(model: PreTrainedModel, sequence: TokenSequence) -> list[float]:
    ids = torch.tensor([sequence.prompt_ids + sequence.completion_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].float() / sequence.temperature, -1)
    start = len(sequence.prompt_ids)
    return logprobs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].tolist()


def assert_same(got: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one.request_id, one.token_ids, one.finish_reason) == (
            other.request_id,
            other.token_ids,
            other.finish_reason,
        )
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


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
