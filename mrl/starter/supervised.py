"""The starter policy and its supervised phase: next-token prediction on the demonstrations' answers."""

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


@dataclass(frozen=True)
class Schedule:
    steps: int = 2000
    batch_size: int = 48
    learning_rate: float = 3e-3
    warmup: int = 100


def new_policy(tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """An untrained Llama of 0.8 million float32 parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        attention_dropout=0.0,
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
    """AdamW with warm-up and cosine decay. Every epoch draws new demonstrations, right or with a mistake."""
    rng = random.Random(f"{seed}/supervised")
    prompts = [_prompt_ids(tokenizer, lesson.prompt) for lesson in lessons]
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, schedule))
    order: list[int] = []
    model.train()
    for step in range(schedule.steps):
        if len(order) < schedule.batch_size:
            order = rng.sample(range(len(lessons)), k=len(lessons))
        batch = [order.pop() for _ in range(schedule.batch_size)]
        answers = [answer(lessons[i].demonstrate(rng)) + tokenizer.eos_token for i in batch]
        inputs = _collate([prompts[i] for i in batch], tokenizer(answers)["input_ids"], tokenizer.pad_token_id)
        loss = model(**inputs, use_cache=False).loss
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


def _collate(prompts: list[list[int]], answers: list[list[int]], padding: int) -> dict[str, Tensor]:
    """Right-padded input_ids, attention_mask and labels (answers only), each (B, longest)."""
    longest = max(len(prompt) + len(ids) for prompt, ids in zip(prompts, answers, strict=True))
    input_ids = torch.full((len(prompts), longest), padding)
    labels = torch.full((len(prompts), longest), IGNORED)
    mask = torch.zeros((len(prompts), longest), dtype=torch.long)
    for row, (prompt, ids) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(ids)
        input_ids[row, :end] = torch.tensor(prompt + ids)
        labels[row, len(prompt) : end] = torch.tensor(ids)
        mask[row, :end] = 1
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
