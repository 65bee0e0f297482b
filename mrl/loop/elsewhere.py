"""Runs whose loop is not in this process: which backends take it, and what stands for such a run here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from mrl.config import OrchestratorConfig
from mrl.loop.recorded_run import RecordedRun, RunResult
from mrl.loop.spawning import backend_of
from mrl.registry import Registry

MakeRun = Callable[[OrchestratorConfig, Path, bool], RecordedRun]
"""Makes a run: of a configuration, in a folder, new or to be resumed."""


class RunElsewhere(Protocol):
    """What a caller does with a run: RecordedRun's methods of these names.

    make_run: makes the run there; a function of a module, or one that can be pickled.
    """

    run_dir: Path
    wording: Callable[[str], str]

    def __init__(self, config: OrchestratorConfig, run_dir: Path, *, resume: bool, make_run: MakeRun) -> None: ...

    async def run(self) -> RunResult: ...

    def request_stop(self, number: int) -> None: ...

    def end_at_once(self, number: int) -> NoReturn: ...


LOOPS: Registry[type[RunElsewhere]] = Registry("loops", "backend", {"modal": "mrl.loop.on_modal:RunOnModal"})
"""By backend, of those whose `takes_loop` may say yes."""


def elsewhere(config: OrchestratorConfig) -> type[RunElsewhere] | None:
    """What stands for the run here; None where its loop is in this process. Raises ConfigError."""
    if not backend_of(config).takes_loop(config.reward.reward_funcs):
        return None
    return LOOPS.get(config.runtime.backend)
