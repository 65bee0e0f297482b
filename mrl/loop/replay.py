"""Recompute a recorded step: the same rollouts, the checkpoint before it, and what differs from what was recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mrl.config import OrchestratorConfig, flat_fields
from mrl.errors import CheckpointError, ConfigError
from mrl.experience.batch import make_batch
from mrl.experience.reference import reference_samples, set_reference_logprobs
from mrl.loop.resume import is_description, stored_options
from mrl.store.checkpoints import list_checkpoints
from mrl.store.filters import Filter
from mrl.store.media import read_image
from mrl.store.read import RunReader
from mrl.store.rows import to_rollout
from mrl.store.run import read_rows
from mrl.system.environment import computing_environment, differences
from mrl.types import Group, Task

Verdict = Literal["equal", "rounding", "different"]

TOLERANCE = {"float32": 1e-3}
"""What rounding may do to a metric, as a share of it, by the precision of the forward pass and for one step from the
checkpoint; over more steps it grows with the square root of their number. Below `SMALL` it is a share of that."""
COARSE = 2e-2
"""The same in bfloat16 and others."""
TOKEN_TOLERANCE = {"float32": 1e-3}
"""What rounding may do to a maximum, in nats or to a ratio: one token decides it, and shows there when it is wrong."""
COARSE_TOKEN = 0.25
"""The same in bfloat16 and others."""
SMALL = 1e-2
EXACT = ("train/tokens", "train/updates_skipped", "train/learning_rate")
"""Metrics that rounding does not reach."""


@dataclass
class Difference:
    """One metric of the replayed step."""

    name: str
    recorded: float
    replayed: float

    @property
    def difference(self) -> float:
        """Zero when they are the same, NaN and infinity included."""
        return 0.0 if repr(self.recorded) == repr(self.replayed) else self.replayed - self.recorded

    def is_rounding(self, tolerance: float, token_tolerance: float) -> bool:
        """Whether it is no more than `tolerance` of the metric; of a maximum, no more than `token_tolerance`."""
        if self.difference == 0.0:
            return True
        if self.name in EXACT:
            return math.isclose(self.recorded, self.replayed, rel_tol=1e-9)
        if self.name.endswith("_max"):
            return abs(self.difference) <= token_tolerance
        return abs(self.difference) <= tolerance * max(abs(self.recorded), abs(self.replayed), SMALL)


@dataclass
class Replay:
    """The result of replaying a step."""

    step: int
    checkpoint: int
    """The step of the checkpoint it began from; 0 = the untrained model."""
    metrics: list[Difference]
    gradient_norms: dict[str, float]
    """Of each parameter, before clipping, in the step's last update; largest first."""
    environment: dict[str, Any]
    """Of the replay: device, processor, threads and versions of libraries."""
    changed: list[str] | None
    """What differs from when the replayed steps were trained; None = the record does not say."""
    tolerance: float
    """Largest difference that counts as rounding, as a share of a metric."""
    token_tolerance: float
    """The same for maxima, which one token decides, in their own unit."""

    @property
    def verdict(self) -> Verdict:
        """`equal`: to the last bit. `rounding`: other last bits. `different`: the record, the weights or the code is
        not what it was."""
        if self.exact:
            return "equal"
        alike = all(metric.is_rounding(self.tolerance, self.token_tolerance) for metric in self.metrics)
        return "rounding" if alike else "different"

    @property
    def exact(self) -> bool:
        """Whether every metric is what was recorded, to the last bit."""
        return all(metric.difference == 0.0 for metric in self.metrics)


