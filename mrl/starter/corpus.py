"""Demonstrations by a careless programmer: what the supervised phase imitates.

Each family has a probability `care` that a demonstration is right. Otherwise it holds one plausible mistake, most often
the family's habit. A policy that imitates this knows how to write every kind of program but often writes the wrong one,
so reinforcement learning has something to find: where a habit is more frequent than the right program, even the
policy's best guess is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from mrl.starter.behaviour import PROBES, outputs, signature
from mrl.starter.families import FAMILIES, Draft
from mrl.starter.generate import TaskSet, kind_of, tidy
from mrl.starter.mistakes import mistakes

HABIT = 0.7
"""Of the demonstrations with a mistake, those that have the family's habit."""


@dataclass(frozen=True)
class Lesson:
    """One function to write, its right program and its mistaken ones by kind."""

    family: str
    prompt: str
    right: str
    wrong: dict[str, list[str]]

    def demonstrate(self, rng: random.Random) -> str:
        """A program for this prompt, right or wrong as its family's care and habit say."""
        family = FAMILIES[self.family]
        if not self.wrong or rng.random() < family.care:
            return self.right
        if family.habit in self.wrong and rng.random() < HABIT:
            return rng.choice(self.wrong[family.habit])
        return rng.choice(self.wrong[rng.choice(sorted(self.wrong))])


def lessons(count: int, tasks: TaskSet, seed: int) -> Iterator[Lesson]:
    """Functions of all families, some of them training tasks; none of the programs behaves like a held-out task.

    Mistaken programs are checked as well. Sequences of steps reserved for the held-out split do not occur.
    """
    heldout = _Heldout(tasks)
    rng = random.Random(f"{seed}/lessons")
    names = list(FAMILIES)
    shares = [FAMILIES[name].share for name in names]
    made = 0
    while made < count:
        name = rng.choices(names, shares)[0]
        draft = FAMILIES[name].draw(rng)
        if (name, draft.shape) in tasks.reserved_shapes or heldout.contains(draft.program, draft.kind):
            continue
        made += 1
        yield Lesson(name, draft.prompt, tidy(draft.program), _allowed_mistakes(draft, heldout))


def answer(program: str) -> str:
    """The assistant's turn that holds `program`."""
    return f"```python\n{program}```"


def _allowed_mistakes(draft: Draft, heldout: _Heldout) -> dict[str, list[str]]:
    found = {
        kind: [text for text in texts if not heldout.contains(text, draft.kind)]
        for kind, texts in mistakes(tidy(draft.program)).items()
    }
    return {kind: texts for kind, texts in found.items() if texts}


class _Heldout:
    """Membership by behaviour; a few probes decide most cases, the full grid the rest."""

    def __init__(self, tasks: TaskSet) -> None:
        self.full = tasks.heldout_signatures()
        self.glance = {self._glance(task.solution, kind_of(task)) for task in tasks.heldout}

    def contains(self, program: str, kind: str) -> bool:
        return self._glance(program, kind) in self.glance and signature(program, kind) in self.full

    @staticmethod
    def _glance(program: str, kind: str) -> tuple[str, ...]:
        return tuple(outputs(program, PROBES[kind][::17]))
