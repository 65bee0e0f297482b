"""The loop, and the only place that knows everyone.

    tasks -> rollouts -> rewards -> groups -> advantages -> actor step -> weight sync -> next tasks

One direction, no way back except the weights. Every rollout is written down before it is forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from mrl.backends import BACKENDS, Resources, WorkerHandle
from mrl.checkpointing import Checkpointing
from mrl.config import OrchestratorConfig
from mrl.data import TaskOrder
from mrl.dynamic_sampling import refill
from mrl.errors import StoreError
from mrl.experience import (
    check_failures,
    check_steps,
    make_batch,
    reference_samples,
    rollout_metrics,
    shaping_metrics,
    teaching_groups,
)
from mrl.interrupts import interrupts
from mrl.models import pin_model
from mrl.preflight import check_disk, prepare, reward_worker_args, total_steps
from mrl.resume import (
    ResumePoint,
    check_same_run,
    check_same_tasks,
    find_resume_point,
    fingerprint,
    random_state,
    record_options,
    set_random_state,
)
from mrl.reward_shaping import KL, is_scored, shape_by_length
from mrl.rewards.scoring import TrainerState, mean_of_rounds, score_groups
from mrl.rollouts.single_turn import SingleTurn
from mrl.store.checkpoints import SERVED, remove_leftovers
from mrl.store.run import RunStore
from mrl.sync import SYNC_METHODS, WeightSync
from mrl.tracking import RunInfo, TrackerSet
from mrl.tracking.base import Status
from mrl.types import Group, Sample, SamplingParams, WeightRef, derive_seed
from mrl.workers.pool import PolicyClient


@dataclass
class RunResult:
    """What a run came to."""

    run_dir: Path
    status: Status
    steps: int
    checkpoint: Path | None
    metrics: dict[str, float]
    """Of the last step."""
    eval_metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation on held-out tasks."""
    seconds: float = 0.0


