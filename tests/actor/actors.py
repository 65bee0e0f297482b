"""Actors on tiny models, and batches for them."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from mrl.actor.worker import ActorWorker
from mrl.config import AlgorithmConfig
from mrl.types import Sample, TrainBatch

LR = 1e-3


def make_actor(model: str, *, lora: bool = False, dropout: float = 0.0, **options: object) -> ActorWorker:
    settings = {"model": model, "device": "cpu", "dtype": options.pop("dtype", "auto")}
    if lora:
        settings |= {"use_lora": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": dropout}
    algorithm = {name: options.pop(name) for name in list(options) if name in AlgorithmConfig.model_fields}
    actor = ActorWorker(settings, {"learning_rate": LR, **options}, total_steps=10, algorithm=algorithm)
    actor.initialize()
    return actor


def logprobs_of(model: object, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    """The plain way: one sequence, all logits."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].float() / temperature
    log_p = torch.log_softmax(logits, -1)
    positions = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return log_p[positions, torch.tensor(completion)]


def make_batch(model: str, *, rows: int = 7, temperature: float = 0.8, num_sequences: int | None = None) -> TrainBatch:
    """Ragged samples whose logprobs are the model's own; one has tokens that the policy did not sample."""
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    rng = torch.Generator().manual_seed(3)
    samples = []
    for row in range(rows):
        prompt = torch.randint(0, 200, (int(torch.randint(1, 9, (1,), generator=rng)),), generator=rng).tolist()
        completion = torch.randint(0, 200, (int(torch.randint(1, 12, (1,), generator=rng)),), generator=rng).tolist()
        with torch.no_grad():
            logprobs = logprobs_of(policy, prompt, completion, temperature).tolist()
        mask = [1] * len(completion)
        if row == 1:
            mask[0] = 0
        samples.append(Sample(prompt, completion, logprobs, mask, policy_version=0))
    advantages = torch.randn(rows, generator=rng).tolist()
    return TrainBatch(samples, advantages, num_sequences or rows, sum(sum(s.mask) for s in samples), temperature)


def parameters(actor: ActorWorker) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in actor.model.named_parameters()}
