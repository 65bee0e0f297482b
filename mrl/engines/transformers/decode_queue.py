"""Requests of the `transformers` engine while they wait and decode, and how many fit in a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mrl.types import Completion, GenerateRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory bounds of a batch."""

    max_model_len: int
    """Prompt and completion tokens of one request."""
    max_batch_tokens: int
    """Rows x longest possible length of the rows that decode together."""
    max_rows: int
    """Rows that decode together; each has logits over the whole vocabulary."""
    prefill_tokens: int
    """Prompts x longest prompt of one prefill forward."""


class Call:
    """The requests of one `generate`, and the completions so far."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self.requests = requests
        self.answer: Future[list[Completion]] = new_answer()
        self.cancelled = False
        self._completions: dict[int, Completion] = {}

    def take(self, index: int, completion: Completion) -> None:
        """Request number `index` ended."""
        self._completions[index] = completion

    @property
    def complete(self) -> bool:
        """Whether every request has ended."""
        return len(self._completions) == len(self.requests)

    def deliver(self) -> None:
        """Answer, once every request has ended."""
        if self.complete and not self.answer.done():
            self.answer.set_result([self._completions[i] for i in range(len(self.requests))])


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """The tokens of a completion that were sampled before decoding was interrupted."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    """[version, first token] spans."""
    prefilled: int = 0
    """Tokens that were computed before the first one, and at each interruption."""

    def spans(self, version: int) -> list[list[int]]:
        """The spans if decoding continues under `version`."""
        if self.versions and self.versions[-1][0] == version:
            return self.versions
        return [*self.versions, [version, len(self.ids)]]


@dataclass(frozen=True, slots=True)
class RequestState:
    """A request, its place in its call, the tokens it may sample in all, and those it already has."""

    call: Call
    index: int
    request: GenerateRequest
    max_new: int
    partial: PartialCompletion
    tokens: tuple[int, ...]
    """Prompt and partial completion: the tokens to prefill."""

    @property
    def max_length(self) -> int:
        """Most tokens it may reach, prompt included."""
        return len(self.request.prompt_ids) + self.max_new

    def continued(self, partial: PartialCompletion) -> RequestState:
        """The same request with these tokens already sampled."""
        tokens = (*self.request.prompt_ids, *partial.ids)
        return RequestState(self.call, self.index, self.request, self.max_new, partial, tokens)


def request_states(
    call: Call, max_model_len: int, refuse: Callable[[GenerateRequest], Completion | None]
) -> list[RequestState]:
    """The states of a call's requests. refuse: returns the failed completion of a request that cannot be served, which
    goes to the call here; None for others."""
    states = []
    for index, request in enumerate(call.requests):
        refused = refuse(request)
        if refused is not None:
            call.take(index, refused)
            continue
        max_new = min(request.sampling.max_tokens, max_model_len - len(request.prompt_ids))
        states.append(RequestState(call, index, request, max_new, PartialCompletion(), request.prompt_ids))
    return states


def longest_first(states: Iterable[RequestState]) -> list[RequestState]:
    """Longest prefill first, equal ones adjacent: later ones then fit into the columns that are already allocated."""
    groups: dict[tuple[int, ...], list[RequestState]] = {}
    for state in states:
        groups.setdefault(state.tokens, []).append(state)
    return [state for tokens in sorted(groups, key=len, reverse=True) for state in groups[tokens]]


def first_that_fit(
    queue: Iterable[RequestState], running: Sequence[RequestState], limits: Limits, *, one_prefill: bool
) -> list[RequestState]:
    """The first requests of the queue, as many as fit beside the running ones; at least one if none is running.

    one_prefill: their distinct prompts must also fit one prefill forward (caches whose rows cannot be replaced).
    """
    states: list[RequestState] = []
    prompts: set[tuple[int, ...]] = set()
    max_length, longest = max((state.max_length for state in running), default=0), 0
    for state in queue:
        rows, max_length = len(running) + len(states) + 1, max(max_length, state.max_length)
        prompts.add(state.tokens)
        longest = max(longest, len(state.tokens))
        fits = rows <= limits.max_rows and rows * max_length <= limits.max_batch_tokens
        if one_prefill:
            fits &= len(prompts) * longest <= limits.prefill_tokens
        if not fits and rows > 1:
            break
        states.append(state)
    return states


def new_answer() -> Future[Any]:
    """A future that its waiters cannot cancel, so that it can always be set."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
