"""Experience ahead of time: which tasks are begun when, and which groups a step gets.

Tasks are drawn in batches, one for each step, and handed out as tickets: a whole batch, or single tasks where a step
takes those that end first. The tickets of step n may begin as soon as step n - 1 - `ahead` was trained, so that `ahead`
= 0 is the synchronous loop and nothing else differs between the modes. All times and orders that are left to chance are
here: with whole batches there are none, and a run is the same every time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mrl.config.overlap import OverlapConfig
from mrl.data import TaskOrder
from mrl.errors import ConfigError
from mrl.store.read import DROPPED, UNUSED
from mrl.store.rows import jsonable
from mrl.types import Group, Rollout, Sample, Task

_STORED = ("step", "number", "indices", "epoch", "again", "version", "ended")
"""Of every ticket in a checkpoint."""

Stage = Literal["waiting", "generating", "generated", "done", "failed"]


@dataclass(eq=False)
class Ticket:
    """Tasks that are attempted together, and what came of it."""

    step: int
    """The step they were drawn for; seeds derive from it."""
    number: int
    """Its place among all tickets."""
    indices: list[int]
    """Of the tasks."""
    epoch: float
    again: int = 0
    """Above 0: drawn in the place of a group that was dropped, or once more for the same step; part of its seed."""
    groups: list[Group] = field(default_factory=list)
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """What reward functions logged, with the number of rollouts."""
    resamples: int = 0
    """Rounds of further tasks that were attempted in the place of groups that teach nothing."""
    seconds: dict[str, float] = field(default_factory=dict)
    stage: Stage = "waiting"
    ended: int = 0
    """Its place among those that are done, in the order in which they became it."""
    version: int = 0
    """The policy's when it was begun."""
    work: asyncio.Task[None] | None = None

    def oldest(self) -> int:
        """The earliest policy version that sampled one of its tokens."""
        return min((version for group in self.groups for version in versions(group)), default=self.version)


@dataclass
class Taken:
    """What a step gets."""

    tickets: list[Ticket]
    dropped: list[Group]
    """Since the last step: what was generated and no step trains on; its rollouts say why."""
    counts: dict[str, int]
    """Since the last step: groups that were `dropped` for their age, that were generated and `unused` because the step
    had enough, and that were `stopped` before that. The latter two are begun anew."""

    @property
    def groups(self) -> list[Group]:
        return [group for ticket in self.tickets for group in ticket.groups]

    @property
    def logged(self) -> list[tuple[int, dict[str, float]]]:
        return [part for ticket in self.tickets for part in ticket.logged]

    @property
    def seconds(self) -> dict[str, float]:
        """Of the ticket that took longest, by kind of work."""
        names = dict.fromkeys(name for ticket in self.tickets for name in ticket.seconds)
        return {name: max(ticket.seconds.get(name, 0.0) for ticket in self.tickets) for name in names}


