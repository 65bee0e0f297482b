"""Models, prompts and engines that several parts use."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from vs_trl import word_model

from gpu_checks.report import Report
from mrl.config import ModelConfig
from mrl.engines.transformers.engine import TransformersEngine
from mrl.types import Completion, GenerateRequest, Sample, SamplingParams, TokenSequence, TrainBatch

Prompts = Sequence[tuple[int, ...]]

# --- models -----------------------------------------------------------------------------------------------------------


def random_model(folder: Path, *, hidden: int, layers: int, words: int) -> str:
    """The path of a new Llama of random weights with heads of 64, which never ends a completion by itself."""
    model = word_model(
        folder,
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 256),
        head_dim=64,
    )
    model.get_input_embeddings().weight.data *= 4  # so that temperatures make a difference
    model.save_pretrained(folder)
    return str(folder)


def speed_model(report: Report) -> str:
    """The path of a random model as large as timing it is worth: 120 M parameters on a GPU."""
    where = Path(os.environ["GPU_CHECK_SCRATCH"]) / f"speed-{'gpu' if report.gpu else 'cpu'}"
    shape = {"hidden": 768, "layers": 12, "words": 32_000} if report.gpu else {"hidden": 64, "layers": 2, "words": 512}
    return str(where) if (where / "config.json").exists() else random_model(where, **shape)


def change(model: Any) -> None:
    """Move every weight a little."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


# --- prompts and batches ----------------------------------------------------------------------------------------------


def starter_prompts() -> list[tuple[int, ...]]:
    """Prompts of several lengths, as the shipped policy's ids."""
    return [tuple(3 + (7 * row + 11 * at) % 600 for at in range(8 + 5 * row)) for row in range(8)]


def speed_prompts(count: int) -> list[tuple[int, ...]]:
    """Each 32 ids that every vocabulary here has; the first ones differ."""
    return [tuple(3 + (number + at) % 400 for at in range(32)) for number in range(count)]


def starter_batch(report: Report) -> TrainBatch:
    """Samples of the shipped policy with advantages of both signs."""
    return _starter_batch(*((8, 48) if report.gpu else (4, 24)))


@functools.cache
def _starter_batch(prompts: int, tokens: int) -> TrainBatch:
    asked = [prompt for prompt in starter_prompts()[:prompts] for _ in range(4)]
    with engine("cpu", decode_step="eager") as cpu:
        found = sampled(cpu, asked, tokens)
    samples = [
        Sample(list(prompt), list(c.token_ids), list(c.logprobs), [1] * len(c.token_ids), 0)
        for prompt, c in zip(asked, found, strict=True)
    ]
    advantages = [(-1.0) ** index * (1 + index % 3) / 2 for index in range(len(samples))]
    return TrainBatch(samples, advantages, len(samples), sum(len(s.completion_ids) for s in samples))


# --- engines ----------------------------------------------------------------------------------------------------------


@contextmanager
def engine(device: str, **options: Any) -> Iterator[TransformersEngine]:
    """Engine transformers, with the shipped policy in float32 unless the model's options say otherwise."""
    defaults = {"model": "starter", "dtype": "float32", "max_model_len": 256, "device": device}
    made = TransformersEngine.create(ModelConfig(**defaults | options))
    try:
        yield made
    finally:
        made.close()


def sampled(engine: Any, prompts: Prompts, tokens: int, temperature: float = 1.0) -> list[Completion]:
    """An engine's completion of each prompt, its number the seed."""
    params = SamplingParams(temperature=temperature, max_tokens=tokens)
    asked = [GenerateRequest(str(i), prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    found: list[Completion] = asyncio.run(engine.generate(asked))
    return found


def sequences(prompts: Prompts, found: Sequence[Completion], temperature: float = 1.0) -> list[TokenSequence]:
    """What was sampled, to be scored."""
    return [TokenSequence(p, tuple(c.token_ids), temperature) for p, c in zip(prompts, found, strict=True)]


def scored(engine: Any, asked: list[TokenSequence]) -> list[float]:
    """An engine's logprobs of all tokens of all sequences."""
    return flat(asyncio.run(engine.logprobs(asked)))


def flat(lists: Sequence[Sequence[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def apart(some: Sequence[float], others: Sequence[float]) -> list[float]:
    """The differences between numbers that belong together."""
    return [abs(a - b) for a, b in zip(some, others, strict=True)]
