"""Requests: checks before they are served, and translation to vLLM's parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mrl.errors import EngineError, ModelError
from mrl.types import Completion, GenerateRequest, TokenSequence

if TYPE_CHECKING:
    from mrl.config import ModelConfig


def refusal(
    request: GenerateRequest,
    max_model_len: int,
    vocab_size: int | None,
    *,
    version: int,
    stop_strings: bool = True,
    no_images: str = "this engine takes none",
) -> Completion | None:
    """The failed completion of a request that cannot be served, with the reason; None for one that can.

    vocab_size: None = not known. version: the policy's. stop_strings: whether the engine supports them. no_images: why
    it takes none; "" = it does.
    """
    try:
        if request.media and no_images:
            raise EngineError(f"request {request.id!r} has {len(request.media)} image(s), and {no_images}")
        _check(request, max_model_len, vocab_size)
        if request.sampling.stop and not stop_strings:
            raise EngineError(
                f"request {request.id!r} has stop strings, which need a tokenizer: give the engine one, or use "
                "stop_token_ids"
            )
    except EngineError as error:
        return Completion.failed(request, str(error), version)
    return None


def _check(request: GenerateRequest, max_model_len: int, vocab_size: int | None) -> None:
    what, s = f"request {request.id!r}", request.sampling
    _check_ids(what, "prompt", request.prompt_ids, vocab_size)
    if len(request.prompt_ids) >= max_model_len:
        raise EngineError(
            f"{what} has a prompt of {len(request.prompt_ids)} tokens, more than max_model_len - 1 = "
            f"{max_model_len - 1}: shorten the prompt or raise max_model_len"
        )
    if not 0 <= request.seed < 2**63:
        raise EngineError(f"{what} has seed {request.seed}; seeds are from 0 to 2**63 - 1")
    checks = {
        f"temperature={s.temperature} (must be finite and >= 0)": 0 <= s.temperature < float("inf"),
        f"top_p={s.top_p} (must be above 0 and at most 1)": 0 < s.top_p <= 1,
        f"top_k={s.top_k} (must be from 0 to 2**31 - 1; 0 = off)": 0 <= s.top_k < 2**31,
        f"min_p={s.min_p} (must be from 0 to 1)": 0 <= s.min_p <= 1,
        f"max_tokens={s.max_tokens} (must be >= 1)": s.max_tokens >= 1,
        f"stop={s.stop!r} (an empty string occurs everywhere)": "" not in s.stop,
    }
    if wrong := [text for text, good in checks.items() if not good]:
        raise EngineError(f"{what} has {', '.join(wrong)}")


def sampling_fields(request: GenerateRequest, end_ids: frozenset[int], max_model_len: int) -> dict[str, Any]:
    """vLLM's sampling parameters for a checked request."""
    s = request.sampling
    fields: dict[str, Any] = {
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "min_p": s.min_p,
        "max_tokens": min(s.max_tokens, max_model_len - len(request.prompt_ids)),
        "stop_token_ids": sorted(end_ids.union(s.stop_token_ids)),
    }
    return fields | ({"stop": list(s.stop)} if s.stop else {})


def check_sequence(
    number: int, sequence: TokenSequence, max_model_len: int, vocab_size: int | None, *, images: bool = False
) -> None:
    """Raise EngineError for a sequence that cannot be scored. images: whether those with images can."""
    what = f"sequence {number}"
    if sequence.media and not images:
        raise EngineError(f"{what} has {len(sequence.media)} image(s), and this engine scores none")
    _check_ids(what, "prompt", sequence.prompt_ids, vocab_size)
    if sequence.completion_ids:
        _check_ids(what, "completion", sequence.completion_ids, vocab_size)
    length = len(sequence.prompt_ids) + len(sequence.completion_ids)
    if length > max_model_len:
        raise EngineError(f"{what} has {length} tokens, more than max_model_len={max_model_len}")
    if not 0 < sequence.temperature < float("inf"):
        raise EngineError(f"{what} has temperature={sequence.temperature}; logprobs need one above 0")


def _check_ids(what: str, part: str, ids: tuple[int, ...], vocab_size: int | None) -> None:
    """Raise EngineError for no ids at all, or ids outside the vocabulary (where its size is known)."""
    if not ids:
        raise EngineError(f"{what} has an empty {part}; give it at least one token, such as the model's BOS")
    largest = float("inf") if vocab_size is None else vocab_size - 1
    if min(ids) < 0 or max(ids) > largest:
        bad = next(i for i in ids if not 0 <= i <= largest)
        raise EngineError(f"{what} has id {bad} in its {part}; the model's vocabulary has {vocab_size} ids")


def end_ids(config: ModelConfig) -> frozenset[int]:
    """End-of-sequence ids of the model's generation config, its config and its tokenizer together."""
    from transformers import GenerationConfig

    from mrl.models import load_config, load_tokenizer, resolve_model

    model_config = load_config(config)
    sources = [model_config, model_config.get_text_config(decoder=True), load_tokenizer(config)]
    with contextlib.suppress(OSError, ModelError):  # many models have none
        source = resolve_model(config.model)
        sources.append(GenerationConfig.from_pretrained(source, revision=config.revision or "main"))
    return eos_ids(sources)


def eos_ids(sources: Iterable[Any]) -> frozenset[int]:
    """All end-of-sequence ids of the given configs and tokenizers; each has one, several or none."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def versions_per_token(spans: list[list[int]], tokens: int, current: int) -> int | list[int]:
    """[version, first token] spans → one version, or one per token if there are several."""
    if len(spans) <= 1:
        return spans[0][0] if spans else current
    ends = [start for _, start in spans[1:]] + [tokens]
    return [version for (version, start), end in zip(spans, ends, strict=True) for _ in range(start, end)]
