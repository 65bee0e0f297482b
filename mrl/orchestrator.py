"""The loop, and the only place that knows everyone.

    tasks -> rollouts -> rewards -> groups -> advantages -> actor step -> weight sync -> next tasks

One direction, no way back except the weights. Every rollout is written down before it is forgotten.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from mrl.backends import BACKENDS, Resources, WorkerHandle
from mrl.checkpointing import Checkpointing
from mrl.config import OrchestratorConfig
from mrl.data import TaskOrder
from mrl.dynamic_sampling import refill
from mrl.experience import (
    check_failures,
    check_steps,
    make_batch,
    reference_samples,
    rollout_metrics,
    shaping_metrics,
    teaching_groups,
)
from mrl.gap_watch import GapWatch
from mrl.preflight import Prepared, check_disk, prepare, reward_worker_args, total_steps
from mrl.recorded_run import RecordedRun
from mrl.resume import (
    fingerprint,
    random_state,
    set_random_state,
)
from mrl.reward_shaping import KL, is_scored, shape_by_length
from mrl.rewards.scoring import TrainerState, mean_of_rounds, score_groups
from mrl.rollouts.single_turn import SingleTurn
from mrl.store.checkpoints import SERVED
from mrl.sync import SYNC_METHODS, WeightSync
from mrl.types import Group, Sample, SamplingParams, WeightRef, derive_seed
from mrl.workers.pool import PolicyClient


class Orchestrator(RecordedRun):
    """mrl's own loop."""

    scratch = "weights"
    prepared: Prepared

    def __init__(self, config: OrchestratorConfig, run_dir: Path, *, resume: bool = False) -> None:
        super().__init__(config, run_dir, resume=resume)
        self.version = 0
        self.seconds: dict[str, float] = {}
        self.gap_watch = GapWatch(config, self._note)

    async def _prepare(self) -> None:
        self.prepared = await asyncio.to_thread(prepare, self.config)
        self.total_steps = total_steps(self.config, len(self.prepared.tasks))
        self.sync = make_sync(self.config, self.run_dir / self.scratch)

    async def _train(self) -> None:
        facts = await self._start_workers()
        notices = facts.pop("notices")
        self._announce("workers are up", facts, shown={"tasks": len(self.prepared.tasks)}, notices=notices)
        await self._loop()

    def _clean_up(self) -> None:
        self.sync.close()

    def _newest_checkpoint(self) -> Path | None:
        return self.checkpoints.path()

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
            self.gap_watch.in_a_row = self.point.state.get("gap_in_a_row", 0)
        elif self._evaluates():
            await self._evaluate()
        while self.step < self.total_steps and not self.stopping:
            self.step += 1
            epoch = self.order.epoch + self.order.position / len(self.prepared.tasks)
            self.metrics = await self._one_step(self.order.next_batch(), epoch)
            last = self.step == self.total_steps or self.stopping
            if self._evaluates() and (last or (training.eval_steps and self.step % training.eval_steps == 0)):
                await self._evaluate()
            due = training.save_steps and self.step % training.save_steps == 0 and not self.gap_watch.in_a_row
            if last or due:
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
            metrics |= await self._learn(groups)
        finally:  # what was generated is written down, whatever came after
            tokens = sum(rollout.num_tokens for group in groups for rollout in group.rollouts)
            self.seconds["step"] = perf_counter() - start
            metrics |= {f"time/{name}": seconds for name, seconds in self.seconds.items()}
            metrics |= {"rollout/tokens": float(tokens), "rollout/tokens_per_second": tokens / self.seconds["step"]}
            self.store.write_step(self.step, metrics, groups)
        self.trackers.log(self.step, metrics)
        self._show_completions(groups)
        self.gap_watch.stop()
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

    async def _learn(self, groups: list[Group]) -> dict[str, float]:
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
        await self.gap_watch.look(self.step, metrics, self.actor, self.workers)
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
            "gap_in_a_row": self.gap_watch.in_a_row,
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
            self.version = self.point.state["policy_version"]
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

    # --- small things -----------------------------------------------------------------------------------------------

    def _trainer_state(self, epoch: float | None) -> TrainerState:
        return TrainerState(global_step=self.step, max_steps=self.total_steps, epoch=epoch)

    def _just_synced(self) -> bool:
        return self.step % self.config.runtime.sync_weights_every == 0

    def _evaluates(self) -> bool:
        return bool(self.prepared.eval_tasks)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start


def make_sync(config: OrchestratorConfig, folder: Path) -> WeightSync:
    """The run's way of sending weights. folder: where they are written unless `weight_sync_dir` says otherwise."""
    runtime = config.runtime
    extra = {"over": runtime.delta_over, "full_every": runtime.delta_full_every}
    shared = runtime.weight_sync_dir
    return SYNC_METHODS.get(runtime.weight_sync_method)(
        folder if shared is None else Path(shared).expanduser() / f"mrl-weights-{folder.parent.name}",
        deadline=runtime.sync_timeout,
        lora=config.serving.lora_sync if config.model.use_lora else None,
        shares_modules=BACKENDS.get(runtime.backend).shares_memory,
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
