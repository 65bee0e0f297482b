"""The runs a page shows, and what its table says of each."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mrl.errors import MRLError
from mrl.store.evaluation import EVENT
from mrl.store.find import COST, REWARD, RunSummary, all_runs, summarize
from mrl.store.read import RunReader, Split
from mrl.store.run import CONFIG
from mrl.store.schema import DATABASE
from mrl.system.yaml_values import yaml_numbers


@dataclass
class RunRow:
    """One line of the table of runs."""

    name: str
    """What links call it: its folder's name, with a number where two have the same."""
    summary: RunSummary
    model: str = ""
    algorithm: str = ""
    simple: bool = False
    """Whether TRL's own loop trains (simple mode), which tells less."""
    total_steps: int | None = None
    best_reward: float | None = None
    best_step: int | None = None
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """Mean reward by step."""
    evaluations: int = 0
    measured: str | None = None
    """What an evaluation on its own was of: a test or a dataset. None for runs that train."""
    policy: str | None = None
    """Whom it measured."""
    dollars: float | None = None
    """What it has cost, where its backend knows prices."""

    @property
    def split(self) -> Split:
        """Which of its rollouts are shown where nobody says."""
        return "train" if self.measured is None else "eval"

    @property
    def seconds(self) -> float | None:
        """From its creation to its end, or to its last sign of life."""
        summary = self.summary
        if summary.created is None:
            return None
        beat = summary.progress["heartbeat"] if summary.progress else None
        end = summary.ended or (time.time() if summary.status == "running" else beat)
        return None if end is None else max(end - summary.created, 0.0)


class Catalog:
    """Finds runs. folders: these and no others, also such as do not exist yet; None = all below `root`."""

    def __init__(self, folders: list[Path] | None, root: Path) -> None:
        self.root = root
        self._folders = None if folders is None else [folder.resolve() for folder in folders]
        self._known: dict[Path, tuple[Any, RunRow]] = {}
        self._lock = threading.Lock()

    def runs(self) -> dict[str, Path]:
        """Folder by name, oldest first."""
        named: dict[str, Path] = {}
        for folder in all_runs(self.root) if self._folders is None else self._folders:
            name, count = folder.name, 1
            while name in named:
                count += 1
                name = f"{folder.name}~{count}"
            named[name] = folder
        return named

    def folder(self, name: str) -> Path | None:
        """Of the run called so; None when this page shows no such run."""
        return self.runs().get(name)

    def row(self, name: str, folder: Path) -> RunRow:
        """Never raises for what cannot be read: the summary says it. What has not changed is not read again."""
        state = _state(folder)
        with self._lock:
            known = self._known.get(folder)
        if known and known[0] == state and known[1].name == name and known[1].summary.status not in _MOVING:
            return known[1]
        made = _read_row(name, folder)
        with self._lock:
            self._known[folder] = (state, made)
        return made

    def rows(self) -> list[RunRow]:
        """Every run, newest first."""
        return [self.row(name, folder) for name, folder in reversed(self.runs().items())]


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""As safe as the other one and ten times as fast, which hundreds of runs are felt by."""
_MOVING = ("running", "unknown", "unreadable")


def options_of(folder: Path) -> dict[str, Any]:
    """A run's options as they were recorded, by section; {} where they cannot be read."""
    try:
        found = yaml.load((folder / CONFIG).read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return {name: yaml_numbers(value) for name, value in found.items()} if isinstance(found, dict) else {}


def flat_options_of(folder: Path) -> dict[str, Any]:
    """The same by their flat names."""
    flat: dict[str, Any] = {}
    for name, value in options_of(folder).items():
        flat.update(value if isinstance(value, dict) else {name: value})
    return flat


def algorithm_of(options: dict[str, Any]) -> str:
    """The loss, or in simple mode TRL's trainer."""
    if options.get("mode") == "simple":
        return f"{options.get('algorithm', 'simple')} (simple mode)"
    return str(options.get("loss_type") or options.get("algorithm") or "")


def _read_row(name: str, folder: Path) -> RunRow:
    if not (folder / DATABASE).exists():
        return RunRow(name, RunSummary(name, folder, "unreadable", error="nothing is recorded yet"))
    row = RunRow(name, summarize(folder))
    options = flat_options_of(folder)
    row.model, row.algorithm = str(options.get("model") or ""), algorithm_of(options)
    row.simple = options.get("mode") == "simple"
    row.total_steps = options.get("max_steps")
    if row.summary.status == "unreadable":
        return row
    try:
        with RunReader(folder) as reader:
            row.rewards = [(step, value) for step, value in reader.series(REWARD) if value == value]
            row.evaluations = len(reader.steps("eval"))
            starts, alone = reader.events("start"), reader.events(EVENT)
            costs = reader.series(COST)
    except MRLError as error:
        row.summary.status, row.summary.error = "unreadable", str(error)
        return row
    if starts and isinstance(total := starts[-1].get("total_steps"), int):
        row.total_steps = total
    if costs:
        row.dollars = costs[-1][1]
    if alone:
        row.measured, row.policy = str(alone[-1].get("of", "")), str(alone[-1].get("model", ""))
    if row.rewards:
        row.best_step, row.best_reward = max(row.rewards, key=lambda pair: pair[1])
    return row


def _state(folder: Path) -> Any:
    """Changes with every write."""
    states = []
    for name in (DATABASE, f"{DATABASE}-wal", "run.lock"):
        try:
            stat = (folder / name).stat()
            states.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            states.append((0, 0, 0))
    return tuple(states)
