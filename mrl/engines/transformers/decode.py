"""The decode loop of the `transformers` engine: continuous batching of a bounded number of rows.

All rows write the same cache column at every step, so a row is a prompt that ends at that column, and a waiting request
can replace a finished one whatever their lengths. Each distinct prompt is prefilled once and its cache row copied to
the requests that share it. When no request waits, finished rows are dropped.

The life of a request, and the methods that move it on:

    enqueue ──▶ waiting ──admit──▶ running ──collect──▶ finished: its slot is free ──drop_finished──▶ gone
                   │                │ ▲                        │
                   │            interrupt                      └── admit puts another request there
                   │                ▼ │ in the next batch, after a weight update
                   └──interrupt──▶ returned with the tokens sampled so far

    drop_cancelled removes waiting and running requests whose call was cancelled.

The host checks every few steps (`STEPS_PER_CHECK`) what was sampled, in one transfer. Rows that finished between two
checks have kept running, and the tokens after their end are discarded. Nothing synchronises between two checks.

The keys and values of a finished request that belongs to a session are kept for the session's next request, which then
prefills only what follows (mrl.engines.transformers.prefix_cache).

Models that need their own kind of cache (see `CausalLM`) cannot have single rows replaced: the next requests start when
all rows have finished.

The KV cache, and the model's step on it, belong to a `DecodeStep` (mrl.engines.transformers.decode_step).

Decoding can be interrupted between two checks for a weight update: sampled tokens are kept, and decoding continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mrl.engines.requests import versions_per_token
from mrl.engines.transformers.decode_queue import Limits, PartialCompletion, RequestState, first_that_fit, longest_first
from mrl.engines.transformers.decode_step import DecodeStep, EagerStep
from mrl.engines.transformers.kv_cache import RowStates
from mrl.engines.transformers.model import CausalLM
from mrl.engines.transformers.prefill import Prefilled, Prefiller, TokenIds
from mrl.engines.transformers.prefix_cache import PrefixCache
from mrl.engines.transformers.sampling import RowParams, sample
from mrl.engines.transformers.static_step import StaticStep
from mrl.engines.transformers.stop_strings import StopStrings
from mrl.system.transfers import to_device, to_host
from mrl.types import Completion, FinishReason

if TYPE_CHECKING:
    from mrl.engines.transformers.decode_calls import DecodeThread

COMPACT_SHARE = 0.25
"""Finished rows are dropped when they are this share of the batch: dropping copies the cache."""

REFILL_SHARE = 0.125
"""Waiting requests are admitted when they number this share of the running rows: a prefill has a cost."""

PATIENCE = 4
"""Decode steps for which requests that are fewer wait for others to join them, where there is room for all."""

STEPS_PER_CHECK = {"cpu": 1, "cuda": 4, "mps": 4}
"""Decode steps between two checks for finished rows, by device: on an accelerator a check synchronises."""

NOT_FINITE = (
    "its logits are not finite: the policy's weights are NaN or overflow; look at the last updates (learning rate, "
    "gradient norm, dtype) and load a good checkpoint"
)
"""The error of a request whose next token cannot be sampled."""

FIRST_ROOM = 256
"""Tokens a new cache has room for beyond the prompt; it grows by half when full."""


@dataclass(slots=True)
class _Row:
    """A request in the batch. first_step: the loop's step that sampled its first token; negative for one that was
    interrupted before."""

    state: RequestState
    first_step: int
    prefilled: int = 0
    """Tokens that were computed for it, before it was interrupted and since. Of a prompt that several share, those
    count for one of them."""

    @property
    def offset(self) -> int:
        """Its tokens in the cache minus the loop's step number."""
        return len(self.state.request.prompt_ids) - self.first_step


def decode(
    lm: CausalLM,
    states: Sequence[RequestState],
    calls: DecodeThread,
    *,
    limits: Limits,
    eos_ids: frozenset[int],
    stop_strings: StopStrings,
    version: int,
    prefixes: PrefixCache,
) -> list[RequestState]:
    """Decode these requests, and those that join later; each completion goes to its call as soon as it is finished.

    Returns the unfinished requests when `calls` interrupts.
    """
    return _Batch(lm, states, calls, limits, eos_ids, stop_strings, version, prefixes).run()


