"""A run is a folder.

    runs/NAME/
      config.yaml          every option, resolved
      versions.json        libraries and machine
      metrics.jsonl        one line per step
      rollouts.jsonl       one line per rollout: messages, token ids, logprobs, rewards, error, timings
      events.jsonl         notices, warnings, checkpoints
      checkpoints/step-N   a Hugging Face model folder each
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import yaml

from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError
from mrl.types import Group


class RunStore:
    """Writes one run's folder. One writer per run; readers may open the files at any time."""

    def __init__(self, folder: Path, config: OrchestratorConfig) -> None:
        """Create the folder. Raises ConfigError when it already holds a run or cannot be written."""
        if (folder / "config.yaml").exists():
            raise ConfigError(f"run_dir: {folder} already holds a run; choose another name or delete it")
        try:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))
            (folder / "versions.json").write_text(json.dumps(_versions(), indent=2))
        except OSError as error:
            raise ConfigError(f"run_dir: {folder} cannot be written ({error.strerror}); choose another") from None
        self.folder = folder
        self._files: dict[str, TextIO] = {}

    def write_step(self, step: int, metrics: dict[str, float], groups: Iterable[Group]) -> None:
        """Append a step's metrics and every rollout behind them."""
        for group in groups:
            for rollout in group.rollouts:
                self._append("rollouts", {"step": step, **asdict(rollout)})
        self._append("metrics", {"step": step, "time": time.time(), **metrics})

    def write_eval(self, step: int, metrics: dict[str, float], groups: Iterable[Group]) -> None:
        """Append a held-out evaluation's metrics and rollouts."""
        for group in groups:
            for rollout in group.rollouts:
                self._append("eval_rollouts", {"step": step, **asdict(rollout)})
        self._append("eval_metrics", {"step": step, "time": time.time(), **metrics})

    def event(self, kind: str, message: str, **details: Any) -> None:
        """Append something a person may want to know later."""
        self._append("events", {"time": time.time(), "kind": kind, "message": message, **details})

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of `step` goes."""
        return self.folder / "checkpoints" / f"step-{step}"

    def close(self) -> None:
        """Flush and close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, name: str, row: dict[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = (self.folder / f"{name}.jsonl").open("a", encoding="utf-8")
        file = self._files[name]
        file.write(json.dumps(_jsonable(row), ensure_ascii=False) + "\n")
        file.flush()


def runs_root() -> Path:
    """The folder runs go to when none is named: $MRL_RUNS or ./runs."""
    return Path(os.environ.get("MRL_RUNS", "runs"))


def find_run(name: str) -> Path | None:
    """The folder of the run called `name`, or at that path; None when there is none."""
    for folder in (Path(name).expanduser(), runs_root() / name):
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            return folder
    return None


def newest_checkpoint(run: Path) -> Path | None:
    """The checkpoint of the latest step, or None."""
    found = [
        (int(path.name.removeprefix("step-")), path)
        for path in (run / "checkpoints").glob("step-*")
        if path.name.removeprefix("step-").isdigit()
    ]
    return max(found)[1] if found else None


def read_rows(run: Path, name: str) -> Iterator[dict[str, Any]]:
    """Rows of one of the run's files, e.g. `metrics`; nothing when it was never written."""
    path = run / f"{name}.jsonl"
    if path.exists():
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)


def write_rollouts(path: str | Path, groups: Iterable[Group]) -> None:
    """Write every rollout as a JSON line. Raises ConfigError when the file cannot be written."""
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            for group in groups:
                for rollout in group.rollouts:
                    file.write(json.dumps(_jsonable(asdict(rollout)), ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(f"output: {path} cannot be written ({error.strerror}); choose another file") from None


def _jsonable(value: Any) -> Any:
    """Plain JSON: what is not finite becomes its name, so that it is seen and not hidden."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(inner) for inner in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def _versions() -> dict[str, Any]:
    libraries = {}
    for name in ("mrl", "torch", "transformers", "peft", "datasets", "tokenizers", "numpy"):
        try:
            libraries[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            libraries[name] = None
    return {"python": platform.python_version(), "machine": platform.platform(), "cpus": os.cpu_count(), **libraries}