class Stream:
    """Begins tickets ahead of time and hands out the groups of each step.

    produce: attempts a ticket's tasks and scores them; calls `generated` when nothing is being sampled for it any more.
    teaches: whether a group counts for a step (dynamic sampling replaces those that do not, at most `max_resamples`
    times `batch_size` of them in a step, where tasks are attempted one by one; otherwise `produce` does).
    """

    def __init__(
        self,
        order: TaskOrder,
        overlap: OverlapConfig,
        produce: Callable[[Ticket, Callable[[], None]], Awaitable[None]],
        *,
        total_steps: int,
        step: int = 0,
        teaches: Callable[[Group], bool] = lambda group: True,
        max_resamples: int = 0,
    ) -> None:
        self.order, self.overlap, self.produce = order, overlap, produce
        self.total_steps, self.teaches, self.max_resamples = total_steps, teaches, max_resamples
        self.surplus = math.ceil(order.batch_size * (overlap.over_sampling - 1))
        self.drawn = self.trained = step
        self.numbers = 0
        self.sizes: dict[int, int] = {}
        """Tasks drawn for each step to come."""
        self.tickets: list[Ticket] = []
        """Drawn and not handed out yet, in order."""
        self.taking: list[Ticket] = []
        """What the step that waits has so far."""
        self.dropped: list[Group] = []
        self.counts = _no_counts()
        self.draws_again = self.endings = 0
        self.news = asyncio.Event()

    # --- what the loop calls ----------------------------------------------------------------------------------------

    def advance(self, trained: int, version: int) -> None:
        """Step `trained` is behind us and the samplers serve `version`: begin what may begin now."""
        self.trained = trained
        self._give_up_stale(version)
        limit = min(trained + 1 + self.overlap.ahead, self.total_steps)
        self._draw_up_to(limit)
        early = sum(ticket.step > limit for ticket in self.tickets if ticket.stage != "waiting")
        if self.surplus:
            self._draw_up_to(limit + 1)
        for ticket in [ticket for ticket in self.tickets if ticket.stage == "waiting"]:
            if ticket.step > limit:
                if early >= self.surplus:
                    continue  # a task drawn again for an earlier step may come after it
                early += 1
            ticket.version, ticket.stage = version, "generating"
            ticket.work = asyncio.create_task(self._work(ticket))

    async def take(self, step: int, version: int) -> Taken:
        """The groups of a step that an actor of this version is about to train on, in the order they were drawn.

        Raises what `produce` raised. Cancelled, it takes nothing.
        """
        taken = self.taking = []
        try:
            return await self._take(step, version, taken)
        except asyncio.CancelledError:
            self.tickets = sorted([*self.tickets, *taken], key=lambda ticket: ticket.number)
            raise

    async def _take(self, step: int, version: int, taken: list[Ticket]) -> Taken:
        target, unhelpful = self.sizes[step] if self.overlap.by_group else 1, 0
        while True:
            self._raise_errors(step)
            self._give_up_stale(version)
            for ticket in self._done(step):
                if sum(map(self._counts, taken)) >= target:
                    break
                self.tickets.remove(ticket)
                taken.append(ticket)
                if not self._counts(ticket):
                    unhelpful += 1
                    if unhelpful <= self.max_resamples * self.sizes[step]:
                        self._draw_again(step)
                    else:
                        target -= 1
            if sum(map(self._counts, taken)) >= target:
                break
            self.advance(self.trained, version)
            assert any(ticket.stage != "waiting" for ticket in self.tickets), "a step waits for what nobody attempts"
            self.news.clear()
            await self.news.wait()
        self.sizes.pop(step, None)
        if self.overlap.async_mode == "off":  # nothing is generated while the actor trains
            self._stop_the_rest()
        result = Taken(sorted(taken, key=lambda ticket: ticket.number), self.dropped, self.counts)
        self.dropped, self.counts = [], _no_counts()
        return result

    async def quiet(self) -> None:
        """Return when nothing is being sampled, so that the weights can change between completions. Never raises: what
        has failed is raised when its step comes.

        With a surplus, what is not needed for the next step is stopped as soon as the rest has ended.
        """
        needed = self.sizes.get(self.trained + 2, 0) if self.surplus else None
        while any(ticket.stage == "generating" for ticket in self.tickets):
            ended = sum(ticket.stage in ("generated", "done") for ticket in self.tickets)
            if needed is not None and ended >= needed:
                self._stop_the_rest()
                return
            self.news.clear()
            await self.news.wait()

    async def settle(self) -> None:
        """Wait for what is under way, where a checkpoint has to hold it so that a resumed run is the same run.

        What fails is raised when its step comes."""
        if not self.overlap.by_group:
            works = [ticket.work for ticket in self.tickets if ticket.work is not None]
            await asyncio.gather(*works, return_exceptions=True)

    def in_flight(self) -> int:
        """Groups that were begun and that no step has taken."""
        return sum(len(ticket.indices) for ticket in self.tickets if ticket.stage != "waiting")

    def unused(self) -> list[Group]:
        """What was generated and not handed out."""
        return [group for ticket in self.tickets for group in ticket.groups] + self.dropped

    async def close(self) -> None:
        """Give up what is under way."""
        works = [ticket.work for ticket in self.tickets if ticket.work is not None]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data: every ticket that was drawn, with its groups where it is done. Others are begun anew."""
        return {
            "drawn": self.drawn,
            "numbers": self.numbers,
            "draws_again": self.draws_again,
            "sizes": {str(step): size for step, size in self.sizes.items()},
            "tickets": [
                {
                    **{name: getattr(t, name) for name in _STORED},
                    **(_outcome(t) if t.stage == "done" else {}),
                }
                for t in self.tickets
            ],
        }

    def load_state_dict(self, state: dict[str, Any], tasks: list[Task]) -> None:
        """Go on from `state_dict`. tasks: those that indices refer to. Raises ConfigError when options or tasks changed
        so that what is in flight cannot be gone on with."""
        self.drawn, self.numbers, self.draws_again = state["drawn"], state["numbers"], state["draws_again"]
        self.sizes = {int(step): size for step, size in state["sizes"].items()}
        by_id = {task.id: task for task in tasks}
        for stored in state["tickets"]:
            self._check_stored(stored, len(tasks), by_id)
            stored = dict(stored)
            groups = stored.pop("groups", None)
            stored["logged"] = [(count, metrics) for count, metrics in stored.get("logged", [])]
            ticket = Ticket(**stored)
            if groups is not None:
                ticket.stage = "done"
                ticket.groups = [
                    Group(by_id[group["task"]], list(map(_rollout, group["rollouts"]))) for group in groups
                ]
            self.tickets.append(ticket)
        self.endings = max((ticket.ended for ticket in self.tickets), default=0)

    # --- inner ------------------------------------------------------------------------------------------------------

    def _check_stored(self, stored: dict[str, Any], tasks: int, known: dict[str, Task]) -> None:
        of_step = self.sizes.get(stored["step"])
        if len(stored["indices"]) > 1 if self.overlap.by_group else len(stored["indices"]) != of_step:
            raise ConfigError(
                "cannot resume: the checkpoint holds groups in flight, which with these options (async_mode, "
                "max_staleness, over_sampling) are begun otherwise than they were; resume with the options as they were"
            )
        if max(stored["indices"]) >= tasks or any(group["task"] not in known for group in stored.get("groups", [])):
            raise ConfigError(
                "cannot resume: the checkpoint holds groups in flight of tasks that the dataset no longer has; restore "
                "it, or start a new run"
            )

    async def _work(self, ticket: Ticket) -> None:
        def generated() -> None:
            ticket.stage = "generated"
            self.news.set()

        try:
            await self.produce(ticket, generated)
            self.endings += 1
            ticket.stage, ticket.ended = "done", self.endings
        except Exception:
            ticket.stage = "failed"  # nobody waits for it any more; its step raises the error
            raise
        finally:
            self.news.set()

    def _raise_errors(self, step: int) -> None:
        """With whole batches, only those of `step`: what one before it has learned is not lost."""
        for ticket in self.tickets:
            if not self.overlap.by_group and ticket.step != step:
                continue
            if ticket.work is not None and ticket.work.done() and not ticket.work.cancelled():
                error = ticket.work.exception()
                if error is not None:
                    raise error

    def _done(self, step: int) -> list[Ticket]:
        """What a step may take, in the order in which it takes it: the oldest first, before they are too old."""
        if not self.overlap.by_group:
            return [ticket for ticket in self.tickets if ticket.stage == "done" and ticket.step == step]
        return sorted((t for t in self.tickets if t.stage == "done"), key=lambda t: (t.version, t.ended))

    def _counts(self, ticket: Ticket) -> bool:
        return not self.overlap.by_group or any(self.teaches(group) for group in ticket.groups)

    def _draw_up_to(self, step: int) -> None:
        while self.drawn < min(step, self.total_steps):
            self.drawn += 1
            epoch = self.order.epoch + self.order.position / self.order.num_tasks
            indices = self.order.next_batch()
            self.sizes[self.drawn] = len(indices)
            if not self.overlap.by_group:
                self._add(Ticket(self.drawn, 0, indices, epoch))
                continue
            for place, index in enumerate(indices):
                # In a dataset smaller than a batch a task comes twice: a ticket of its own, with a seed of its own.
                repeated = index in indices[:place]
                self.draws_again += repeated
                self._add(Ticket(self.drawn, 0, [index], epoch, again=self.draws_again if repeated else 0))

    def _draw_again(self, step: int) -> None:
        """One more task for a step."""
        self.draws_again += 1
        epoch = self.order.epoch + self.order.position / self.order.num_tasks
        has = {index for ticket in self.tickets if ticket.step == step for index in ticket.indices}
        self._add(Ticket(step, 0, self.order.next_batch(1, avoid=has), epoch, again=self.draws_again))

    def _add(self, ticket: Ticket) -> None:
        self.numbers += 1
        ticket.number = self.numbers
        self.tickets.append(ticket)

    def _give_up_stale(self, version: int) -> None:
        """What no step to come may train on is begun anew, or with `queue` dropped for another task: it would only take
        too long again."""
        if not self.overlap.by_group or self.overlap.stale_rollouts == "correct":
            return
        for ticket in [t for t in self.tickets if t.stage not in ("waiting", "failed")]:
            behind = version - (ticket.oldest() if ticket.stage == "done" else ticket.version)
            if behind <= self.overlap.ahead:
                continue
            if self.overlap.async_mode != "queue":
                self._begin_anew(ticket)
                continue
            self.tickets.remove(ticket)
            if ticket.work is not None:
                ticket.work.cancel()
            self.counts["dropped"] += 1
            bound = f"max_staleness: {self.overlap.ahead}"
            self._leave_out(ticket, f"{DROPPED}sampled by weights {behind} versions old ({bound})")
            self._draw_again(ticket.step)

    def _stop_the_rest(self) -> None:
        for ticket in [ticket for ticket in self.tickets if ticket.stage == "generating"]:
            self._begin_anew(ticket)

    def _begin_anew(self, ticket: Ticket) -> None:
        """Give up what is under way, or has ended too late; the same tasks wait again."""
        if ticket.work is not None:
            ticket.work.cancel()
        again = Ticket(ticket.step, ticket.number, ticket.indices, ticket.epoch, ticket.again)
        self.tickets[self.tickets.index(ticket)] = again
        self.counts["unused" if ticket.groups else "stopped"] += len(ticket.indices)
        self._leave_out(ticket, f"{UNUSED}it ended when its step had enough groups (over_sampling) and is begun anew")

    def _leave_out(self, ticket: Ticket, why: str) -> None:
        """Keep what was generated for the record; no step trains on it."""
        for rollout in (rollout for group in ticket.groups for rollout in group.rollouts):
            rollout.fail(why)
        self.dropped += ticket.groups


def versions(group: Group) -> list[int]:
    """Of the policy that sampled each token (or, where it did not change, each sample)."""
    found: list[int] = []
    for sample in (sample for rollout in group.rollouts for sample in rollout.samples):
        found += [sample.policy_version] if isinstance(sample.policy_version, int) else sample.policy_version
    return found


def staleness(groups: list[Group], version: int) -> dict[str, float]:
    """Versions between what sampled the tokens and the actor that trains on them: mean over tokens, and the most."""
    behind: list[tuple[int, int]] = []
    for sample in (s for group in groups for rollout in group.rollouts for s in rollout.samples):
        if isinstance(sample.policy_version, int):
            behind.append((version - sample.policy_version, len(sample.completion_ids)))
        else:
            behind += [(version - v, 1) for v in sample.policy_version]
    tokens = sum(count for _, count in behind)
    if not tokens:
        return {}
    return {
        "rollout/staleness_mean": sum(lag * count for lag, count in behind) / tokens,
        "rollout/staleness_max": float(max(lag for lag, _ in behind)),
    }


def _no_counts() -> dict[str, int]:
    return {"dropped": 0, "unused": 0, "stopped": 0}


def _outcome(ticket: Ticket) -> dict[str, Any]:
    return {
        "logged": ticket.logged,
        "resamples": ticket.resamples,
        "seconds": ticket.seconds,
        "groups": [{"task": g.task.id, "rollouts": [jsonable(asdict(r)) for r in g.rollouts]} for g in ticket.groups],
    }


def _rollout(stored: dict[str, Any]) -> Rollout:
    return Rollout(**(stored | {"samples": [Sample(**sample) for sample in stored["samples"]]}))
