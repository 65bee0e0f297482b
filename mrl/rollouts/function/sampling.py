"""Completions of prompts, as rollout functions ask for them: in the run's process or over HTTP, with one answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mrl.system.gather import all_of
from mrl.types import GenerateRequest, Message, SamplingParams, derive_seed

if TYPE_CHECKING:
    from mrl.rollouts.base import PolicyClient, SourceSetup

MAX_COMPLETIONS = 100_000
"""Of one request: more is a mistake, and would fill the memory before anything is sampled."""

SeedOf = Callable[[tuple[int, ...]], int]
"""The seed of the next completion of a prompt."""


class Seeds:
    """Seeds that depend on the prompt and on how often it was asked for, not on the order of different prompts: those
    that come over several connections come in any order."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._asked: Counter[tuple[int, ...]] = Counter()

    def __call__(self, prompt_ids: tuple[int, ...]) -> int:
        self._asked[prompt_ids] += 1
        return derive_seed(self.seed, ",".join(map(str, prompt_ids)), self._asked[prompt_ids])


class GenerateBody(BaseModel):
    """What `POST /generate/` takes: the fields of TRL's first vLLM server. One that cannot be honoured is refused."""

    model_config = ConfigDict(extra="forbid")

    prompts: list[str] | list[list[int]]
    """As text, tokenised as it is, or as token ids."""
    n: int = Field(1, ge=1)
    """Completions of each prompt."""
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    """-1 or 0 = off."""
    min_p: float = Field(0.0, ge=0, lt=1)
    max_tokens: int = Field(16, ge=1)
    repetition_penalty: float = 1.0
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    """Only the last tokens of a prompt; None = all."""
    logprobs: int | None = None
    images: list[Any] | None = None
    guided_decoding_regex: str | None = None
    structured_outputs_regex: str | None = None
    generation_kwargs: dict[str, Any] | None = None
    """`stop` and `seed`."""

    @field_validator("repetition_penalty")
    @classmethod
    def _no_penalty(cls, value: float) -> float:
        if value != 1:
            raise ValueError("logprobs of penalised samples would not be the policy's; use 1.0")
        return value

    @field_validator("logprobs")
    @classmethod
    def _only_its_own(cls, value: int | None) -> int | None:
        if value:
            raise ValueError("only the sampled token's logprob is given; use 0")
        return value

    @field_validator("guided_decoding_regex", "structured_outputs_regex")
    @classmethod
    def _no_regex(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("completions are not bound to a regular expression here; leave it out")
        return value

    @field_validator("images")
    @classmethod
    def _no_images(cls, value: list[Any] | None) -> list[Any] | None:
        if value and any(image is not None for image in value):
            raise ValueError("images are not taken; leave them out")
        return value

    @field_validator("generation_kwargs")
    @classmethod
    def _known_kwargs(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name, given in (value or {}).items():
            if name not in ("stop", "seed"):
                raise ValueError(f"{name} is not taken; there are stop and seed")
            texts = [given] if isinstance(given, str) else given
            if name == "stop" and not (
                isinstance(texts, list) and all(text and isinstance(text, str) for text in texts)
            ):
                raise ValueError("stop is text, or a list of texts")
            if name == "seed" and (not isinstance(given, int) or given < 0):
                raise ValueError("seed is a whole number from 0 on")
        return value

    def sampling(self, stop: tuple[str, ...] = ()) -> SamplingParams:
        """As the policy takes it. stop: where the request names none."""
        own = (self.generation_kwargs or {}).get("stop")
        texts = stop if own is None else (own,) if isinstance(own, str) else tuple(own)
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            stop=texts,
        )

    @property
    def seed(self) -> int | None:
        """The request's own."""
        found: int | None = (self.generation_kwargs or {}).get("seed")
        return found


class RefusedRequest(ValueError):
    """A request that cannot be served, and why."""


@dataclass
class Sampled:
    """A completion, token by token."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """The policy version that sampled each token."""


class Sampler:
    """Samples for rollout functions. seed_of: where a request brings no seed."""

    def __init__(self, policy: PolicyClient, setup: SourceSetup, seed_of: SeedOf) -> None:
        self.policy, self.setup, self.seed_of = policy, setup, seed_of
        self._numbers = count()

    async def answer(self, body: GenerateBody) -> dict[str, Any]:
        """What the route answers: `prompt_ids` once each; `completion_ids`, `logprobs` and `policy_versions` for the n
        completions of the first prompt, then those of the second …

        Raises RefusedRequest, and what the policy raises when nobody is left who samples.
        """
        keep = body.truncate_prompt_tokens or 0
        prompts = [self.encode(prompt)[-keep:] for prompt in body.prompts]
        done = await self.complete(prompts, body.n, body.sampling(self.setup.sampling.stop), body.seed)
        return {
            "prompt_ids": [list(prompt) for prompt in prompts],
            "completion_ids": [one.completion_ids for one in done],
            "logprobs": [one.logprobs for one in done],
            "policy_versions": [one.versions for one in done],
        }

    def encode(self, prompt: str | list[int] | list[Message]) -> tuple[int, ...]:
        """Text as it is, messages by the chat template. Raises RefusedRequest, DataError."""
        if isinstance(prompt, str):
            ids = list(self.setup.tokenizer(prompt)["input_ids"])
        elif prompt and isinstance(prompt[0], dict):
            if has_images(prompt):
                raise RefusedRequest("prompts: one has images, and rollout functions take none")
            ids = self.setup.encoder.encode(prompt)
        else:
            ids = list(prompt)
            wrong = [token for token in ids if not 0 <= token < self.setup.vocabulary]
            if wrong:
                raise RefusedRequest(f"prompts: there is no token {wrong[0]}, only 0 to {self.setup.vocabulary - 1}")
        if not ids:
            raise RefusedRequest("prompts: one has no tokens")
        return tuple(ids)

    async def complete(
        self, prompts: list[tuple[int, ...]], n: int, sampling: SamplingParams, seed: int | None = None
    ) -> list[Sampled]:
        """`n` completions of each prompt. Raises RefusedRequest."""
        if len(prompts) * n > MAX_COMPLETIONS:
            raise RefusedRequest(f"n: {len(prompts)} prompts x {n} are more than {MAX_COMPLETIONS:,} completions")
        seed_of = self.seed_of if seed is None else Seeds(seed)
        wanted = [prompt for prompt in prompts for _ in range(n)]
        # Requests of one turn of the event loop decode in one batch: the same call gives the same bits.
        return await all_of([self._one(prompt, sampling, seed_of(prompt)) for prompt in wanted])

    async def _one(self, prompt: tuple[int, ...], sampling: SamplingParams, seed: int) -> Sampled:
        request = GenerateRequest(f"rollout_func/{next(self._numbers)}", prompt, sampling, seed)
        said = await self.policy.generate(request)
        if said.finish_reason == "error":
            raise RefusedRequest(said.error or "the engine did not say why")
        version = said.policy_version
        versions = version if isinstance(version, list) else [version] * len(said.token_ids)
        return Sampled(list(prompt), said.token_ids, said.logprobs, versions)


def has_images(messages: list[Message]) -> bool:
    """Whether a part of them is one."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") in ("image", "image_url") for part in parts)


def parsed(fields: dict[str, Any]) -> GenerateBody:
    """Raises RefusedRequest, in one line."""
    try:
        return GenerateBody(**fields)
    except ValidationError as error:
        raise RefusedRequest(explained(error.errors())) from None


def explained(problems: list[Any]) -> str:
    """pydantic's errors in one line."""
    return "; ".join(
        f"{'.'.join(str(part) for part in problem['loc'] if part != 'body')}: "
        f"{str(problem['msg']).removeprefix('Value error, ')}"
        for problem in problems
    )
