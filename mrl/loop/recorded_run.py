"""What every run has, whoever trains: its record, its trackers, stopping, resuming, and an end in good order."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, NoReturn, TypeVar

from mrl.config import OrchestratorConfig
from mrl.errors import StoreError, WorkerDied
from mrl.loop.cost import EVENT as COST
from mrl.loop.cost import Cost, check_cost, cost_before
from mrl.loop.progress import RunProgress
from mrl.loop.report import first_and_last_reward, shown_completion
from mrl.loop.resume import (
    ResumePoint,
    check_same_run,
    check_same_tasks,
    find_resume_point,
    random_state,
    record_options,
    resume_command,
    resume_hint,
    set_random_state,
)
from mrl.loop.reward_trial import try_rewards
from mrl.loop.run_watch import RunWatch, find_troubles
from mrl.loop.spawning import backend_of
from mrl.models import pin_model
from mrl.store.checkpoints import remove_leftovers
from mrl.store.find import shortest_name
from mrl.store.run import RunStore, read_rows
from mrl.system.environment import differences
from mrl.system.interrupts import Stopped, end_process
from mrl.system.shell import command
from mrl.system.units import duration, plural
from mrl.tracking import RunInfo, TrackerSet
from mrl.tracking.base import WARNING
from mrl.types import Group, Outcome, Task

T = TypeVar("T")

GIVING_UP_SECONDS = 5.0
"""How long what is given up may take to end; then it is left behind."""


@dataclass(repr=False)
class RunResult:
    """The result of a run."""

    run_dir: Path
    status: Outcome
    steps: int
    checkpoint: Path | None
    metrics: dict[str, float]
    """Of the last step."""
    eval_metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation on held-out tasks."""
    seconds: float = 0.0
    signal: int | None = None
    """What asked it to stop, e.g. 2 (SIGINT, which is Ctrl-C) or 15 (SIGTERM)."""
    rewards: tuple[float, float] | None = None
    """Mean reward of the run's first step and of its last; None where there were no rewards."""
    warnings: list[str] = field(default_factory=list)
    """What went wrong without ending the run, with the sums over all its steps."""

    def __repr__(self) -> str:
        """A few lines for people: how it ended, what it learned, where it is, how to go on."""
        figures = []
        if self.rewards is not None:
            figures.append("reward {:.3f} → {:.3f}".format(*self.rewards))
        elif "train/loss" in self.metrics:
            figures.append(f"loss {self.metrics['train/loss']:.4f}")
        if "eval/pass_rate" in self.eval_metrics:
            figures.append(f"held-out pass rate {self.eval_metrics['eval/pass_rate']:.1%}")
        name = shortest_name(self.run_dir)
        following = command("mrl", "runs", "show", name)
        if self.checkpoint is not None:
            sample = command("mrl", "sample", name, "your prompt")
            following = sample if self.status == "finished" else resume_command(self.run_dir)
        lines = [
            f"{self.status} after {plural(self.steps, 'step')}, {duration(self.seconds)}",
            *([", ".join(figures)] if figures else []),
            *(f"warning: {warning}" for warning in self.warnings),
            f"in {self.run_dir}",
            f"next: {following}",
        ]
        return "RunResult: " + "\n  ".join(lines)