def replay(run: Path, step: int, device: str | None = None) -> Replay:
    """Train the steps from the checkpoint before `step` up to it again, from the recorded rollouts. Raises MRLError.

    Rewards are taken from the record, so neither the dataset nor the reward functions are needed. Each step is computed
    with as many threads as it was in the run.
    """
    recorded = {row["step"]: row for row in read_rows(run, "metrics")}
    if step not in recorded:
        have = f"1 to {max(recorded)}" if recorded else "none"
        raise ConfigError(f"step: {run} has no step {step} (recorded steps: {have})")
    from mrl.actor.worker import ActorWorker

    config = _config_for_replay(run, device)
    if config.trl.mode == "simple":
        raise ConfigError(f"{run}: was trained in simple mode, by TRL's loop, whose steps cannot be replayed")
    actor = ActorWorker(
        config.model.model_dump(), config.training.model_dump(), _total_steps(run), config.algorithm.model_dump()
    )
    environments = _environments(run, recorded)
    temperature = config.generation.temperature
    metrics: dict[str, float] = {}
    changed: dict[str, None] = {}
    with _threads_kept() as set_threads:
        set_threads(environments[min(recorded)].get("threads"))
        facts = actor.initialize()
        start = _begin_from_checkpoint(run, step, actor)
        for number in range(start + 1, step + 1):
            actor.updates.keep_gradient_norms = number == step
            set_threads(environments[number].get("threads"))
            environment = computing_environment(actor.device) | {"precision": facts["forward_dtype"]}
            changed |= dict.fromkeys(differences(environments[number], environment))
            groups = _groups(run, number)
            samples = reference_samples(groups, config)  # all at once, as the run did: the last bits depend on it
            set_reference_logprobs(samples, actor.reference_logprobs(samples, temperature))
            metrics = actor.train_step(make_batch(groups, config))
    shown = [Difference(name, recorded[step][name], value) for name, value in metrics.items() if name in recorded[step]]
    norms = dict(sorted(actor.updates.gradient_norms.items(), key=lambda item: -item[1]))
    actor.close()
    replayed = [environments[number] for number in range(start + 1, step + 1)]
    known = list(changed) if all(replayed) else None
    return Replay(step, start, shown, norms, environment, known, *_tolerances(facts["forward_dtype"], replayed))


def _tolerances(precision: str, replayed: list[dict[str, Any]]) -> tuple[float, float]:
    """For means and for maxima, by the coarsest precision in which the steps were computed, now or in the run.

    replayed: what each step was computed on there.
    """
    precisions = {precision, *(found["precision"] for found in replayed if "precision" in found)}
    further = math.sqrt(len(replayed))
    return (
        further * max(TOLERANCE.get(name, COARSE) for name in precisions),
        further * max(TOKEN_TOLERANCE.get(name, COARSE_TOKEN) for name in precisions),
    )


def _environments(run: Path, recorded: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What each step was trained in, as far as the record has it: the run may have been resumed in between."""
    starts = [row for row in read_rows(run, "events") if row["kind"] == "start"]
    found = {}
    for step, row in recorded.items():
        before = [start for start in starts if start["time"] <= row["time"]]
        found[step] = dict(before[-1].get("environment", {})) if before else {}
        if found[step] and "forward_dtype" in before[-1]:
            found[step]["precision"] = before[-1]["forward_dtype"]
    return found


@contextmanager
def _threads_kept() -> Iterator[Any]:
    """Gives a function that sets torch's number of threads (None = leaves it), and sets it back in the end."""
    import torch

    mine = torch.get_num_threads()

    def set_threads(count: int | None) -> None:
        if count is not None and count != torch.get_num_threads():
            torch.set_num_threads(count)

    try:
        yield set_threads
    finally:
        set_threads(mine)


def _config_for_replay(run: Path, device: str | None) -> OrchestratorConfig:
    # How the attempts were made does not matter any more, and tools of theirs may have been given in Python.
    fields = {name: section for name, (section, _) in flat_fields().items() if section != "rollout"}
    options = {name: value for name, value in stored_options(run).items() if name in fields}
    options = {name: value for name, value in options.items() if not is_description(value)}
    options |= {"resume": None, "allow_change": []} | ({} if device is None else {"device": device})
    return OrchestratorConfig.from_flat(**options)


def _begin_from_checkpoint(run: Path, step: int, actor: Any) -> int:
    for checkpoint in reversed(list_checkpoints(run)):
        if checkpoint.step < step:
            if problems := checkpoint.problems():
                raise CheckpointError(problems[0])
            actor.load_checkpoint(str(checkpoint.path))
            return checkpoint.step
    return 0


def _groups(run: Path, step: int) -> list[Group]:
    """The step's groups as they were scored, in their order."""
    groups: dict[int, Group] = {}  # one task may have several: dynamic sampling may draw it twice
    with RunReader(run) as reader:
        rows = list(reader.rollouts(Filter(step=step)))
    for row in rows:
        rollout = to_rollout(row, lambda sha256: read_image(run, sha256))
        task = Task(rollout.task_id, rollout.prompt)
        groups.setdefault(row["group"], Group(task, [])).rollouts.append(rollout)
    return list(groups.values())


def _total_steps(run: Path) -> int:
    starts = [row for row in read_rows(run, "events") if row["kind"] == "start"]
    if not starts:
        raise ConfigError(f"{run}: the record has no start, so the length of its schedule is not known")
    return int(starts[-1]["total_steps"])
