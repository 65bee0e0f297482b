"""Small policies and their supervised phase: next-token prediction on the demonstrations' answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from mrl.starter.corpus import Lesson, answer

IGNORED = -100
"""Label of the tokens that the loss leaves out."""

Marked = tuple[list[int], list[bool]]
"""Token ids, and which of them are learned: the answers'."""


@dataclass(frozen=True)
class Schedule:
    steps: int = 2000
    batch_size: int = 48
    learning_rate: float = 3e-3
    warmup: int = 100


def new_policy(
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    hidden_size: int = 128,
    layers: int = 4,
    initializer_range: float = 0.02,
) -> LlamaForCausalLM:
    """An untrained Llama in float32, of 0.8 million parameters unless its size is given."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    lessons: list[Lesson],
    schedule: Schedule,
    seed: int,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """On answers to the lessons' prompts. Every epoch draws new demonstrations, right or with a mistake."""
    rng = random.Random(f"{seed}/supervised")
    prompts = [_prompt_ids(tokenizer, lesson.prompt) for lesson in lessons]
    order: list[int] = []

    def draw() -> list[Marked]:
        nonlocal order
        if len(order) < schedule.batch_size:
            order = rng.sample(range(len(lessons)), k=len(lessons))
        batch = [order.pop() for _ in range(schedule.batch_size)]
        answers = [answer(lessons[i].demonstrate(rng)) + tokenizer.eos_token for i in batch]
        written = tokenizer(answers)["input_ids"]
        return [
            (prompts[i] + ids, [False] * len(prompts[i]) + [True] * len(ids))
            for i, ids in zip(batch, written, strict=True)
        ]

    fit(model, draw, tokenizer.pad_token_id, schedule, report)


def fit(
    model: LlamaForCausalLM,
    draw: Callable[[], list[Marked]],
    padding: int,
    schedule: Schedule,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """AdamW with warm-up and cosine decay, a batch that `draw` gives at each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, schedule))
    model.train()
    for step in range(schedule.steps):
        loss = model(**_collate(draw(), padding), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        report(step, loss.item())
    model.eval()


def _rate(step: int, schedule: Schedule) -> float:
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    progress = (step - schedule.warmup) / max(1, schedule.steps - schedule.warmup)
    return 0.05 + 0.95 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * progress)).item())


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    return tokenizer(text)["input_ids"]


def _collate(rows: list[Marked], padding: int) -> dict[str, Tensor]:
    """Right-padded input_ids, attention_mask and labels, each (B, longest)."""
    longest = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), longest), padding)
    labels = torch.full((len(rows), longest), IGNORED)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for row, (ids, marks) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.where(torch.tensor(marks), torch.tensor(ids), IGNORED)
        mask[row, : len(ids)] = 1
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
