"""The policy as rollout sources see it: one `generate`, however many workers are behind it."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from mrl.backends.base import WorkerHandle
from mrl.types import Completion, GenerateRequest


class PolicyClient:
    """Spreads requests over rollout workers and puts the completions back in order."""

    def __init__(self, workers: list[WorkerHandle]) -> None:
        self.workers = workers

    async def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        """One completion per request, in order. Raises EngineError, WorkerDied."""
        shares = _share_out(requests, len(self.workers))
        busy = [(worker, share) for worker, share in zip(self.workers, shares, strict=True) if share]
        answers = await asyncio.gather(*(w.call("generate", [requests[i] for i in share]) for w, share in busy))
        completions: dict[int, Completion] = {}
        for (_, share), answer in zip(busy, answers, strict=True):
            completions.update(zip(share, answer, strict=True))
        return [completions[i] for i in range(len(requests))]


def _share_out(requests: list[GenerateRequest], workers: int) -> list[list[int]]:
    """Positions of the requests each worker gets: equal prompts stay together, the most work goes out first."""
    by_prompt: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for position, request in enumerate(requests):
        by_prompt[request.prompt_ids].append(position)
    shares: list[list[int]] = [[] for _ in range(workers)]
    load = [0] * workers
    for positions in sorted(by_prompt.values(), key=len, reverse=True):
        lightest = load.index(min(load))
        shares[lightest] += positions
        load[lightest] += sum(requests[p].sampling.max_tokens for p in positions)
    return shares
