"""What waits to be decoded by the `transformers` engine, and how much of it goes beside what runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mrl.types import GenerateRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what is in memory at once."""

    max_model_len: int
    """Prompt and completion tokens of one request."""
    max_batch_tokens: int
    """Rows x longest possible length of those that decode together."""
    max_rows: int
    """Rows that decode together; each has logits over the whole vocabulary."""
    prefill_tokens: int
    """Prompts x longest prompt of one prefill forward."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request with its place in the caller's list and the tokens it may sample."""

    index: int
    request: GenerateRequest
    max_new: int

    @property
    def reach(self) -> int:
        """Tokens it may come to, with its prompt."""
        return len(self.request.prompt_ids) + self.max_new


def queue_of(requests: Sequence[GenerateRequest], max_model_len: int) -> deque[Job]:
    """Jobs with equal prompts adjacent, longest prompts first: a later prompt then fits into columns that are there."""
    groups: dict[tuple[int, ...], list[Job]] = {}
    for index, request in enumerate(requests):
        max_new = min(request.sampling.max_tokens, max_model_len - len(request.prompt_ids))
        groups.setdefault(request.prompt_ids, []).append(Job(index, request, max_new))
    return deque(job for prompt in sorted(groups, key=len, reverse=True) for job in groups[prompt])


def first_that_fit(queue: Iterable[Job], running: Sequence[Job], limits: Limits, *, one_prefill: bool) -> list[Job]:
    """The first of the queue, as many as fit beside the running ones; at least one where nothing runs.

    one_prefill: their distinct prompts must also fit one prefill forward (caches whose rows cannot be replaced).
    """
    jobs: list[Job] = []
    prompts: set[tuple[int, ...]] = set()
    reach, longest = max((job.reach for job in running), default=0), 0
    for job in queue:
        rows, reach = len(running) + len(jobs) + 1, max(reach, job.reach)
        prompts.add(job.request.prompt_ids)
        longest = max(longest, len(job.request.prompt_ids))
        fits = rows <= limits.max_rows and rows * reach <= limits.max_batch_tokens
        if one_prefill:
            fits &= len(prompts) * longest <= limits.prefill_tokens
        if not fits and rows > 1:
            break
        jobs.append(job)
    return jobs
