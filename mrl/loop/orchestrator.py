"""The loop, and the only place that knows everyone.

    tasks -> rollouts -> rewards -> groups -> advantages -> actor step -> weight sync -> next tasks

One direction, no way back except the weights. Every rollout is written down before it is forgotten. What is generated
while the actor trains, and how far ahead, is up to the scheduler (`mrl/loop/schedule.py`): there is one loop for all
modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from mrl.backends import WorkerHandle
from mrl.backends.torchrun import world_size
from mrl.data import TaskOrder
from mrl.experience.batch import make_batch, note_per_token
from mrl.experience.failures import check_failures
from mrl.experience.groups import is_scored, kept_groups
from mrl.experience.metrics import rollout_metrics, shaping_metrics
from mrl.experience.reference import add_reference_logprobs
from mrl.experience.shaping import shape
from mrl.loop.checkpointing import Checkpointing
from mrl.loop.collector import Collector
from mrl.loop.colocate import Colocation
from mrl.loop.policy_server import PolicyServer
from mrl.loop.preflight import Prepared, check_disk, colocated_places, prepare, total_steps
from mrl.loop.producer import Producer
from mrl.loop.recorded_run import RecordedRun
from mrl.loop.resources import ACTOR, actor_ranks, needs, rollout_workers
from mrl.loop.resume import fingerprint, random_state, set_random_state
from mrl.loop.schedule import Taken
from mrl.loop.schedule_modes import make_scheduler
from mrl.loop.spawning import make_sync, spawn_actor, spawn_rewards, spawn_rollout
from mrl.loop.task_batch import staleness
from mrl.mismatch import MismatchWatch
from mrl.rewards.combine import held_out, mean_metrics, plain
from mrl.rollouts.runner import close_source, start_source
from mrl.store.checkpoints import SERVED
from mrl.system.garbage import older_objects_left_out
from mrl.system.gather import all_of
from mrl.system.interrupts import Stopped
from mrl.system.threads import in_thread
from mrl.types import Group, Sample, WeightRef, derive_seed
from mrl.workers.pool import RolloutPool
from mrl.workers.scoring import TrainerState


class Orchestrator(RecordedRun):
    """mrl's own loop."""

    working_folder = "weights"
    trains = ACTOR
    prepared: Prepared

    def _reset(self) -> None:
        super()._reset()
        self.version = 0
        self.seconds: dict[str, float] = {}
        self.mismatch_watch = MismatchWatch(self.config, self._note)
        self.boundary: dict[str, Any] | None = None
        """The state after the last complete step, while what is in flight may be given up."""
        self.evaluation_due = False
        """Whether the evaluation after the last complete step was given up."""

    async def _prepare(self) -> None:
        self.prepared = await in_thread(prepare, self.config)
        tasks = self.prepared.tasks
        self.total_steps = total_steps(self.config, len(tasks))
        self.server = PolicyServer(self.config)
        await self._try_rewards(tasks + self.prepared.eval_tasks, self.total_steps)

    async def _train(self) -> None:
        try:
            await self._train_with_source()
        finally:
            for problem in await close_source(self.prepared.source):
                self._note(problem)

    async def _train_with_source(self) -> None:
        facts = await self._unless_stopped(self._start_workers())
        notices = facts.pop("notices")
        self._announce("workers are up", facts, shown={"tasks": self.prepared.counts.tasks}, notices=notices)
        self._make_scheduler()
        try:
            looking = self.progress.watching(
                self._look,
                lambda: self.policy.workers,
                lambda: [self.actor, *self.rewards.workers],
                silence=self.config.runtime.sync_timeout,
                note=self._note,
            )
            serving = self.server.running(self.policy, self.prepared.setup, self.prepared.source)
            async with looking, serving:
                with older_objects_left_out():
                    await self._loop()
        finally:
            await self.scheduler.close()

    def _clean_up(self) -> None:
        if hasattr(self, "sync"):
            self.sync.close()
        self.server.close()

    def _newest_checkpoint(self) -> Path | None:
        return self.checkpoints.path()

    def _complete(self) -> bool:
        return self.step >= self.total_steps and not self.evaluation_due

    def _trains_here(self) -> bool:
        """Ranks that torchrun has started with this process cannot be started again either."""
        return super()._trains_here() and (actor_ranks(self.config) == 1 or world_size() > 1)

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        try:
            await self._steps()
        except Stopped:
            await self.scheduler.close()  # what is given up takes no time from the checkpoint
        if self.step:
            await self._last_checkpoint()

    async def _steps(self) -> None:
        """Train until the end, or until asked to stop. Raises Stopped where that gives up what was in flight."""
        training = self.config.training
        if self._evaluates() and (self.point is None or self.point.state.get("evaluation_due")):
            await self._evaluate()
        while self.step < self.total_steps and not self.stopping:
            self.boundary = self._state() if self._can_undo_step() else None
            self.scheduler.advance(self.step, self.version)
            self.step += 1
            try:
                self.metrics = await self._one_step()
            except Stopped:
                self.step -= 1
                raise
            self.boundary = None
            self._look_at_cost()
            last = self.step == self.total_steps
            if self._evaluates() and (last or (training.eval_steps and self.step % training.eval_steps == 0)):
                await self._evaluate()
            due = training.save_steps and self.step % training.save_steps == 0 and not self.mismatch_watch.in_a_row
            if due and not last and not self.stopping:
                await self._checkpoint(last=False)

    def _can_undo_step(self) -> bool:
        """Whether nothing is in flight between two steps, so that a step can be given up as if it had not begun."""
        return self.config.overlap.async_mode == "off" and not self.config.overlap.by_group

    async def _take(self) -> Taken:
        """The step's groups. A run that is asked to stop gives them up: generating is most of a step, and whoever sends
        SIGTERM does not wait long. Two cases wait: the first step, before which there is nothing to keep; and
        `pipeline`, where what is in flight has to end for the resumed run to be the same."""
        work = self.scheduler.take(self.step, self.version)
        if self.step == 1 or self.config.overlap.async_mode == "pipeline":
            return await work
        return await self._unless_stopped(work)

    async def _one_step(self) -> dict[str, float]:
        start = perf_counter()
        self.seconds = {}
        groups: list[Group] = []
        taken: Taken | None = None
        metrics: dict[str, float] = {}
        self.progress.begin("generating", self.step, self.scheduler.sizes[self.step])
        try:
            with self._timed("wait"):
                taken = await self._take()
            groups = taken.groups
            self.seconds |= taken.seconds
            metrics = self._taken_metrics(taken) | rollout_metrics(groups, self.config)
            check_failures(groups, self.config, self.step)
            alone = self.config.overlap.async_mode == "off"
            async with (
                self.server.gate.held(when=alone),
                self.colocation.training(self.scheduler.drain, syncs=self._just_synced()),
            ):
                with self._timed("reference"):
                    await add_reference_logprobs(groups, self.config, self.actor)
                    await shape(groups, self.config, self._reference_kl)
                metrics |= shaping_metrics(groups, self.config)
                metrics |= await self._learn(groups)
            self.watch.look(self.step, groups)
        except Stopped:  # as if the step had not begun
            raise
        except BaseException:  # what was generated is written down, whatever came after
            self._write_step(start, metrics, self.scheduler.unused() if taken is None else [*groups, *taken.dropped])
            raise
        self._write_step(start, metrics, [*groups, *taken.dropped])
        self.trackers.log(self.step, metrics)
        self._show_completions(groups)
        self.mismatch_watch.stop()
        return metrics

    def _write_step(self, start: float, metrics: dict[str, float], recorded: list[Group]) -> None:
        """Into the run's record, with the times."""
        tokens = sum(rollout.num_tokens for group in recorded for rollout in group.rollouts)
        self.seconds["step"] = perf_counter() - start
        metrics |= self.cost.metrics()
        metrics |= {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        metrics |= {"rollout/tokens": float(tokens), "rollout/tokens_per_second": tokens / self.seconds["step"]}
        self.store.write_step(self.step, metrics, recorded)

    def _taken_metrics(self, taken: Taken) -> dict[str, float]:
        """The epoch, what reward functions logged, and, where generation runs ahead, staleness and counts of groups."""
        metrics = {"rollout/epoch": taken.batches[0].epoch, **plain(mean_metrics(taken.logged))}
        metrics |= self.policy.prefill_metrics() | self._source_metrics()
        if self.config.algorithm.zero_variance_groups == "resample":
            metrics["rollout/resamples"] = float(taken.resamples)
        if self.config.overlap.async_mode != "off" or self.config.overlap.by_group:
            metrics |= staleness(taken.groups, self.version)
            metrics |= {f"rollout/{name}_groups": float(count) for name, count in taken.counts.items()}
            metrics["rollout/in_flight_groups"] = float(self.scheduler.in_flight())
        return metrics

    def _source_metrics(self) -> dict[str, float]:
        """What the rollout source counted since the last step."""
        counted: dict[str, float] = getattr(self.prepared.source, "metrics", dict)()
        return {f"rollout/{name}": value for name, value in counted.items()}

    def _note_of_source(self, message: str) -> None:
        """Before the run is announced, it waits for that."""
        if self._trained:
            self._note(message)
        else:
            self.prepared.notices.append(message)

    async def _reference_kl(self, samples: list[Sample]) -> list[float]:
        kl: list[float] = await self.actor.call("reference_kl", samples, self.config.generation.temperature)
        return kl

    async def _learn(self, groups: list[Group]) -> dict[str, float]:
        batch = make_batch(groups, self.config)
        if not batch.num_tokens:
            self.watch.no_update(self.step, groups, batch)
        self.progress.stage("training")
        metrics: dict[str, float]
        with self._timed("train"):
            metrics, logprobs = await self.actor.call("learn", batch)
            note_per_token(batch, logprobs)
        if metrics["train/updates_skipped"]:
            skipped = metrics["train/updates_skipped"]
            self._note(f"step {self.step}: {skipped:.0f} update(s) skipped, loss or gradient not finite")
        await self.mismatch_watch.look(self.step, metrics, self.actor, self.workers)
        if self._just_synced() and self.stopping:
            self.version += 1  # nothing samples with them any more; a resumed run sends them first
        elif self._just_synced():
            if not self.config.overlap.in_flight:
                with self._timed("wait"):
                    await self.scheduler.drain()
            self.progress.stage("syncing")
            async with self.server.gate.held(when=not self.config.overlap.in_flight):
                with self._timed("sync"):
                    self.version += 1
                    report = await self.policy.sync(self.sync, self.actor, self.version)
                metrics |= {"sync/bytes": float(report.bytes), "sync/replaced_workers": float(len(report.failed))}
        return metrics | {"sync/policy_version": float(self.version)}

    async def _evaluate(self) -> None:
        """Attempt the held-out tasks once each, with the same seeds every time."""
        await self.scheduler.finish_in_flight()  # reward functions may draw from one generator of random numbers
        self.boundary, self.evaluation_due = self._state(), True
        with self.policy.not_counted():
            await self._unless_stopped(self._attempt_held_out())
        self.boundary, self.evaluation_due = None, False

    async def _attempt_held_out(self) -> None:
        start = perf_counter()
        seed = derive_seed(self.config.training.seed, "eval")
        tasks = self.prepared.eval_tasks
        state = TrainerState(global_step=self.step, max_steps=self.total_steps, epoch=None)
        self.progress.begin("evaluating", self.step, len(tasks))
        self.held_out: list[Group] = []
        collected = await self.collector.collect(tasks, 1, seed=seed, state=state, finished=self.held_out.append)
        groups = collected.groups
        metrics = rollout_metrics(groups, self.config, prefix="eval")
        self.eval_metrics = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        self.eval_metrics |= held_out(mean_metrics(collected.logged))
        self.eval_metrics["time/eval"] = perf_counter() - start
        self.eval_step = self.step
        self.store.write_eval(self.step, self.eval_metrics, groups)
        self.trackers.log(self.step, self.eval_metrics)
        self.watch.look_at_evaluation(self.step, groups)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    async def _last_checkpoint(self) -> None:
        """Checkpoint the end of the run, unless the last checkpoint holds it."""
        began_with = self.point is not None and bool(self.point.state.get("evaluation_due"))
        if self.checkpoints.newest() == self.step and self.evaluation_due == began_with:
            await self.checkpoints.finish(self.step)
        else:
            await self._checkpoint(last=True)

    async def _checkpoint(self, *, last: bool) -> None:
        self.progress.stage("saving")
        if self.boundary is None:
            await self.scheduler.finish_in_flight()
        state = (self.boundary or self._state()) | {
            "tasks": fingerprint(self.prepared.tasks),
            "trackers": self.trackers.run_ids(),
            "evaluation_due": self.evaluation_due,
        }
        served = None if self._just_synced() else self.sync.served() or self.served
        known = self.metrics | (self.eval_metrics if self.eval_step == self.step else {})
        await self.checkpoints.write(self.step, state, known, served=served, last=last, stopping=self.stopping)

    def _state(self) -> dict[str, Any]:
        """What training resumes from after this step, besides the actor's part."""
        return {
            "policy_version": self.version,
            "order": self.order.state_dict(),
            "random": random_state(),
            "gap_in_a_row": self.mismatch_watch.in_a_row,
            "in_flight": self.scheduler.state_dict(),
        }

    # --- starting ---------------------------------------------------------------------------------------------------

    async def _start_workers(self) -> dict[str, Any]:
        config, prepared = self.config, self.prepared
        length = prepared.max_model_len
        self.sync = make_sync(config, Path(self.backend.folder(self.run_dir, self.working_folder)))
        await self.backend.reserve(needs(config))
        await start_source(prepared.source, self.backend, self._note_of_source)
        self.actor: WorkerHandle = await spawn_actor(self.backend, config, length, self.total_steps)

        async def spawn(index: int) -> WorkerHandle:
            return await spawn_rollout(self.backend, config, length, index)

        self.workers = await all_of([spawn(index) for index in range(rollout_workers(config))])
        self.rewards = await spawn_rewards(self.backend, config, self._note, self.run_dir)
        self.policy = RolloutPool(
            self.workers,
            prepared.max_model_len,
            spawn=spawn,
            note=self._note,
            max_restarts=config.runtime.max_worker_restarts,
        )
        self.collector = Collector.of(config, prepared, self.policy, self.rewards, config.training.num_generations)
        self.checkpoints = Checkpointing(config, self.backend, self.actor, self.store, self._note)
        if self.point is not None:
            self.checkpoints.written, self.checkpoints.best = self.step, self.point.state["best"]
            self.version = self.point.state["policy_version"]
        places = colocated_places(config)
        self.colocation = Colocation(
            config, self.actor, self.workers, places, self.sync, note=self._note, timed=self._timed
        )
        await self.colocation.start()
        facts: dict[str, Any] = await self.actor.call("initialize")
        facts["repeatable_sampling"] = config.serving.samples_repeatably(config.runtime.engine)
        check_disk(self.run_dir, facts["trainable_parameters"], copies=2)
        if self.point is not None:
            await self.actor.call("load_checkpoint", await self.backend.put(self.point.checkpoint.path))
        await self._first_sync()
        await self.policy.ask_capacity()
        return facts

    async def _first_sync(self) -> None:
        """Give the rollout workers the weights they served when the checkpoint was written, or those of the start."""
        self.served: Path | None = None
        if self.point is not None and (self.point.checkpoint.path / SERVED).exists():
            self.served = Path(await self.backend.put(self.point.checkpoint.path)) / SERVED
        if self.served is None:
            await self.policy.sync(self.sync, self.actor, self.version)
            return
        await self.colocation.give_device()
        ref = WeightRef(self.version, path=str(self.served.parent))
        await all_of([worker.call("update_weights", ref) for worker in self.workers])
        self.policy.version = self.version

    def _make_scheduler(self) -> None:
        """The scheduler, at the beginning or where the checkpoint was written."""
        config, tasks = self.config, self.prepared.tasks
        training = config.training
        order = TaskOrder(len(tasks), training.batch_size, seed=training.seed, shuffle=config.data.shuffle)
        self.order = order
        self.producer = Producer(config, tasks, self.collector, self.actor, self.total_steps)
        resamples = config.algorithm.zero_variance_groups == "resample"
        self.scheduler = make_scheduler(
            order,
            config.overlap,
            self.producer.produce,
            total_steps=self.total_steps,
            step=self.step,
            has_signal=(lambda group: bool(kept_groups([group], config))) if resamples else (lambda group: True),
            max_resamples=config.algorithm.max_resamples if resamples else 0,
        )
        if self.point is None:
            return
        mine, allowed = order.state_dict(), {"num_tasks", *config.run.allow_change}
        kept = {name: value for name, value in self.point.state["order"].items() if name not in allowed}
        order.load_state_dict(mine | kept)
        set_random_state(self.point.state["random"])
        self.scheduler.load_state_dict(self.point.checkpoint.in_flight, tasks)
        self.mismatch_watch.in_a_row = self.point.state.get("gap_in_a_row", 0)

    # --- small things -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Bring the progress that is shown up to date."""
        facts = self.progress.facts
        facts.in_flight = self.collector.runner.in_flight
        if facts.stage in ("generating", "scoring"):
            self.progress.stage("generating" if self.scheduler.generating() else "scoring")
            attempted = self.scheduler.attempted(self.step)
        elif facts.stage == "evaluating":
            attempted = self.held_out
        else:
            return
        scored = sum(all(is_scored(r) or r.status == "failed" for r in group.rollouts) for group in attempted)
        facts.groups_done = min(scored, facts.groups_wanted)

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
