"""Watches for what goes wrong without ending a run: rollouts without a score, completions that are cut, rewards
without a signal. Each cause is reported when it is first seen and whenever it has doubled; that attempts go on until
max_turns, once. The end has the sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mrl.config import OrchestratorConfig
from mrl.experience.failures import cause_key, group_causes, in_one_line
from mrl.experience.groups import PASS, has_signal, is_scored, reads_of
from mrl.store.filters import Filter
from mrl.store.find import shortest_name
from mrl.store.read import RunReader
from mrl.system.shell import command
from mrl.system.units import plural
from mrl.types import Group, Rollout, TrainBatch

ALIKE_STEPS = 5
"""Steps in a row in which no group's rewards differ before a warning: one or two are chance."""
TRUNCATED = 0.5
"""Share of a step's completions that are cut, from which on there is a warning."""
LAST_ROLLOUTS = 64
"""Of which the summary at the end looks what cut them."""
MOST_CAUSES = 8
"""Causes that are reported one by one: messages may hold text that is different every time."""


@dataclass
class _Tally:
    count: int = 0
    next: int = 1
    """The count at which it is reported again."""


class RunWatch:
    """The warnings of one run. warn: shows one to the user and records it."""

    def __init__(self, config: OrchestratorConfig, run: Path, warn: Callable[[str], None]) -> None:
        self.config, self.run, self.warn = config, run, warn
        self._tallies: dict[str, _Tally] = {}
        self._alike = 0
        """Steps up to now, in a row, in which no group's rewards differed."""
        self._reads = reads_of(config)

    def look(self, step: int, groups: list[Group]) -> None:
        """At a step's rollouts, with their rewards and, where they are known, advantages."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._failures(f"step {step}", "rollouts", rollouts)
        self._truncation(step, rollouts)
        if self.config.algorithm.zero_variance_groups == "keep":  # else `no_update` reports it
            self._zero_variance(step, groups)

    def look_at_evaluation(self, step: int, groups: list[Group]) -> None:
        """At the rollouts of an evaluation."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._failures(f"evaluation after step {step}", "held-out rollouts", rollouts)

    def no_update(self, step: int, groups: list[Group], batch: TrainBatch) -> None:
        """A step had nothing to train on."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if not any(map(is_scored, rollouts)):
            return  # `look` reports that, and why
        if not batch.num_sequences:
            constant = _constant([r.reward for r in rollouts if r.reward is not None])
            kind, why = "alike", "no group of rollouts differed in reward (see zero_variance_groups)"
            why += "" if constant is None else f": every reward was {constant:g}"
        else:
            kind, why = "too-long", "every completion was too long or cut (see max_completion_length)"
        if count := self._count(f"no update: {kind}", 1):
            so_far = f" ({count:,} steps so far)" if count > 1 else ""
            self.warn(f"step {step}: no update{so_far}, {why}")

    # --- inner ------------------------------------------------------------------------------------------------------

    def _failures(self, when: str, what: str, rollouts: list[Rollout]) -> None:
        failed = [rollout for rollout in rollouts if not is_scored(rollout)]
        for cause in group_causes((rollout.error, 1) for rollout in failed):
            key = f"{what}: {cause_key(cause.text)}"
            if key not in self._tallies and len(self._tallies) >= MOST_CAUSES:
                key = f"{what}: others"
            if count := self._count(key, cause.count):
                number = f"{cause.count:,} of {len(rollouts):,} {what} could not be scored and are left out"
                if cause.count == len(rollouts):
                    number = f"none of the {cause.count:,} {what} could be scored, so that nothing is learned"
                earlier = f" ({count:,} so far)" if count > cause.count else ""
                self.warn(f"{when}: {number}{earlier}: {cause.text}")

    def _truncation(self, step: int, rollouts: list[Rollout]) -> None:
        cut = [rollout for rollout in rollouts if rollout.truncated]
        if not cut or len(cut) < TRUNCATED * len(rollouts):
            return
        otherwise = sum(rollout.limit != "max_turns" for rollout in cut)
        usual = otherwise < TRUNCATED * len(rollouts)  # an environment without an end goes on until max_turns
        count = self._count("max_turns" if usual else "truncated", 1)
        if count == 1 or (count and not usual):
            limit = self.config.sampled_tokens
            reached = max(rollout.num_tokens for rollout in cut) >= limit
            where = f"after {limit:,} tokens (max_tokens)" if reached else "where the context ends (max_model_len)"
            if limits := Counter(rollout.limit for rollout in cut if rollout.limit):
                where = "at " + ", ".join(f"{name} ({count:,})" for name, count in limits.most_common())
            so_far = f"; {count:,} such steps so far" if count > 1 else ""
            self.warn(
                f"step {step}: {len(cut):,} of {len(rollouts):,} completions were cut {where} and scored "
                f"as they were{so_far}"
            )

    def _zero_variance(self, step: int, groups: list[Group]) -> None:
        scored = [rollout for group in groups for rollout in group.rollouts if is_scored(rollout)]
        if not scored:
            return
        constant = _constant([rollout.reward for rollout in scored if rollout.reward is not None])
        # An advantage that takes its baseline from the whole batch learns from groups that agree.
        learns = constant is None and any(rollout.advantage for rollout in scored)
        if learns or any(has_signal(group, self._reads) for group in groups):
            self._alike = 0
            self._tallies.pop("alike", None)
            return
        self._alike += 1
        tally = self._tallies.setdefault("alike", _Tally(next=ALIKE_STEPS))
        if self._alike >= tally.next:
            tally.next = 2 * self._alike
            self.warn(f"step {step}: {self._why_alike(constant)}")

    def _why_alike(self, constant: float | None) -> str:
        last = f"in the last {self._alike:,} steps"
        if constant is None:
            return (
                f"{last} all rewards of a group were equal, in every group: nothing is learned where they agree. Tasks "
                "that are solved now and then would help, and so may more num_generations"
            )
        if constant >= PASS:
            return f"every reward was {constant:g} {last}: there is nothing left to learn from these tasks"
        return (
            f"every reward was {constant:g} {last}: nothing can be learned from that. Look at what was scored: "
            f"{command('mrl', 'runs', 'rollouts', shortest_name(self.run))}"
        )

    def _count(self, key: str, amount: int) -> int:
        """Adds to a tally. Returns its count when it is due to be reported, else 0."""
        tally = self._tallies.setdefault(key, _Tally())
        tally.count += amount
        if tally.count < tally.next:
            return 0
        tally.next = 2 * tally.count
        return tally.count


def find_troubles(run: Path) -> list[str]:
    """What went wrong in a whole run, from its record: a clause each. Raises StoreError."""
    with RunReader(run) as reader:
        found = _failed(reader)
        cut, generated = reader.truncated()
        if cut and cut >= TRUNCATED * generated:
            found.append(f"{cut:,} of {generated:,} completions were cut at {_limits(reader)}")
        return found + _alike_steps(reader)


def _limits(reader: RunReader) -> str:
    """What cut the last ones, by name: those of all are nowhere but in the rollouts themselves."""
    last = islice(reader.rollouts(Filter("train"), newest_first=True), LAST_ROLLOUTS)
    names = Counter(row.get("limit") or "the token limit" for row in last if row["finish_reason"] == "length")
    return " or ".join(name for name, _ in names.most_common()) or "a limit"


def _failed(reader: RunReader) -> list[str]:
    found = []
    for split, what in (("train", "rollouts"), ("eval", "held-out rollouts")):
        errors, total = reader.failures(split)  # type: ignore[arg-type]
        if errors:
            causes = in_one_line(group_causes(errors.items()))
            found.append(f"{sum(errors.values()):,} of {total:,} {what} could not be scored: {causes}")
    return found


def _alike_steps(reader: RunReader) -> list[str]:
    agree = {step for step, share in reader.series("reward/zero_variance_groups") if share == 1.0}
    spread = dict(reader.series("reward/std"))
    with_advantage = reader.steps_with_advantage()
    alike = [row for row in reader.steps() if row["step"] in agree]
    alike = [row for row in alike if spread.get(row["step"]) == 0 or row["step"] not in with_advantage]
    if not alike or len(alike) < len(spread) / 2:
        return []
    constant = _constant([row[name] for row in alike for name in ("reward_min", "reward_max")])
    what = "no group's rewards differed" if constant is None else f"every reward was {constant:g}"
    steps = plural(len(spread), "step")
    return [f"{what} in {f'all {steps}' if len(alike) == len(spread) > 1 else f'{len(alike):,} of {steps}'}"]


def _constant(rewards: list[float]) -> float | None:
    """The reward, if all are the same."""
    return rewards[0] if rewards and min(rewards) == max(rewards) else None
