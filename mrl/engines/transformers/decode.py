"""The decode loop of the `transformers` engine: a bounded batch of rows, refilled from a queue as rows end.

All rows write the same cache column at every step, so a row is a prompt that ends at that column, and a request that
waits can take the place of one that ended whatever their lengths. Each distinct prompt is computed once and its cache
row copied to the requests that share it. When nothing waits any more, rows that ended are dropped.

What becomes of a request, and by which method:

    enqueue ──▶ waits ──admit──▶ runs ──collect──▶ ended: its slot is free ──drop_finished──▶ gone
                  │               │ ▲                        │
                  │             leave                        └── admit puts another request there
                  │               ▼ │ in the next batch, after other weights were loaded
                  └───leave───▶ handed back with what it has

    forget_cancelled takes requests out that wait or run and that nobody waits for any more.

The host learns what was sampled every few steps (`STEPS_PER_CHECK`), in one transfer, and decides then: rows that ended
in between have run on, and what they sampled beyond their end is left out. Between two such checks nothing waits.

Models that keep their own kind of cache (see `CausalLM`) cannot have single rows replaced: there the next requests
begin when all rows have ended.

Keys and values, and the model's step on them, are a `DecodeStep`'s: see mrl.engines.transformers.decode_step.

Decoding can be interrupted between two checks, for other weights: what was sampled is kept, and goes on from there.
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
from mrl.system.transfers import to_device, to_host
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

        self.step = _step_of(lm, limits.max_model_len)
        self.logits_BV: Tensor
        self.token_B: Tensor
        self.unseen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        """Of each step since the host last looked: token_B, logprob_B, stop_B (the token ends its row), usable_B."""
        # In host memory:
        self.running_B: Tensor
        self.ids_BT = torch.zeros(0, 1, dtype=torch.int64)
        self.logprobs_BT = torch.zeros(0, 1, dtype=torch.float32)

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
            self.take_tokens()
            self.collect()
            self.drop_finished()
            if self.running:
                self.forward()

    def leave(self) -> list[Job]:
        """What did not end, with what it has."""
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
            self.running_B[slot] = False
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
                buffer[slot, : len(begun)] = torch.tensor(begun, dtype=buffer.dtype)
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
        index_N = to_device(self.device, index)
        slots_N = to_device(self.device, [slot for slots in slots_P for slot in slots])
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

    # --- steps ------------------------------------------------------------------------------------------------------

    def take_tokens(self) -> None:
        """Sample as many tokens for every row as there are steps to a check, or as any row may still have."""
        steps = self.steps_per_check
        if steps > 1:
            steps = min(steps, max(row.born + row.job.max_new - self.clock for row in self.rows if row is not None))
        for left in reversed(range(steps)):
            self.take_token()
            self.calls.sampled += self.running
            if left:
                self.forward()

    def take_token(self) -> None:
        """Sample the next token of every row."""
        self.token_B, logprob_B, usable_B = sample(self.logits_BV, self.params, self.clock - self.born_B)
        stop_B = (self.token_B[:, None] == self.stop_ids_BS).any(dim=1)
        self.unseen.append((self.token_B, logprob_B, stop_B, usable_B))

    def forward(self) -> None:
        """Logits after the tokens just sampled."""
        self.clock += 1
        self.logits_BV = self.step.forward(self.token_B, self.offset_B + self.clock)

    # --- rows that end ----------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Take over what was sampled, and hand over the completions of rows that ended. Here the host waits."""
        found = to_host(*(tensor for step in self.unseen for tensor in step))
        self.unseen = []
        token_BK, logprob_BK, stop_BK, usable_BK = (torch.stack(found[kind::4], dim=1) for kind in range(4))
        steps = token_BK.shape[1]
        at_BK = torch.arange(self.clock - steps + 1, self.clock + 1) - self.host_born_B1
        # The last column takes what rows write that have ended.
        column_BK = at_BK.clamp(max=self.ids_BT.shape[1] - 1)
        self.ids_BT.scatter_(1, column_BK, token_BK)
        self.logprobs_BT.scatter_(1, column_BK, logprob_BK)
        if self.stop_strings.any:  # there is a check at every step then
            wanted_B = self.running_B & ~stop_BK[:, 0]
            stop_BK[:, 0] |= self.stop_strings.found(self.ids_BT, at_BK[:, 0], token_BK[:, 0], wanted_B)
        end_BK = (stop_BK | ~usable_BK | (at_BK + 1 >= self.max_new_B1)) & self.running_B[:, None]
        slots_N = end_BK.any(dim=1).nonzero()[:, 0]
        if not len(slots_N):
            return
        last_N1 = end_BK[slots_N].int().argmax(dim=1, keepdim=True)  # the first of those at which it would end
        each = (kind_BK[slots_N].gather(1, last_N1)[:, 0].tolist() for kind_BK in (at_BK, stop_BK, usable_BK))
        for slot, at, stopped, usable in zip(slots_N.tolist(), *each, strict=True):
            self.end(slot, at + 1, stopped=stopped, usable=usable)
        self.running_B[slots_N] = False
        self.running -= len(slots_N)
        self.freed = True
        self.measure()

    def end(self, slot: int, length: int, *, stopped: bool, usable: bool) -> None:
        """Hand over the completion in a slot, which has so many tokens."""
        row = self.rows[slot]
        assert row is not None
        request = row.job.request
        ids, logprobs = self.ids_BT[slot, :length].tolist(), self.logprobs_BT[slot, :length].tolist()
        reason: FinishReason = "stop" if stopped else "length"
        versions = versions_per_token(row.job.begun.spans(self.version), length, self.version)
        completion = Completion(request.id, ids, logprobs, reason, versions)
        self.calls.ended(row.job, completion if usable else Completion.failed(request, NOT_FINITE, self.version))
        self.rows[slot] = None

    def drop_finished(self) -> None:
        """Take ended rows out of the batch if they are many and nothing will take their places."""
        ended = len(self.rows) - self.running
        if not ended or not self.running or ended < COMPACT_SHARE * len(self.rows):
            return
        if self.queue and self.lm.replaces_rows and self.next_jobs():
            return
        kept = [slot for slot, row in enumerate(self.rows) if row is not None]
        kept_B = to_device(self.device, kept)
        self.rows = [self.rows[slot] for slot in kept]
        self.step.keep(kept_B)
        self.token_B = self.token_B[kept_B]
        self.ids_BT, self.logprobs_BT = self.ids_BT[kept], self.logprobs_BT[kept]
        self.refresh()

    def refresh(self) -> None:
        """Make the rows' tensors anew, at a moment when every row that ended was collected."""
        device, filler = self.device, next(row for row in self.rows if row is not None)
        rows = [row or filler for row in self.rows]
        samplings = [row.job.request.sampling for row in rows]
        self.params = RowParams.build(samplings, [row.job.request.seed for row in rows], device)
        self.stop_ids_BS = _stop_table([self.eos_ids.union(s.stop_token_ids) for s in samplings], device)
        self.stop_strings.watch([s.stop for s in samplings], self.lm.vocab_size)
        self.max_new_B1 = torch.tensor([row.job.max_new for row in rows])[:, None]
        self.host_born_B1 = torch.tensor([row.born for row in rows])[:, None]
        self.running_B = torch.tensor([row is not None for row in self.rows])
        self.born_B = to_device(device, self.host_born_B1[:, 0])
        self.offset_B = to_device(device, [row.offset for row in rows])
        self.measure()

    def measure(self) -> None:
        """Tell the step how many tokens the running rows hold."""
        lengths = {row.offset + self.clock for row in self.rows if row is not None}
        if lengths:
            self.step.measure(lengths)


def _step_of(lm: CausalLM, max_model_len: int) -> DecodeStep:
    """A new one, or that of the batch before with what it has recorded."""
    if not lm.static:
        return EagerStep(lm, max_model_len)
    step: StaticStep = lm.kept_step or StaticStep(lm, max_model_len)
    lm.kept_step = step if lm.own else None
    return step


def _stop_table(stop_ids: list[frozenset[int]], device: torch.device) -> Tensor:
    """[B, S] ids, padded with -1, which no token has."""
    width = max(1, *map(len, stop_ids)) if stop_ids else 1
    return to_device(device, [[*sorted(ids), *[-1] * (width - len(ids))] for ids in stop_ids])