class RecordedRun(ABC):
    """Runs one configuration from beginning to end, or from its newest checkpoint on. How it trains is a subclass's.

    resume: `run_dir` holds a run of this configuration.
    """

    working_folder: ClassVar[str]
    """Folder in `run_dir` with what only a running process needs."""
    trains: ClassVar[str]
    """The name of the worker that trains."""
    prepared: Any
    """With at least `tasks`, `eval_tasks`, `counts` and `notices`."""
    total_steps: int

    def __init__(self, config: OrchestratorConfig, run_dir: Path, *, resume: bool = False) -> None:
        self.config, self.run_dir, self.resume = config, run_dir, resume
        self.point: ResumePoint | None = None
        self.stopping = False
        self.signal: int | None = None
        self.restarts = 0
        """Times that the worker that trains was replaced."""
        self._trained = False
        self._tracker_ids: dict[str, str] = {}
        self._reset()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested = asyncio.Event()
        self._stop_cancels = False
        self.wording: Callable[[str], str] = str
        """Rewords option names in what is shown, as flags or arguments. The record has them as in recipes."""

    def _reset(self) -> None:
        """Reset everything that training changes."""
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.eval_metrics: dict[str, float] = {}
        self.eval_step: int | None = None
        """Step after which they were measured."""
        self.watch = RunWatch(self.config, self.run_dir, self._warn)

    async def run(self) -> RunResult:
        """Prepare, train, clean up. Raises a subclass of MRLError; what was done until then stays in the run."""
        start = perf_counter()
        self._event_loop = asyncio.get_running_loop()
        if self.signal is not None:  # before there was a loop to tell
            self._stop()
        self.config.model.model = pin_model(self.config.model.model)
        check_cost(self.config, self.run_dir, resume=self.resume)
        self.cost = Cost(self.config.runtime.max_cost, cost_before(self.run_dir) if self.resume else 0.0)
        self.trackers = TrackerSet(self.config.run.report_to, self._tracker_failed)
        self.progress = RunProgress(self.trackers)
        self.progress.stage("loading data")
        try:
            await self._unless_stopped(self._prepare())
        except Stopped:
            self.trackers.finish("interrupted")
            seconds = perf_counter() - start
            return RunResult(self.run_dir, "interrupted", 0, None, {}, seconds=seconds, signal=self.signal)
        self._random_before = random_state()
        self.progress.stage("loading", self.config.model.model)
        self.backend = backend_of(self.config)
        self.cost.count(self.backend)
        self.store = self._open_store()
        if self.cost.before:
            self._record_cost()  # the steps that knew of it may just have been forgotten
        self.progress.record(self.store, self.step)
        outcome: Outcome = "failed"
        warnings: list[str] = []
        try:
            try:
                await self._train_until_done()
                outcome, checkpoint = "finished" if self._complete() else "interrupted", self._newest_checkpoint()
            except Stopped:  # while it loaded: there is no newer checkpoint
                checkpoint = None if self.point is None else self.point.checkpoint.path
            if self.stopping and outcome != "finished":
                outcome = "interrupted"
            warnings = self._sum_up(outcome)
            if self.stopping and outcome != "finished":
                self._note(resume_hint(self.run_dir))
            self.store.finish(outcome)
        except BaseException as error:
            if self.stopping and isinstance(error, asyncio.CancelledError):  # asked twice
                outcome = "interrupted"
                self.store.finish(outcome)
                raise
            outcome = "failed"
            self.store.finish("failed", f"{type(error).__name__}: {error}")
            with contextlib.suppress(StoreError):  # which may be the very error
                self.store.event("error", f"{type(error).__name__}: {error}", step=self.step)
            raise
        finally:
            self.trackers.finish(outcome)
            await self.backend.close()
            self._clean_up()
            with contextlib.suppress(StoreError):
                self._record_cost()
            self.store.close()
        return RunResult(
            run_dir=self.run_dir,
            status=outcome,
            steps=self.step,
            checkpoint=checkpoint,
            metrics=self.metrics,
            eval_metrics=self.eval_metrics,
            seconds=perf_counter() - start,
            signal=self.signal,
            rewards=first_and_last_reward(self.run_dir),
            warnings=warnings,
        )

    # --- a dead worker ----------------------------------------------------------------------------------------------

    async def _train_until_done(self) -> None:
        """Train. When the worker that trains dies, go on from the last checkpoint with a new one, as a resumed run."""
        while True:
            try:
                return await self._train()
            except WorkerDied as error:
                # One that never trained would die again. One in this process cannot be ended, and so not be replaced.
                if error.worker != self.trains or not self._trained or self._trains_here() or self.stopping:
                    raise
                if self.restarts >= self.config.runtime.max_worker_restarts:
                    raise
                await self._start_over(error)

    async def _start_over(self, error: WorkerDied) -> None:
        """Go back to the last checkpoint, or to the beginning, with a new worker."""
        self.restarts += 1
        died_in, self.point = self.step, find_resume_point(self.run_dir)
        after = 0 if self.point is None else self.point.state["step"]
        message = f"step {died_in}: {error}. Going on after step {after} with a new worker"
        self.trackers.note(f"{WARNING}{self.wording(message)}")
        self._tracker_ids = self.trackers.run_ids()
        self.trackers.finish("interrupted")
        await self.backend.close()
        self._clean_up()
        self._reset()
        self._rewind_to_checkpoint(self.store)
        self.store.event("restart", message)  # of no step, so that no further restart forgets it
        if self.point is None:
            set_random_state(self._random_before)
        self.prepared.notices = []  # they were told
        self.resume = True
        self.backend = backend_of(self.config)
        self.cost.count(self.backend)
        self._record_cost()
        self.trackers = self.progress.trackers = TrackerSet(self.config.run.report_to, self._tracker_failed)
        self.progress.stage("loading", self.config.model.model)

    # --- being stopped ----------------------------------------------------------------------------------------------

    def request_stop(self, number: int) -> None:
        """Ask the run to write a checkpoint and end. From any thread, and from a signal handler. number: the
        signal's."""
        self.signal = number
        if self._event_loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._event_loop.call_soon_threadsafe(self._stop)

    def end_at_once(self, number: int) -> NoReturn:
        """End the process, from within a signal handler, saying what was kept."""
        end_process(number, f"stopped at once. {resume_hint(self.run_dir)}")

    # --- what a subclass does ---------------------------------------------------------------------------------------

    @abstractmethod
    async def _prepare(self) -> None:
        """Check everything that can be before the run's folder is touched; sets `prepared`."""

    @abstractmethod
    async def _train(self) -> None:
        """Start workers, `_announce`, train until `total_steps` or `stopping`."""

    @abstractmethod
    def _clean_up(self) -> None:
        """After the workers are gone, whatever happened."""

    @abstractmethod
    def _newest_checkpoint(self) -> Path | None:
        """After `_train` has returned."""

    def _complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self.step >= self.total_steps

    def _trains_here(self) -> bool:
        """Whether the worker that trains is in this process."""
        return self.backend.shares_memory

    # --- for its use ------------------------------------------------------------------------------------------------

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. Raises Stopped, and cancels it, when the run is asked to stop before it has ended.

        For work that a resumed run repeats: an error in it no longer matters then.
        """
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._stop_requested.wait())
        self._stop_cancels = True
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if self.stopping and not (task.done() and task.exception() is None):
                raise Stopped
            return await task
        finally:
            self._stop_cancels = False
            asked.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=GIVING_UP_SECONDS)
            if task.done() and not task.cancelled():
                task.exception()  # was seen

    def _announce(self, what: str, facts: dict[str, Any], *, shown: dict[str, Any], notices: list[str]) -> None:
        """Start the trackers and say how the run begins. facts: of the worker that trains. shown: for people."""
        self._trained = True
        shown = {
            "model": f"{self.config.model.model} ({facts['parameters'] / 1e6:.1f} M parameters)",
            "on": facts["device"],
            **shown,
            "held-out": self.prepared.counts.held_out,
        }
        self.trackers.start(
            RunInfo(
                self.run_dir.name,
                self.run_dir,
                self.total_steps,
                self.config.to_dict(),
                shown,
                step=self.step,
                resume_ids=(self.point.state["trackers"] if self.point else {}) | self._tracker_ids,
            )
        )
        changed = self._changed_environment(facts["environment"])
        counts = {"tasks": self.prepared.counts.tasks, "held_out": self.prepared.counts.held_out}
        self.store.event("start", what, **{"total_steps": self.total_steps, **counts, **facts})
        for notice in [*self.prepared.notices, *notices]:
            self._note(notice)
        if self.resume:
            for problem in self.point.problems if self.point else []:
                self._note(f"checkpoint not used: {problem}")
            self._note(f"going on after step {self.step} of {self.total_steps}")
            if changed and self.point is not None:
                self._note(f"from here on the last bits may be others than without the stop: {', '.join(changed)}")

    def _changed_environment(self, now: dict[str, Any]) -> list[str]:
        """What changed since this run was last started."""
        starts = [row for row in read_rows(self.run_dir, "events") if row["kind"] == "start"] if self.resume else []
        return differences(starts[-1].get("environment", {}), now) if starts else []

    def _note(self, message: str) -> None:
        self.store.event("notice", message, step=self.step)
        self.trackers.note(self.wording(message))

    def _warn(self, message: str) -> None:
        self.store.event("warning", message, step=self.step)
        self.trackers.note(f"{WARNING}{self.wording(message)}")

    def _show_completions(self, groups: list[Group]) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout in rollouts[: self.config.run.log_completions]:
            self.trackers.note(f"step {self.step}  {shown_completion(rollout)}")

    def _sum_up(self, outcome: Outcome) -> list[str]:
        """Say at the end what went wrong on the way. Returns it, without how the run ended."""
        self.store.flush()
        troubles = find_troubles(self.run_dir)
        if troubles:
            self._warn(f"{outcome}, but {'; '.join(troubles)}")
        return troubles

    async def _try_rewards(self, tasks: list[Task], steps: int, *, loop: bool = True) -> None:
        """Before a run's first start; see `try_rewards`."""
        if self.resume:
            return

        def tell(names: list[str]) -> None:
            self.progress.stage("trying", f"{' and '.join(names)} with made-up completions")

        self.prepared.notices += await try_rewards(self.config, tasks, steps, loop=loop, tell=tell)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def _open_store(self) -> RunStore:
        if not self.resume:
            return RunStore(self.run_dir, self.config)
        check_same_run(self.run_dir, self.config)
        self.point = find_resume_point(self.run_dir)
        if self.point is not None:
            check_same_tasks(self.point, self.prepared.tasks, self.config)
        store = RunStore.reopen(self.run_dir)
        try:
            record_options(self.run_dir, self.config)
            self._rewind_to_checkpoint(store)
            store.event("resume", f"going on after step {self.step}", step=self.step)
        except BaseException:
            store.close()  # lets another process have the run
            raise
        return store

    def _rewind_to_checkpoint(self, store: RunStore) -> None:
        """Forget what came after the checkpoint, or all of it where there is none."""
        self.step = 0 if self.point is None else self.point.state["step"]
        store.rewind(self.step if self.point is not None else -1)
        remove_leftovers(self.run_dir)
        shutil.rmtree(self.run_dir / self.working_folder, ignore_errors=True)

    def _record_cost(self) -> None:
        """In an event of no step, which no restart forgets."""
        dollars = self.cost.dollars()
        if dollars is not None:
            self.store.event(COST, f"{dollars:.2f} dollars so far", dollars=dollars)

    def _look_at_cost(self) -> None:
        """After a step: end in good order when it is enough."""
        if self.cost.reached() and not self.stopping:
            self.stopping = True
            self._stop_requested.set()
            self._note(
                f"max_cost: the run has cost {self.cost.dollars():.2f} dollars, of {self.cost.limit:g}; writing a "
                "checkpoint and ending. Raise max_cost to go on with it"
            )

    def _tracker_failed(self, message: str) -> None:
        self.store.event("tracker_failed", message, step=self.step)
        self.trackers.note(message)

    def _stop(self) -> None:
        if self.stopping:
            return
        self.stopping = True
        self._stop_requested.set()
        if hasattr(self, "store"):
            why = "interrupted" if self.signal in (None, signal.SIGINT) else signal.Signals(self.signal).name
            what = "giving up what is under way" if self._stop_cancels else "finishing this step"
            self._note(f"{why}: {what} and writing a checkpoint (Ctrl-C again to stop at once)")
