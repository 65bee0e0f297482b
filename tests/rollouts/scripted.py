"""A policy that says what it is told to, by tokens of a tiny tokenizer, for tests of sources without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mrl.rollouts import SourceSetup, TurnLimits
from mrl.rollouts.prompts import PromptEncoder
from mrl.types import Completion, GenerateRequest, SamplingParams
from tests.rollouts.chat_templates import tokenizer_of

STYLE = "chatml"


def setup(limits: TurnLimits | None = None, style: str = STYLE, **sampling: Any) -> SourceSetup:
    tokenizer = tokenizer_of(style)
    return SourceSetup(tokenizer, PromptEncoder(tokenizer), SamplingParams(**sampling), limits or TurnLimits())


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Scripted:
    """says: what comes in each turn, text or a function of the prompt's text. Ends as the tokens' limit demands."""

    def __init__(
        self, says: Sequence[str | Callable[[str], str]], *, max_model_len: int = 10_000, seconds: float = 0.0
    ) -> None:
        self.says, self.max_model_len, self.seconds = list(says), max_model_len, seconds
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        tokenizer = tokenizer_of(STYLE)
        if self.seconds:
            await asyncio.sleep(self.seconds)
        turn = int(request.id.rpartition("/")[2])
        said = self.says[min(turn, len(self.says) - 1)]
        text = said if isinstance(said, str) else said(tokenizer.decode(request.prompt_ids))
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        limit = min(request.sampling.max_tokens, self.max_model_len - len(request.prompt_ids))
        done = Completion(request.id, ids, [-0.5] * len(ids), "stop", turn)
        return done if len(ids) <= limit else replace(done, token_ids=ids[:limit], logprobs=[-0.5] * limit,
                                                      finish_reason="length")  # fmt: skip

    def prompts(self) -> list[str]:
        return [tokenizer_of(STYLE).decode(request.prompt_ids) for request in self.requests]