class Orchestrator:
    """Runs one configuration from beginning to end, or from its newest checkpoint on.

    resume: `run_dir` holds a run of this configuration.
    """

    def __init__(self, config: OrchestratorConfig, run_dir: Path, *, resume: bool = False) -> None:
        self.config = config
        self.run_dir = run_dir
        self.resume = resume
        self.point: ResumePoint | None = None
        self.stopping = False
        self.outcome: Status = "failed"
        self.version = 0
        self.step = 0
        self.seconds: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.eval_metrics: dict[str, float] = {}

    async def run(self) -> RunResult:
        """Prepare, train, clean up. Raises a subclass of MRLError; what was done until then stays in the run."""
        start = perf_counter()
        self.config.model.model = pin_model(self.config.model.model)
        self.prepared = await asyncio.to_thread(prepare, self.config)
        self.total_steps = total_steps(self.config, len(self.prepared.tasks))
        self.trackers = TrackerSet(self.config.run.report_to, self._tracker_failed)
        self.backend = BACKENDS.get(self.config.runtime.backend)(self.config.runtime.call_timeout)
        self.sync = make_sync(self.config, self.run_dir, shares_modules=self.backend.shares_memory)
        self.store = self._open_store()
        try:
            with interrupts(self._interrupt):
                facts = await self._start_workers()
                self._announce(facts)
                await self._loop()
            self.outcome = "finished" if self.step == self.total_steps else "interrupted"
            self.store.finish(self.outcome)
        except BaseException as error:
            self.outcome = "failed"
            self.store.finish("failed", f"{type(error).__name__}: {error}")
            with contextlib.suppress(StoreError):  # which may be the very error
                self.store.event("error", f"{type(error).__name__}: {error}", step=self.step)
            raise
        finally:
            self.trackers.finish(self.outcome)
            await self.backend.close()
            self.sync.close()
            self.store.close()
        return RunResult(
            run_dir=self.run_dir,
            status=self.outcome,
            steps=self.step,
            checkpoint=self.checkpoints.path(),
            metrics=self.metrics,
            eval_metrics=self.eval_metrics,
            seconds=perf_counter() - start,
        )

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        training = self.config.training
        self.order = TaskOrder(
            len(self.prepared.tasks), training.batch_size, seed=training.seed, shuffle=self.config.data.shuffle
        )
        if self.point is not None:
            mine, allowed = self.order.state_dict(), {"num_tasks", *self.config.run.allow_change}
            kept = {name: value for name, value in self.point.state["order"].items() if name not in allowed}
            self.order.load_state_dict(mine | kept)
            set_random_state(self.point.state["random"])
        elif self._evaluates():
            await self._evaluate()
        while self.step < self.total_steps and not self.stopping:
            self.step += 1
            epoch = self.order.epoch + self.order.position / len(self.prepared.tasks)
            self.metrics = await self._one_step(self.order.next_batch(), epoch)
            last = self.step == self.total_steps or self.stopping
            if self._evaluates() and (last or (training.eval_steps and self.step % training.eval_steps == 0)):
                await self._evaluate()
            if last or (training.save_steps and self.step % training.save_steps == 0):
                await self._checkpoint(last=last)

    async def _one_step(self, indices: list[int], epoch: float) -> dict[str, float]:
        start = perf_counter()
        self.seconds = {}
        groups = await self._attempt(indices, derive_seed(self.config.training.seed, "rollout", self.step))
        metrics: dict[str, float] = {"rollout/epoch": epoch}
        try:
            metrics |= await self._score(groups, epoch)
            metrics |= rollout_metrics(groups, self.config)
            check_failures(groups, self.config, self.step)
            await self._shape(groups)
            metrics |= shaping_metrics(groups, self.config)
            metrics |= await self._train(groups)
        finally:  # what was generated is written down, whatever came after
            tokens = sum(rollout.num_tokens for group in groups for rollout in group.rollouts)
            self.seconds["step"] = perf_counter() - start
            metrics |= {f"time/{name}": seconds for name, seconds in self.seconds.items()}
            metrics |= {"rollout/tokens": float(tokens), "rollout/tokens_per_second": tokens / self.seconds["step"]}
            self.store.write_step(self.step, metrics, groups)
        self.trackers.log(self.step, metrics)
        self._show_completions(groups)
        return metrics

    async def _attempt(self, indices: list[int], seed: int) -> list[Group]:
        with self._timed("generate"):
            return await self.source.collect(
                [self.prepared.tasks[i] for i in indices],
                self.policy,
                self.config.training.num_generations,
                seed=seed,
            )

    async def _score(self, groups: list[Group], epoch: float) -> dict[str, float]:
        """Rewards for every rollout. With dynamic sampling, `groups` grows until a batch of them teaches something."""
        logged = [await self._score_some(groups, epoch)]
        algorithm, target = self.config.algorithm, self.config.training.batch_size
        if algorithm.zero_variance_groups != "resample":
            return logged[0][1]

        async def attempt(missing: int, number: int) -> None:
            check_failures(groups, self.config, self.step)  # what cannot be scored is not helped by more of it
            # The round is part of the seed: in a small dataset the same task may come again within a step.
            seed = derive_seed(self.config.training.seed, "rollout", self.step, number)
            more = await self._attempt(self.order.next_batch(missing), seed)
            groups.extend(more)
            logged.append(await self._score_some(more, epoch))

        def teaching() -> int:
            return len(teaching_groups(groups, self.config))

        rounds = await refill(teaching, target, algorithm.max_resamples, attempt)
        return mean_of_rounds(logged) | {"rollout/resamples": float(rounds)}

    async def _score_some(self, groups: list[Group], epoch: float) -> tuple[int, dict[str, float]]:
        """Rewards; meanwhile, where there is a KL term, the actor asks its reference model about the same samples."""
        samples = reference_samples(groups, self.config)
        reference = asyncio.ensure_future(self._add_reference_logprobs(samples)) if samples else None
        try:
            with self._timed("reward"):
                metrics = await score_groups(self.rewards, groups, self._trainer_state(epoch))
        except BaseException:
            if reference is not None:
                reference.cancel()
            raise
        if reference is not None:
            await reference
        check_steps(groups, self.config)
        return sum(len(group.rollouts) for group in groups), metrics

    async def _add_reference_logprobs(self, samples: list[Sample]) -> None:
        with self._timed("reference"):
            found = await self.actor.call("reference_logprobs", samples, self.config.generation.temperature)
        for sample, logprobs in zip(samples, found, strict=True):
            sample.reference_logprobs = logprobs

    async def _shape(self, groups: list[Group]) -> None:
        """What is added to the rewards: for length, and the divergence from the reference model."""
        algorithm = self.config.algorithm
        shape_by_length(groups, self.config)
        if not algorithm.beta or algorithm.kl_in != "reward":
            return
        scored = [r for group in teaching_groups(groups, self.config) for r in group.rollouts if is_scored(r)]
        samples = [sample for rollout in scored for sample in rollout.samples]
        with self._timed("reference"):
            kl = iter(await self.actor.call("reference_kl", samples, self.config.generation.temperature))
        for rollout in scored:
            rollout.metrics[KL] = -algorithm.beta * sum(next(kl) for _ in rollout.samples)
            if not math.isfinite(rollout.metrics[KL]):
                rollout.fail("its divergence from the reference model (kl_in: reward) is not finite")

    async def _train(self, groups: list[Group]) -> dict[str, float]:
        batch = make_batch(groups, self.config)
        if not batch.num_tokens:
            why = "every completion was too long or cut (see max_completion_length)"
            if not batch.num_sequences:
                why = "no group of rollouts differed in reward (see zero_variance_groups)"
            self._note(f"step {self.step}: no update, {why}")
        with self._timed("train"):
            metrics = await self.actor.call("train_step", batch)
        if metrics["train/updates_skipped"]:
            skipped = metrics["train/updates_skipped"]
            self._note(f"step {self.step}: {skipped:.0f} update(s) skipped, loss or gradient not finite")
        if self._just_synced():
            with self._timed("sync"):
                self.version += 1
                report = await self.policy.sync(self.sync, self.actor, self.version)
                metrics |= {"sync/bytes": float(report.bytes), "sync/replaced_workers": float(len(report.failed))}
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
        self.trackers.log(self.step, self.eval_metrics)

    async def _checkpoint(self, *, last: bool) -> None:
        state = {
            "policy_version": self.version,
            "order": self.order.state_dict(),
            "random": random_state(),
            "tasks": fingerprint(self.prepared.tasks),
            "trackers": self.trackers.run_ids(),
            "in_flight": [],  # rollouts that were begun and not trained on: none in the synchronous loop
        }
        served = None if self._just_synced() else self.sync.served() or self.served
        known = self.metrics | self.eval_metrics
        await self.checkpoints.write(self.step, state, known, served=served, last=last)

    # --- starting ---------------------------------------------------------------------------------------------------

    async def _start_workers(self) -> dict[str, Any]:
        config, prepared = self.config, self.prepared
        from mrl.workers.actor import ActorWorker
        from mrl.workers.reward import RewardWorker
        from mrl.workers.rollout import RolloutWorker

        model = config.model.model_dump() | {"max_model_len": prepared.max_model_len}
        self.actor: WorkerHandle = await self.backend.spawn(
            ActorWorker,
            name="actor",
            resources=Resources(gpu=config.runtime.actor_gpu),
            args={
                "model": model,
                "training": config.training.model_dump(),
                "total_steps": self.total_steps,
                "algorithm": config.algorithm.model_dump(),
            },
        )

        async def spawn_rollout(index: int) -> WorkerHandle:
            return await self.backend.spawn(
                RolloutWorker,
                name=f"rollout-{index}",
                resources=Resources(gpu=config.runtime.rollout_gpu),
                args={"engine": config.runtime.engine, "model": model, "options": engine_options(config, index)},
            )

        self.workers: list[WorkerHandle] = [await spawn_rollout(i) for i in range(rollout_workers(config))]
        self.rewards: WorkerHandle = await self.backend.spawn(
            RewardWorker,
            name="reward",
            resources=Resources(),
            args=reward_worker_args(config.reward),
        )
        self.policy = PolicyClient(self.workers, spawn_rollout, self._note)
        self.checkpoints = Checkpointing(config, self.actor, self.store, self._note)
        if self.point is not None:
            self.checkpoints.written, self.checkpoints.best = self.step, self.point.state["best"]
        self.source = SingleTurn(prepared.tokenizer, prepared.encoder, sampling_params(config))
        facts: dict[str, Any] = await self.actor.call("initialize")
        check_disk(self.run_dir, facts["trainable_parameters"], copies=2)
        if self.point is not None:
            await self.actor.call("load_checkpoint", str(self.point.checkpoint.path))
        await self._first_sync()
        return facts

    async def _first_sync(self) -> None:
        """Give the rollout workers the weights they served when the checkpoint was written, or those of the start."""
        self.served = None if self.point is None else self.point.checkpoint.path / SERVED
        if self.served is None or not self.served.exists():
            self.served = None
            await self.policy.sync(self.sync, self.actor, self.version)
            return
        ref = WeightRef(self.version, path=str(self.served.parent))
        for worker in self.workers:
            await worker.call("update_weights", ref)

    def _open_store(self) -> RunStore:
        if not self.resume:
            return RunStore(self.run_dir, self.config)
        check_same_run(self.run_dir, self.config)
        self.point = find_resume_point(self.run_dir)
        if self.point is not None:
            check_same_tasks(self.point, self.prepared.tasks, self.config)
            state = self.point.state
            self.step, self.version = state["step"], state["policy_version"]
        store = RunStore.reopen(self.run_dir)
        try:
            record_options(self.run_dir, self.config)
            store.rewind(self.step if self.point is not None else -1)
            remove_leftovers(self.run_dir)
            shutil.rmtree(self.run_dir / "weights", ignore_errors=True)
            store.event("resume", f"going on after step {self.step}", step=self.step)
        except BaseException:
            store.close()  # lets another process have the run
            raise
        return store

    def _announce(self, facts: dict[str, Any]) -> None:
        notices = facts.pop("notices")
        shown = {
            "model": f"{self.config.model.model} ({facts['parameters'] / 1e6:.1f} M parameters)",
            "on": facts["device"],
            "tasks": len(self.prepared.tasks),
            "held-out": len(self.prepared.eval_tasks),
        }
        info = RunInfo(
            self.run_dir.name,
            self.run_dir,
            self.total_steps,
            self.config.to_dict(),
            shown,
            step=self.step,
            resume_ids=self.point.state["trackers"] if self.point else {},
        )
        self.trackers.start(info)
        self.store.event("start", "workers are up", total_steps=self.total_steps, **facts)
        for notice in [*self.prepared.notices, *notices]:
            self._note(notice)
        if self.resume:
            for problem in self.point.problems if self.point else []:
                self._note(f"checkpoint not used: {problem}")
            self._note(f"going on after step {self.step} of {self.total_steps}")

    # --- small things -----------------------------------------------------------------------------------------------

    def _trainer_state(self, epoch: float | None) -> TrainerState:
        return TrainerState(global_step=self.step, max_steps=self.total_steps, epoch=epoch)

    def _just_synced(self) -> bool:
        return self.step % self.config.runtime.sync_weights_every == 0

    def _evaluates(self) -> bool:
        return bool(self.prepared.eval_tasks)

    def _tracker_failed(self, message: str) -> None:
        self.store.event("tracker_failed", message, step=self.step)
        self.trackers.note(message)

    def _note(self, message: str) -> None:
        self.store.event("notice", message, step=self.step)
        self.trackers.note(message)

    def _show_completions(self, groups: list[Group]) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout in rollouts[: self.config.run.log_completions]:
            text = rollout.messages[-1]["content"] if rollout.messages else ""
            self.trackers.note(f"[{rollout.task_id}] reward {rollout.reward}\n{text}")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def _interrupt(self) -> None:
        self.stopping = True
        self._note("interrupted: finishing this step and writing a checkpoint (Ctrl-C again to stop at once)")


