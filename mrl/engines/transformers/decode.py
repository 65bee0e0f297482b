"""The decode loop of the `transformers` engine: a bounded batch of rows, refilled from a queue as rows end.

All rows write the same cache column at every step, so a row is a prompt that ends at that column, and a request that
waits can take the place of one that ended whatever their lengths. Each distinct prompt is computed once and its cache
row copied to the requests that share it. When nothing waits any more, rows that ended are dropped.

Models that keep their own kind of cache (see `CausalLM`) cannot have single rows replaced: there the next requests
begin when all rows have ended.

Keys and values, and the model's step on them, are a `DecodeStep`'s: see mrl.engines.transformers.decode_step.

Decoding can be interrupted between two tokens, for other weights: what was sampled is kept, and goes on from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mrl.engines.requests import versions_per_token
from mrl.engines.transformers.decode_queue import Begun, Job, Limits, first_that_fit, in_order
from mrl.engines.transformers.decode_step import DecodeStep, EagerStep
from mrl.engines.transformers.model import CausalLM
from mrl.engines.transformers.prefill import Prefilled, Prefiller, TokenIds
from mrl.engines.transformers.sampling import RowParams, sample
from mrl.engines.transformers.static_step import StaticStep
from mrl.engines.transformers.stop_strings import StopStrings
from mrl.types import Completion, FinishReason

if TYPE_CHECKING:
    from mrl.engines.transformers.decode_calls import DecodeThread

COMPACT_SHARE = 0.25
"""Finished rows are dropped when they are this share of the batch: copying the cache must pay."""

REFILL_SHARE = 0.125
"""Waiting requests begin when they can be this many of the running ones: a prefill must pay."""

STEPS_PER_CHECK = {"cpu": 1, "cuda": 4, "mps": 4}
"""How often the host looks which rows ended, by device: on an accelerator, looking waits for it."""

NOT_FINITE = (
    "its logits are not finite: the policy's weights are NaN or overflow; look at the last updates (learning rate, "
    "gradient norm, dtype) and load a good checkpoint"
)
"""What a request is told whose next token cannot be drawn."""

FIRST_ROOM = 256
"""Tokens a cache has room for at first beyond the prompt; it grows by half when they are used up."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A job in the batch, whose first token is that of the loop's step number `born` (below 0 where it was begun)."""

    job: Job
    born: int

    @property
    def offset(self) -> int:
        """Its tokens in the cache, less the loop's step number."""
        return len(self.job.request.prompt_ids) - self.born


def decode(
    lm: CausalLM,
    jobs: Sequence[Job],
    calls: DecodeThread,
    *,
    limits: Limits,
    eos_ids: frozenset[int],
    stop_strings: StopStrings,
    version: int,
) -> list[Job]:
    """Give each job's call its completion as soon as it ended, those that join later too.

    Returns what is left when `calls` interrupts.
    """
    return _Batch(lm, jobs, calls, limits, eos_ids, stop_strings, version).run()


