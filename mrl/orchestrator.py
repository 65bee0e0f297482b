"""The loop, and the only place that knows everyone.

    tasks -> rollouts -> rewards -> groups -> advantages -> actor step -> weight sync -> next tasks

One direction, no way back except the weights. Every rollout is written down before it is forgotten.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from mrl.backends import BACKENDS, Resources, WorkerHandle
from mrl.config import OrchestratorConfig
from mrl.data import TaskOrder
from mrl.errors import ConfigError
from mrl.experience import check_failures, make_batch, rollout_metrics
from mrl.preflight import check_disk, prepare, reward_worker_args, total_steps
from mrl.rewards.scoring import TrainerState, score_groups
from mrl.rollouts.single_turn import SingleTurn
from mrl.store.run import RunStore
from mrl.sync import SYNC_METHODS
from mrl.tracking import TRACKERS, RunInfo, Tracker
from mrl.types import Group, SamplingParams, derive_seed
from mrl.workers.pool import PolicyClient

INTERRUPTED_TWICE = 130


@dataclass
class RunResult:
    """What a run came to."""

    run_dir: Path
    status: Literal["finished", "interrupted"]
    steps: int
    checkpoint: Path | None
    metrics: dict[str, float]
    """Of the last step."""
    eval_metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation on held-out tasks."""
    seconds: float = 0.0