def make_sync(config: OrchestratorConfig, run_dir: Path, *, shares_modules: bool) -> WeightSync:
    """The run's way of sending weights."""
    runtime = config.runtime
    extra = {"over": runtime.delta_over, "full_every": runtime.delta_full_every}
    shared = runtime.weight_sync_dir
    return SYNC_METHODS.get(runtime.weight_sync_method)(
        run_dir / "weights" if shared is None else Path(shared).expanduser() / f"mrl-weights-{run_dir.name}",
        deadline=runtime.sync_timeout,
        lora=config.serving.lora_sync if config.model.use_lora else None,
        shares_modules=shares_modules,
        **(extra if runtime.weight_sync_method == "delta" else {}),
    )


def engine_options(config: OrchestratorConfig, index: int) -> dict[str, Any]:
    """What rollout worker `index` makes its engine with."""
    options = config.serving.options_of(config.runtime.engine)
    if options:
        options["sync_timeout"] = config.runtime.sync_timeout
    if "vllm_devices" in options:
        options["vllm_devices"] = config.serving.devices_of(index)
    if "vllm_urls" in options:
        urls = options.pop("vllm_urls")
        options["url"] = urls[index]
    return options


def rollout_workers(config: OrchestratorConfig) -> int:
    """How many rollout workers there are: for servers that run already, one for each."""
    return len(config.serving.vllm_urls) or config.runtime.num_rollout_workers


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
