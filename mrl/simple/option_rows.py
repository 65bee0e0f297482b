"""What the table of options (mrl/simple/option_table.py) is made of: rows, and the run that their values come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mrl.simple.trainers import ALL, RL, TrainerSpec


@dataclass(frozen=True)
class ChosenOptions:
    """A run's options by their flat names, and what follows from several of them."""

    values: Mapping[str, Any]
    spec: TrainerSpec

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def updates(self) -> int:
        """Updates in a step of mrl's. To TRL each of the `num_iterations` is a step."""
        return int(self["num_iterations"]) if self.spec.name in RL else 1

    @property
    def rows(self) -> int:
        """Rows of the trainer's batch: rollouts where a step has groups of them, else prompts or examples."""
        return int(self["batch_size"] * (self["num_generations"] if self.spec.name in RL else 1))

    @property
    def micro_batch(self) -> int:
        """Rows of each of the equal parts that a batch is split into."""
        return self.rows // int(self["gradient_accumulation_steps"])

    @property
    def token_limit(self) -> int:
        """Tokens after which a completion is cut."""
        return int(min(self["max_tokens"] or self["max_completion_length"], self["max_completion_length"]))

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens are never sampled."""
        return bool(self["top_p"] < 1 or self["top_k"] or self["min_p"])


@dataclass(frozen=True)
class TrainerFacts:
    """What a trainer's configuration needs besides the options."""

    output_dir: str
    bf16: bool
    use_cpu: bool
    context: int
    """Tokens that prompt and completion may have together."""
    evaluates: bool


@dataclass(frozen=True)
class TrainerRun(ChosenOptions):
    """What values for TRL are computed from."""

    facts: TrainerFacts


Value = Callable[[TrainerRun], Any] | None
"""What one of TRL's options is set to."""
left_alone: Value = None
"""TRL's default stands, and `trl_args` must not change it: mrl sees to the matter itself."""


@dataclass(frozen=True)
class Meaning:
    """What an option of mrl means to TRL's trainers: a row of the table."""

    trainers: frozenset[str]
    """Those it means something to."""
    trl: Mapping[str, Value] = field(default_factory=dict)
    """TRL's options that it stands for; none where mrl itself acts on it."""
    also: tuple[Any, ...] = ()
    """Values besides the default that say what the trainer does anyway."""
    advice: str = ""
    """What to do instead, for trainers it means nothing to."""

    def written(self, run: TrainerRun) -> dict[str, Any]:
        """TRL's options and their values."""
        return {name: value(run) for name, value in self.trl.items() if value is not None}


Meanings = dict[str, Meaning]
"""Rows of the table by the option's name."""


def by_mrl(names: str, trainers: frozenset[str] = ALL, *, advice: str = "") -> Meanings:
    """mrl itself acts on these, as in orchestrated mode. TRL is told nothing."""
    return {name: Meaning(trainers, advice=advice) for name in names.split()}


def same(names: str, trainers: frozenset[str] = ALL, *, advice: str = "") -> Meanings:
    """TRL has these, under the same names and with the same meaning."""
    return {name: Meaning(trainers, {name: _value_of(name)}, advice=advice) for name in names.split()}


def becomes(name: str, trainers: frozenset[str] = ALL, *, advice: str = "", **trl: Value) -> Meanings:
    """What TRL says in other words. trl: its options, and what each is set to."""
    return {name: Meaning(trainers, trl, advice=advice)}


def nothing(names: str | Iterable[str], advice: str, *, also: tuple[Any, ...] = ()) -> Meanings:
    """No trainer of TRL's has these: they keep their defaults."""
    return {
        name: Meaning(frozenset(), also=also, advice=advice)
        for name in (names.split() if isinstance(names, str) else names)
    }


def _value_of(name: str) -> Value:
    return lambda run: run[name]