class Orchestrator:
    """Runs one configuration from beginning to end."""

    def __init__(self, config: OrchestratorConfig, run_dir: Path) -> None:
        self.config = config
        self.run_dir = run_dir
        self.stopping = False
        self.version = 0
        self.step = 0
        self.checkpointed = 0
        self.seconds: dict[str, float] = {}
        self.eval_metrics: dict[str, float] = {}

    async def run(self) -> RunResult:
        """Prepare, train, clean up. Raises a subclass of MRLError; what was done until then stays in the run."""
        start = perf_counter()
        self.prepared = await asyncio.to_thread(prepare, self.config)
        self.total_steps = total_steps(self.config, len(self.prepared.tasks))
        self.store = RunStore(self.run_dir, self.config)
        self.trackers: list[Tracker] = [TRACKERS.get(name)() for name in self.config.run.report_to]
        self.backend = BACKENDS.get(self.config.runtime.backend)(self.config.runtime.call_timeout)
        self.sync = SYNC_METHODS.get(self.config.runtime.weight_sync_method)(self.run_dir / "weights")
        try:
            with self._interrupts():
                facts = await self._start_workers()
                self._announce(facts)
                metrics = await self._loop()
        except BaseException as error:
            self.store.event("error", f"{type(error).__name__}: {error}", step=self.step)
            raise
        finally:
            for tracker in self.trackers:
                tracker.finish()
            await self.backend.close()
            self.sync.close()
            self.store.close()
        return RunResult(
            run_dir=self.run_dir,
            status="finished" if self.step == self.total_steps else "interrupted",
            steps=self.step,
            checkpoint=self.store.checkpoint_path(self.checkpointed) if self.checkpointed else None,
            metrics=metrics,
            eval_metrics=self.eval_metrics,
            seconds=perf_counter() - start,
        )

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def _loop(self) -> dict[str, float]:
        training = self.config.training
        order = TaskOrder(
            len(self.prepared.tasks), training.batch_size, seed=training.seed, shuffle=self.config.data.shuffle
        )
        metrics: dict[str, float] = {}
        if self._evaluates():
            await self._evaluate()
        while self.step < self.total_steps and not self.stopping:
            self.step += 1
            epoch = order.epoch + order.position / len(self.prepared.tasks)
            metrics = await self._one_step(order.next_batch(), epoch)
            last = self.step == self.total_steps or self.stopping
            if self._evaluates() and (last or (training.eval_steps and self.step % training.eval_steps == 0)):
                await self._evaluate()
            if last or (training.save_steps and self.step % training.save_steps == 0):
                await self._checkpoint()
        return metrics

    async def _one_step(self, indices: list[int], epoch: float) -> dict[str, float]:
        start = perf_counter()
        self.seconds = {}
        training = self.config.training
        with self._timed("generate"):
            groups = await self.source.collect(
                [self.prepared.tasks[i] for i in indices],
                self.policy,
                training.num_generations,
                seed=derive_seed(training.seed, "rollout", self.step),
            )
        metrics: dict[str, float] = {"rollout/epoch": epoch}
        try:
            with self._timed("reward"):
                metrics |= await score_groups(self.rewards, groups, self._trainer_state(epoch))
            metrics |= rollout_metrics(groups, self.config)
            check_failures(groups, self.config, self.step)
            metrics |= await self._train(groups)
        finally:  # what was generated is written down, whatever came after
            tokens = sum(rollout.num_tokens for group in groups for rollout in group.rollouts)
            self.seconds["step"] = perf_counter() - start
            metrics |= {f"time/{name}": seconds for name, seconds in self.seconds.items()}
            metrics |= {"rollout/tokens": float(tokens), "rollout/tokens_per_second": tokens / self.seconds["step"]}
            self.store.write_step(self.step, metrics, groups)
        for tracker in self.trackers:
            tracker.log(self.step, metrics)
        self._show_completions(groups)
        return metrics

    async def _train(self, groups: list[Group]) -> dict[str, float]:
        batch = make_batch(groups, self.config)
        if not batch.num_tokens:
            self._note(f"step {self.step}: no update, every completion was too long or cut (see max_completion_length)")
        with self._timed("train"):
            metrics = await self.actor.call("train_step", batch)
        if metrics["train/updates_skipped"]:
            skipped = metrics["train/updates_skipped"]
            self._note(f"step {self.step}: {skipped:.0f} update(s) skipped, loss or gradient not finite")
        if self.step % self.config.runtime.sync_weights_every == 0:
            with self._timed("sync"):
                self.version += 1
                await self.sync.sync(self.actor, self.workers, self.version)
        return metrics | {"sync/policy_version": float(self.version)}

    async def _evaluate(self) -> None:
        """Attempt the held-out tasks once each, with the same seeds every time."""
        start = perf_counter()
        groups = await self.source.collect(
            self.prepared.eval_tasks, self.policy, 1, seed=derive_seed(self.config.training.seed, "eval")
        )
        await score_groups(self.rewards, groups, self._trainer_state(None))
        metrics = rollout_metrics(groups, self.config, prefix="eval")
        self.eval_metrics = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        self.eval_metrics["time/eval"] = perf_counter() - start
        self.store.write_eval(self.step, self.eval_metrics, groups)
        for tracker in self.trackers:
            tracker.log(self.step, self.eval_metrics)

    async def _checkpoint(self) -> None:
        path = self.store.checkpoint_path(self.step)
        await self.actor.call("save_checkpoint", str(path))
        self.checkpointed = self.step
        self.store.event("checkpoint", str(path), step=self.step)

    # --- starting ---------------------------------------------------------------------------------------------------

    async def _start_workers(self) -> dict[str, Any]:
        config, prepared = self.config, self.prepared
        from mrl.workers.actor import ActorWorker
        from mrl.workers.reward import RewardWorker
        from mrl.workers.rollout import RolloutWorker

        if config.runtime.weight_sync_method == "direct" and not self.backend.shares_memory:
            raise ConfigError(
                f"weight_sync_method: direct does not work with backend {config.runtime.backend}; use reload"
            )
        model = config.model.model_dump() | {"max_model_len": prepared.max_model_len}
        self.actor: WorkerHandle = await self.backend.spawn(
            ActorWorker,
            name="actor",
            resources=Resources(gpu=config.runtime.actor_gpu),
            args={"model": model, "training": config.training.model_dump(), "total_steps": self.total_steps},
        )
        self.workers: list[WorkerHandle] = [
            await self.backend.spawn(
                RolloutWorker,
                name=f"rollout-{index}",
                resources=Resources(gpu=config.runtime.rollout_gpu),
                args={"engine": config.runtime.engine, "model": model},
            )
            for index in range(config.runtime.num_rollout_workers)
        ]
        self.rewards: WorkerHandle = await self.backend.spawn(
            RewardWorker,
            name="reward",
            resources=Resources(),
            args=reward_worker_args(config.reward),
        )
        self.policy = PolicyClient(self.workers)
        self.source = SingleTurn(prepared.tokenizer, prepared.encoder, sampling_params(config))
        facts = await self.actor.call("initialize")
        check_disk(self.run_dir, facts["trainable_parameters"], copies=2)
        await self.sync.sync(self.actor, self.workers, self.version)
        return facts

    def _announce(self, facts: dict[str, Any]) -> None:
        shown = {
            "model": f"{self.config.model.model} ({facts['parameters'] / 1e6:.1f} M parameters)",
            "on": facts["device"],
            "tasks": len(self.prepared.tasks),
            "held-out": len(self.prepared.eval_tasks),
        }
        info = RunInfo(self.run_dir.name, self.run_dir, self.total_steps, self.config.to_dict(), shown)
        for tracker in self.trackers:
            tracker.start(info)
        self.store.event("start", "workers are up", **facts)
        for notice in self.prepared.notices:
            self._note(notice)

    # --- small things -----------------------------------------------------------------------------------------------

    def _trainer_state(self, epoch: float | None) -> TrainerState:
        return TrainerState(global_step=self.step, max_steps=self.total_steps, epoch=epoch)

    def _evaluates(self) -> bool:
        return bool(self.prepared.eval_tasks)

    def _note(self, message: str) -> None:
        self.store.event("notice", message, step=self.step)
        for tracker in self.trackers:
            tracker.note(message)

    def _show_completions(self, groups: list[Group]) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout in rollouts[: self.config.run.log_completions]:
            text = rollout.messages[-1]["content"] if rollout.messages else ""
            for tracker in self.trackers:
                tracker.note(f"[{rollout.task_id}] reward {rollout.reward}\n{text}")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Ctrl-C ends the run after the step it is in; a second one ends the process at once."""
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            if self.stopping:
                os._exit(INTERRUPTED_TWICE)
            self.stopping = True
            self._note("interrupted: finishing this step and writing a checkpoint (Ctrl-C again to stop at once)")

        try:
            loop.add_signal_handler(signal.SIGINT, interrupt)
        except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or not POSIX
            yield
            return
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)


def sampling_params(config: OrchestratorConfig) -> SamplingParams:
    """The run's sampling distribution and limits."""
    generation = config.generation
    return SamplingParams(
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
        max_tokens=generation.max_tokens,
        stop=tuple(generation.stop),
    )
