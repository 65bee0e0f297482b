"""A policy for tests of rollout functions: it says letters that its seed draws, and tells its version."""

from __future__ import annotations

import asyncio
import random

from mrl.types import Completion, GenerateRequest, TokenSequence
from tests.rollouts.chat_templates import tokenizer_of
from tests.rollouts.scripted import STYLE

LENGTH = 4


class Letters:
    """seconds: that a completion takes. turns_at: after so many requests new weights come, midway in a completion."""

    def __init__(self, *, max_model_len: int = 500, seconds: float = 0.0, turns_at: int | None = None) -> None:
        self.max_model_len, self.seconds, self.turns_at = max_model_len, seconds, turns_at
        self.version = 3
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        number = len(self.requests)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        letters = random.Random(request.seed).choices("abcdefgh", k=min(LENGTH, request.sampling.max_tokens))
        ids = tokenizer_of(STYLE).convert_tokens_to_ids(letters)
        versions: int | list[int] = self.version
        if number == self.turns_at:
            self.version += 1
            versions = [self.version - 1] + [self.version] * (len(ids) - 1)
        return Completion(request.id, ids, [-0.25] * len(ids), "stop", versions)

    async def logprobs(self, sequences: list[TokenSequence]) -> list[list[float]]:
        return [[-1.5 * sequence.temperature] * len(sequence.completion_ids) for sequence in sequences]