class _Batch:
    """The rows that decode together: B rows, of which some may be finished and not yet replaced or dropped."""

    def __init__(
        self,
        lm: CausalLM,
        states: Sequence[RequestState],
        calls: DecodeThread,
        limits: Limits,
        eos_ids: frozenset[int],
        stop_strings: StopStrings,
        version: int,
        prefixes: PrefixCache,
    ) -> None:
        self.prefixes = prefixes
        self.lm, self.limits, self.device, self.version = lm, limits, lm.device, version
        self.calls, self.eos_ids, self.stop_strings = calls, eos_ids, stop_strings
        self.queue: deque[RequestState] = deque()
        self.prefiller: Prefiller
        self.held: Prefilled | None = None
        """A prefilled prompt that waiting requests share."""
        self.rows: list[_Row | None] = []
        """None = a finished row, whose completion was delivered."""
        self.running = 0
        """Rows that are not None."""
        self.clock = 0
        self.freed = True
        """Whether rows finished, or requests came, since requests were last admitted."""
        self.waiting_since = 0
        """The step at which the first waiting request came, or others were admitted before it."""
        self.steps_per_check = STEPS_PER_CHECK.get(self.device.type, 4)

        self.step = _step_of(lm, limits)
        self.logits_BV: Tensor
        self.token_B: Tensor
        self.unseen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        """For each step since the last check: token_B, logprob_B, stop_B (the token ends its row), usable_B."""
        # In host memory:
        self.running_B: Tensor
        self.host_offset_B: Tensor
        self.ids_BT = torch.zeros(0, 1, dtype=torch.int64)
        self.logprobs_BT = torch.zeros(0, 1, dtype=torch.float32)

        self.enqueue(states)

    def run(self) -> list[RequestState]:
        """Decode until the queue is empty and every row finished; returns the unfinished requests when interrupted."""
        while True:
            if self.calls.cancelled():
                self.drop_cancelled()
            if self.calls.interrupted():
                return self.interrupt()
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

    def interrupt(self) -> list[RequestState]:
        """The unfinished requests, with the tokens sampled so far."""
        rest = []
        for slot, row in enumerate(self.rows):
            if row is None:
                continue
            done = self.clock - row.first_step
            ids, logprobs = self.ids_BT[slot, :done].tolist(), self.logprobs_BT[slot, :done].tolist()
            spans = row.state.partial.spans(self.version) if done else []
            partial = PartialCompletion(ids, logprobs, spans, row.prefilled)
            rest.append(row.state.continued(partial))
        return [*rest, *self.queue]

    # --- admitting requests -----------------------------------------------------------------------------------------

    def enqueue(self, states: Sequence[RequestState]) -> None:
        """Add requests to the queue."""
        if not states:
            return
        if not self.queue:
            self.waiting_since = self.clock
        self.queue.extend(longest_first(states))
        self.prefiller = Prefiller(
            self.lm, list(dict.fromkeys(state.tokens for state in self.queue)), self.limits.prefill_tokens
        )
        self.freed = True
        if any(state.request.sampling.stop for state in states):
            self.steps_per_check = 1

    def drop_cancelled(self) -> None:
        """Remove the requests of cancelled calls."""
        self.queue = deque(state for state in self.queue if not state.call.cancelled)
        gone = [slot for slot, row in enumerate(self.rows) if row is not None and row.state.call.cancelled]
        for slot in gone:
            self.rows[slot] = None
            self.running_B[slot] = False
        self.running -= len(gone)
        self.freed = True

    def admit(self) -> None:
        """Start as many waiting requests as there is room for, if they are enough to be worth a prefill."""
        if self.running and not self.lm.replaces_rows:
            return
        if len(self.queue) < REFILL_SHARE * self.running and self.clock - self.waiting_since < PATIENCE:
            return
        states = self.next_requests()
        self.freed = False
        few, all_fit = len(states) < REFILL_SHARE * self.running, len(states) == len(self.queue)
        if not states or (few and not all_fit):
            return
        for _ in states:
            self.queue.popleft()
        self.waiting_since = self.clock
        if not self.running:
            self.rows = []
            self.step.clear()  # before the prefill, which needs memory too
        free = [slot for slot, row in enumerate(self.rows) if row is None]
        slots = [*free[: len(states)], *range(len(self.rows), len(self.rows) + len(states) - len(free))]
        fresh, total = not self.running, max(len(self.rows), slots[-1] + 1)
        self.rows += [None] * (total - len(self.rows))
        self.running += len(states)
        self.make_room(total, max(state.max_new for state in states))

        slots_of: dict[TokenIds, list[int]] = {}
        for slot, state in zip(slots, states, strict=True):
            self.rows[slot] = _Row(state, self.clock - len(state.partial.ids), state.partial.prefilled)
            slots_of.setdefault(state.tokens, []).append(slot)
            for buffer, partial in ((self.ids_BT, state.partial.ids), (self.logprobs_BT, state.partial.logprobs)):
                buffer[slot, : len(partial)] = torch.tensor(partial, dtype=buffer.dtype)
        for part in self.prefill(list(slots_of), self.known_beginnings(states)):
            self.place(part, [slots_of[prompt] for prompt in part.prompts], total, fresh=fresh)
            for prompt, computed in zip(part.prompts, part.computed_P, strict=True):
                row = self.rows[slots_of[prompt][0]]
                assert row is not None
                row.prefilled += computed
            fresh = False
        self.refresh()
        if any(state.request.session is not None for state in states):
            self.close_gaps()

    def next_requests(self) -> list[RequestState]:
        """The first requests of the queue, as many as fit beside the running rows."""
        running = [row.state for row in self.rows if row is not None]
        return first_that_fit(self.queue, running, self.limits, one_prefill=not self.lm.replaces_rows)

    def known_beginnings(self, states: list[RequestState]) -> dict[TokenIds, RowStates]:
        """Kept states of what the requests of sessions begin with."""
        if not self.lm.replaces_rows:
            return {}
        found: dict[TokenIds, RowStates] = {}
        for state in states:
            if state.request.session is not None and state.tokens not in found:
                known = self.prefixes.find(state.request.session, state.tokens)
                if known is not None:
                    found[state.tokens] = known
        return found

    def prefill(self, prompts: list[TokenIds], known: dict[TokenIds, RowStates]) -> Iterator[Prefilled]:
        """Prefill the prompts in parts, one in memory at a time; keeps the prompt that the next request waits for."""
        before, self.held = self.held, None
        next_up = self.queue[0].tokens if self.queue and self.lm.replaces_rows else None
        if before is not None and before.prompts == prompts[:1]:  # else those that waited for it were cancelled
            prompts = prompts[1:]
            if next_up == before.prompts[0]:
                self.held = before
            yield before
        for part in self.prefiller.run(prompts, known) if prompts else ():
            if next_up is not None and next_up in part.prompts:
                self.held = part.only(part.prompts.index(next_up))
            yield part

    def place(self, part: Prefilled, slots_P: list[list[int]], total: int, *, fresh: bool) -> None:
        """Copy each of the part's prompts to its slots. fresh: the first of a batch, which allocates its tensors."""
        index = [p for p, slots in enumerate(slots_P) for _ in slots]
        index_N = to_device(self.device, index)
        slots_N = to_device(self.device, [slot for slots in slots_P for slot in slots])
        running = [row.state for row in self.rows if row is not None]
        max_length = max(state.max_length for state in running)
        go_on = any(state.request.session is not None for state in running)
        room = FIRST_ROOM if go_on else min(self.ids_BT.shape[1], FIRST_ROOM)
        self.step.put(part, index_N, slots_N, total, room=room, max_length=max_length)
        if fresh or len(self.logits_BV) < total:
            logits_BV = part.logits_PV.new_zeros(total, part.logits_PV.shape[1])
            if not fresh:
                logits_BV[: len(self.logits_BV)] = self.logits_BV
            self.logits_BV = logits_BV
        self.logits_BV[slots_N] = part.logits_PV[index_N]

    def make_room(self, rows: int, max_new: int) -> None:
        """Grow the buffers of sampled tokens. Finished rows write to the last column."""
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
        """Sample tokens for every row up to the next check, or until every row has reached its limit."""
        steps = self.steps_per_check
        if steps > 1:
            steps = min(
                steps, max(row.first_step + row.state.max_new - self.clock for row in self.rows if row is not None)
            )
        for left in reversed(range(steps)):
            self.take_token()
            self.calls.sampled += self.running
            if left:
                self.forward()

    def take_token(self) -> None:
        """Sample the next token of every row."""
        self.token_B, logprob_B, usable_B = sample(self.logits_BV, self.params, self.clock - self.first_step_B)
        stop_B = (self.token_B[:, None] == self.stop_ids_BS).any(dim=1)
        self.unseen.append((self.token_B, logprob_B, stop_B, usable_B))

    def forward(self) -> None:
        """Logits after the tokens just sampled."""
        self.clock += 1
        self.logits_BV = self.step.forward(self.token_B, self.offset_B + self.clock)

    # --- finished rows ----------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Fetch the sampled tokens and deliver the completions of finished rows. Synchronises with the device."""
        found = to_host(*(tensor for step in self.unseen for tensor in step))
        self.unseen = []
        token_BK, logprob_BK, stop_BK, usable_BK = (torch.stack(found[kind::4], dim=1) for kind in range(4))
        steps = token_BK.shape[1]
        at_BK = torch.arange(self.clock - steps + 1, self.clock + 1) - self.host_first_step_B1
        # Finished rows write to the last column.
        column_BK = at_BK.clamp(max=self.ids_BT.shape[1] - 1)
        self.ids_BT.scatter_(1, column_BK, token_BK)
        self.logprobs_BT.scatter_(1, column_BK, logprob_BK)
        if self.stop_strings.any:  # then every step is checked
            wanted_B = self.running_B & ~stop_BK[:, 0]
            stop_BK[:, 0] |= self.stop_strings.found(self.ids_BT, at_BK[:, 0], token_BK[:, 0], wanted_B)
        end_BK = (stop_BK | ~usable_BK | (at_BK + 1 >= self.max_new_B1)) & self.running_B[:, None]
        slots_N = end_BK.any(dim=1).nonzero()[:, 0]
        if not len(slots_N):
            return
        last_N1 = end_BK[slots_N].int().argmax(dim=1, keepdim=True)  # the first token that ends the row
        each = (kind_BK[slots_N].gather(1, last_N1)[:, 0].tolist() for kind_BK in (at_BK, stop_BK, usable_BK))
        for slot, at, stopped, usable in zip(slots_N.tolist(), *each, strict=True):
            self.end(slot, at + 1, stopped=stopped, usable=usable)
        self.running_B[slots_N] = False
        self.running -= len(slots_N)
        self.freed = True
        self.measure()

    def end(self, slot: int, length: int, *, stopped: bool, usable: bool) -> None:
        """Deliver the completion in a slot. length: its tokens."""
        row = self.rows[slot]
        assert row is not None
        request = row.state.request
        ids, logprobs = self.ids_BT[slot, :length].tolist(), self.logprobs_BT[slot, :length].tolist()
        reason: FinishReason = "stop" if stopped else "length"
        versions = versions_per_token(row.state.partial.spans(self.version), length, self.version)
        completion = Completion(request.id, ids, logprobs, reason, versions, prefilled=row.prefilled)
        if request.session is not None and usable:
            self.keep(slot, row, (*request.prompt_ids, *ids[:-1]))
        self.calls.ended(row.state, completion if usable else Completion.failed(request, NOT_FINITE, self.version))
        self.rows[slot] = None

    def keep(self, slot: int, row: _Row, tokens: TokenIds) -> None:
        """Keep the states of a finished row for its session. Not the last token's: it is sampled, but not computed, or
        in a cache of fixed size it may be written over already."""
        assert row.state.request.session is not None
        states = self.step.row(slot, row.offset + self.clock, len(tokens))
        if states is not None:
            self.prefixes.keep(row.state.request.session, tokens, states)

    def drop_finished(self) -> None:
        """Drop finished rows from the batch if they are many and no waiting request will replace them."""
        ended = len(self.rows) - self.running
        if not ended or not self.running or ended < COMPACT_SHARE * len(self.rows):
            return
        if self.queue and self.lm.replaces_rows and self.next_requests():
            return
        kept = [slot for slot, row in enumerate(self.rows) if row is not None]
        self.token_B = self.token_B[to_device(self.device, kept)]
        self.keep_rows(kept)

    def close_gaps(self) -> None:
        """Move the last rows to the places of finished ones that no request took: those of conversations that wait for
        their environments. Copying these few rows costs less than another step of as many finished ones.

        Static steps have rows to fill up their size, and gain nothing."""
        count = self.running
        if self.lm.static or count == len(self.rows) or not self.lm.replaces_rows:
            return
        last = [slot for slot in range(count, len(self.rows)) if self.rows[slot] is not None]
        kept = [slot if self.rows[slot] is not None else last.pop() for slot in range(count)]
        self.logits_BV = self.logits_BV[to_device(self.device, kept)]
        self.keep_rows(kept)

    def keep_rows(self, kept: list[int]) -> None:
        """Keep the rows at these slots, in this order."""
        self.rows = [self.rows[slot] for slot in kept]
        self.step.keep(kept)
        self.ids_BT, self.logprobs_BT = self.ids_BT[kept], self.logprobs_BT[kept]
        self.refresh()

    def refresh(self) -> None:
        """Rebuild the rows' tensors; every finished row must have been collected."""
        device, filler = self.device, next(row for row in self.rows if row is not None)
        rows = [row or filler for row in self.rows]
        samplings = [row.state.request.sampling for row in rows]
        self.params = RowParams.build(samplings, [row.state.request.seed for row in rows], device)
        self.stop_ids_BS = _stop_table(self.eos_ids, [s.stop_token_ids for s in samplings], device)
        self.stop_strings.set_rows([s.stop for s in samplings], self.lm.vocab_size)
        self.max_new_B1 = torch.tensor([row.state.max_new for row in rows])[:, None]
        self.host_first_step_B1 = torch.tensor([row.first_step for row in rows])[:, None]
        self.running_B = torch.tensor([row is not None for row in self.rows])
        self.first_step_B = to_device(device, self.host_first_step_B1[:, 0])
        self.host_offset_B = torch.tensor([row.offset for row in rows])
        self.offset_B = to_device(device, self.host_offset_B)
        self.measure()

    def measure(self) -> None:
        """Tell the step how many tokens the running rows have in the cache."""
        if self.running:
            shortest, longest = self.host_offset_B[self.running_B].aminmax()
            self.step.measure(int(shortest) + self.clock, int(longest) + self.clock)


def _step_of(lm: CausalLM, limits: Limits) -> DecodeStep:
    """A new step, or the previous batch's with its recordings."""
    if not lm.static:
        return EagerStep(lm, limits.max_model_len)
    step: StaticStep = lm.kept_step or StaticStep(lm, limits.max_model_len, limits.max_batch_tokens)
    lm.kept_step = step if lm.exclusive else None
    return step


def _stop_table(eos_ids: frozenset[int], stop_ids_B: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """The ids that end each row [B, S], padded with -1."""
    ids_of = {stop_ids: sorted(eos_ids.union(stop_ids)) for stop_ids in set(stop_ids_B)}
    width = max(1, *map(len, ids_of.values()))
    padded = {stop_ids: ids + [-1] * (width - len(ids)) for stop_ids, ids in ids_of.items()}
    return to_device(device, [padded[stop_ids] for stop_ids in stop_ids_B])