class _Batch:
    """The rows that decode together. B rows, of which some may have ended and wait to be replaced or dropped."""

    def __init__(
        self,
        lm: CausalLM,
        jobs: Sequence[Job],
        calls: DecodeThread,
        limits: Limits,
        eos_ids: frozenset[int],
        stop_strings: StopStrings,
        version: int,
    ) -> None:
        self.lm, self.limits, self.device, self.version = lm, limits, lm.device, version
        self.calls, self.eos_ids, self.stop_strings = calls, eos_ids, stop_strings
        self.queue: deque[Job] = deque()
        self.prefiller: Prefiller
        self.held: Prefilled | None = None
        """A prompt of which some requests still wait."""
        self.rows: list[_Row | None] = []
        """None = it ended and its completion was handed over."""
        self.running = 0
        """Rows that are not None."""
        self.clock = 0
        self.freed = True
        """Whether rows ended since requests were last let in."""
        self.steps_per_check = STEPS_PER_CHECK.get(self.device.type, 4)

        self.step: DecodeStep = (StaticStep if lm.static else EagerStep)(lm, limits.max_model_len)
        self.logits_BV: Tensor
        self.token_B: Tensor
        self.done_B: Tensor
        self.stopped_B: Tensor
        self.bad_B: Tensor
        self.length_B: Tensor
        self.ids_BT = torch.zeros(0, 1, dtype=torch.int64, device=self.device)
        self.logprobs_BT = torch.zeros(0, 1, dtype=torch.float32, device=self.device)

        self.enqueue(jobs)

    def run(self) -> list[Job]:
        """Decode until the queue is empty and every row ended; returns what is left when interrupted."""
        while True:
            if self.calls.cancelled():
                self.forget_cancelled()
            if self.calls.interrupted():
                return self.leave()
            self.enqueue(self.calls.more())
            if self.queue and self.freed:
                self.admit()
            if not self.running:
                return []
            self.take_token()
            self.calls.sampled += self.running
            if (self.clock + 1) % self.steps_per_check == 0:
                self.collect()
                self.drop_finished()
            if self.running:
                self.forward()

    def leave(self) -> list[Job]:
        """What did not end, with what it has."""
        if self.running:
            self.collect()
        rest = []
        for slot, row in enumerate(self.rows):
            if row is None:
                continue
            done = self.clock - row.born
            ids, logprobs = self.ids_BT[slot, :done].tolist(), self.logprobs_BT[slot, :done].tolist()
            begun = Begun(ids, logprobs, row.job.begun.spans(self.version)) if done else Begun()
            rest.append(row.job.going_on(begun))
        return [*rest, *self.queue]

    # --- letting requests in ----------------------------------------------------------------------------------------

    def enqueue(self, jobs: Sequence[Job]) -> None:
        """These wait, too."""
        if not jobs:
            return
        self.queue.extend(in_order(jobs))
        self.prefiller = Prefiller(
            self.lm, list(dict.fromkeys(job.tokens for job in self.queue)), self.limits.prefill_tokens
        )
        self.freed = True
        if any(job.request.sampling.stop for job in jobs):
            self.steps_per_check = 1

    def forget_cancelled(self) -> None:
        """Take out what nobody waits for any more."""
        self.queue = deque(job for job in self.queue if not job.call.cancelled)
        gone = [slot for slot, row in enumerate(self.rows) if row is not None and row.job.call.cancelled]
        for slot in gone:
            self.rows[slot] = None
            self.done_B[slot] = True
        self.running -= len(gone)
        self.freed = True

    def admit(self) -> None:
        """Begin as many waiting requests as there is room for, if they are enough to pay for a prefill."""
        if self.running and not self.lm.replaces_rows:
            return
        self.freed = False
        jobs = self.next_jobs()
        if len(jobs) < min(REFILL_SHARE * self.running, len(self.queue)) or not jobs:
            return
        for _ in jobs:
            self.queue.popleft()
        if not self.running:
            self.rows = []
            self.step.clear()  # before the prefill, which needs memory too
        free = [slot for slot, row in enumerate(self.rows) if row is None]
        slots = [*free[: len(jobs)], *range(len(self.rows), len(self.rows) + len(jobs) - len(free))]
        fresh, total = not self.running, max(len(self.rows), slots[-1] + 1)
        self.rows += [None] * (total - len(self.rows))
        self.running += len(jobs)
        self.make_room(total, max(job.max_new for job in jobs))

        slots_of: dict[TokenIds, list[int]] = {}
        for slot, job in zip(slots, jobs, strict=True):
            self.rows[slot] = _Row(job, self.clock - len(job.begun.ids))
            slots_of.setdefault(job.tokens, []).append(slot)
            for buffer, begun in ((self.ids_BT, job.begun.ids), (self.logprobs_BT, job.begun.logprobs)):
                buffer[slot, : len(begun)] = torch.tensor(begun, dtype=buffer.dtype, device=self.device)
        for part in self.prefill(list(slots_of)):
            self.place(part, [slots_of[prompt] for prompt in part.prompts], total, fresh=fresh)
            fresh = False
        self.refresh()

    def next_jobs(self) -> list[Job]:
        """The first of the queue, as many as fit beside the running rows."""
        running = [row.job for row in self.rows if row is not None]
        return first_that_fit(self.queue, running, self.limits, one_prefill=not self.lm.replaces_rows)

    def prefill(self, prompts: list[TokenIds]) -> Iterator[Prefilled]:
        """Parts that hold these prompts, one in memory at a time; keeps the last one if requests for it wait."""
        part, rest = self.held, prompts
        if part is not None and part.prompts != prompts[:1]:  # those who waited for it were cancelled
            part = None
        if part is not None:
            yield part
            rest = prompts[1:]
        if rest:
            for part in self.prefiller.run(rest):
                yield part
        assert part is not None
        waits = self.queue and self.queue[0].tokens == part.prompts[-1] and self.lm.replaces_rows
        self.held = part.only(len(part.prompts) - 1) if waits else None

    def place(self, part: Prefilled, slots_P: list[list[int]], total: int, *, fresh: bool) -> None:
        """Put each of the part's prompts into its slots; the first ones of a batch make its tensors."""
        index = [p for p, slots in enumerate(slots_P) for _ in slots]
        index_N = torch.tensor(index, device=self.device)
        slots_N = torch.tensor([slot for slots in slots_P for slot in slots], device=self.device)
        room, reach = min(self.ids_BT.shape[1], FIRST_ROOM), max(row.job.reach for row in self.rows if row is not None)
        self.step.put(part, index_N, slots_N, total, room=room, reach=reach)
        if fresh or len(self.logits_BV) < total:
            logits_BV = part.logits_PV.new_zeros(total, part.logits_PV.shape[1])
            if not fresh:
                logits_BV[: len(self.logits_BV)] = self.logits_BV
            self.logits_BV = logits_BV
        self.logits_BV[slots_N] = part.logits_PV[index_N]

    def make_room(self, rows: int, max_new: int) -> None:
        """Room in the buffers of what is sampled. The last column takes what rows write that have ended."""
        kept, width = self.ids_BT.shape
        if rows > kept or max_new >= width:
            shape = (rows, max(width, max_new + 1))
            for name in ("ids_BT", "logprobs_BT"):
                old: Tensor = getattr(self, name)
                new = old.new_zeros(shape)
                new[:kept, :width] = old[:rows]
                setattr(self, name, new)

    # --- one step ---------------------------------------------------------------------------------------------------

    def take_token(self) -> None:
        """Sample the next token of every row, store it and note which rows end with it."""
        step_B = self.clock - self.born_B
        token_B, logprob_B, usable_B = sample(self.logits_BV, self.params, step_B)
        at_B1 = step_B.clamp(max=self.ids_BT.shape[1] - 1)[:, None]
        self.ids_BT.scatter_(1, at_B1, token_B[:, None])
        self.logprobs_BT.scatter_(1, at_B1, logprob_B[:, None])
        running_B = ~self.done_B
        stop_B = (token_B[:, None] == self.stop_ids_BS).any(dim=1)
        if self.stop_strings.any:
            stop_B |= self.stop_strings.found(self.ids_BT, step_B, token_B, running_B & ~stop_B)
        end_B = (stop_B | ~usable_B | (step_B + 1 >= self.max_new_B)) & running_B
        self.stopped_B |= stop_B & running_B
        self.bad_B |= ~usable_B & running_B
        self.length_B = torch.where(end_B, step_B + 1, self.length_B)
        self.done_B |= end_B
        self.token_B = token_B

    def forward(self) -> None:
        """Logits after the tokens just sampled."""
        self.clock += 1
        self.logits_BV = self.step.forward(self.token_B, self.offset_B + self.clock)

    # --- rows that end ----------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Hand over the completions of rows that ended since the last time."""
        if int(self.done_B.sum()) == len(self.rows) - self.running:
            return
        slots = [slot for slot, done in enumerate(self.done_B.tolist()) if done and self.rows[slot] is not None]
        index_N = torch.tensor(slots, device=self.device)
        lengths, stopped = self.length_B[index_N].tolist(), self.stopped_B[index_N].tolist()
        bad = self.bad_B[index_N].tolist()
        ids, logprobs = (t[index_N, : max(lengths)].tolist() for t in (self.ids_BT, self.logprobs_BT))
        for n, slot in enumerate(slots):
            row, end = self.rows[slot], lengths[n]
            assert row is not None
            request = row.job.request
            reason: FinishReason = "stop" if stopped[n] else "length"
            versions = versions_per_token(row.job.begun.spans(self.version), end, self.version)
            completion = Completion(request.id, ids[n][:end], logprobs[n][:end], reason, versions)
            if bad[n]:
                completion = Completion.failed(request, NOT_FINITE, self.version)
            self.calls.ended(row.job, completion)
            self.rows[slot] = None
        self.running -= len(slots)
        self.freed = True
        self.measure()

    def drop_finished(self) -> None:
        """Take ended rows out of the batch if they are many and nothing will take their places."""
        ended = len(self.rows) - self.running
        if not ended or not self.running or ended < COMPACT_SHARE * len(self.rows):
            return
        if self.queue and self.lm.replaces_rows and self.next_jobs():
            return
        kept = [slot for slot, row in enumerate(self.rows) if row is not None]
        kept_B = torch.tensor(kept, device=self.device)
        self.rows = [self.rows[slot] for slot in kept]
        self.step.keep(kept_B)
        self.ids_BT, self.logprobs_BT, self.token_B = (
            self.ids_BT[kept_B],
            self.logprobs_BT[kept_B],
            self.token_B[kept_B],
        )
        self.refresh()

    def refresh(self) -> None:
        """Make the rows' tensors anew, at a moment when every row that ended was collected."""
        device, filler = self.device, next(row for row in self.rows if row is not None)
        rows = [row or filler for row in self.rows]
        samplings = [row.job.request.sampling for row in rows]
        self.params = RowParams.build(samplings, [row.job.request.seed for row in rows], device)
        self.stop_ids_BS = _stop_table([self.eos_ids.union(s.stop_token_ids) for s in samplings], device)
        self.stop_strings.watch([s.stop for s in samplings], self.lm.vocab_size, device)
        self.max_new_B = torch.tensor([row.job.max_new for row in rows], device=device)
        self.born_B = torch.tensor([row.born for row in rows], device=device)
        self.offset_B = torch.tensor([row.offset for row in rows], device=device)
        self.done_B = torch.tensor([row is None for row in self.rows], device=device)
        self.length_B = torch.zeros_like(self.born_B)
        self.stopped_B, self.bad_B = torch.zeros_like(self.done_B), torch.zeros_like(self.done_B)
        self.measure()

    def measure(self) -> None:
        """Tell the step how many tokens the running rows hold."""
        lengths = {row.offset + self.clock for row in self.rows if row is not None}
        if lengths:
            self.step.measure(lengths)


def _stop_table(stop_ids: list[frozenset[int]], device: torch.device) -> Tensor:
    """[B, S] ids, padded with -1, which no token has."""
    width = max(1, *map(len, stop_ids)) if stop_ids else 1
    return torch.tensor([[*sorted(ids), *[-1] * (width - len(ids))] for ids in stop_ids], device=device)
