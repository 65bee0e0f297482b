"""A run in simple mode: checked first, trained by one worker, recorded here as any other run."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.backends import BACKENDS, WorkerHandle
from mrl.config import OrchestratorConfig
from mrl.data import check_prompt_lengths
from mrl.data.tasks import Row
from mrl.errors import ConfigError
from mrl.experience.metric_names import check_best_metric, loggers
from mrl.loop.checkpointing import bring
from mrl.loop.images import refuse_images
from mrl.loop.preflight import (
    Counts,
    check_disk,
    check_names,
    check_rewards,
    draw_eval,
    load_eval_rows,
    load_eval_tasks,
    load_train_rows,
    load_train_tasks,
    reward_worker_args,
    taken_of,
    total_steps,
)
from mrl.loop.recorded_run import RecordedRun
from mrl.loop.resources import actor_ranks, actor_resources, base_name, check_resources, model_for, rewards_for
from mrl.loop.resume import fingerprint
from mrl.models import context_length, load_config, load_tokenizer
from mrl.rollouts.function.source import form_of
from mrl.rollouts.prompts import PromptEncoder
from mrl.rollouts.tools.functions import described, found
from mrl.simple.data import check_shape, make_examples
from mrl.simple.metrics import metric_names
from mrl.simple.options import check_options, notices
from mrl.simple.trainers import TRAINERS, TrainerSpec
from mrl.store.checkpoints import prune
from mrl.store.progress import WorkerHealth
from mrl.system.threads import in_thread
from mrl.types import Task
from mrl.workers.reward import RewardWorker

POLL_SECONDS = 0.5
"""How long a call waits for records: as long as a request to stop may take to reach the worker."""


@dataclass
class PreparedSimple:
    """What the checks found out, for the run to use."""

    spec: TrainerSpec
    tasks: list[Task]
    """Prompts to answer, or examples as columns."""
    eval_tasks: list[Task]
    max_model_len: int
    notices: list[str]
    counts: Counts


def prepare_simple(config: OrchestratorConfig) -> PreparedSimple:
    """Check everything that can be before a model is loaded. Raises the typed error of whatever will not do."""
    spec = TRAINERS.get(config.trl.algorithm)
    check_options(config, spec)
    check_installed()
    check_names(config)
    if actor_ranks(config) > 1:
        raise ConfigError(
            "actor_gpu: mode: simple trains in one process; give it one GPU and start it without torchrun, or use "
            "mode: orchestrated"
        )
    check_resources(config, actor_resources(config))
    _check_rollout_func(config)
    rewards = RewardWorker(**reward_worker_args(config.reward)) if spec.online else None
    tasks, total = load_train_tasks(config) if spec.online else ([], 0)
    rows, where, total = load_train_rows(config) if not spec.online else ([], "", total)
    text_column = config.trl.trl_args.get("dataset_text_field", "text")
    shape = check_shape(rows, spec, where, text_column) if rows else ()
    eval_tasks, eval_rows, eval_total = _load_eval(config, spec, shape, text_column)
    for part in (rows, eval_rows, [{"prompt": task.prompt, **task.columns} for task in (*tasks, *eval_tasks)]):
        refuse_images(part, where or "the dataset")
    scorers = [] if rewards is None else rewards.rewards
    notes = check_best_metric(
        config.training.best_metric,
        metric_names(spec, scorers, evaluates=bool(eval_total)),
        loggers(scorers),
        evaluates=bool(eval_total),
    )
    for attempted in (tasks, eval_tasks):
        if attempted and rewards is not None:
            check_rewards(rewards, attempted, config)
    context = context_length(load_config(config.model), config.model.max_model_len)
    encoder = PromptEncoder.of(load_tokenizer(config.model), config.data)
    if spec.online:
        _check_lengths([tasks, eval_tasks], encoder, context, config)
    else:
        tasks, eval_tasks = (_as_tasks(make_examples(part, shape, encoder)) for part in (rows, eval_rows))
    _check_enough(tasks, config, spec)
    counts = Counts(taken_of(len(tasks), total), taken_of(len(eval_tasks), eval_total))
    return PreparedSimple(spec, tasks, eval_tasks, context, notices(config, spec, len(tasks)) + notes, counts)


def _check_rollout_func(config: OrchestratorConfig) -> None:
    """TRL gets the function as it is."""
    given = config.rollout.rollout_func
    if given is None:
        return
    function = found(given, "rollout_func")
    if form_of(function) == "args":
        raise ConfigError(
            f"rollout_func: {described(function)} takes (prompts, args, processing_class), and TRL 1.16, which "
            "runs with mode: simple, calls it with (prompts, trainer); take these, or use mode: orchestrated"
        )
    if not BACKENDS.get(config.runtime.backend).shares_memory:
        raise ConfigError(
            f"rollout_func: with mode: simple and backend: {config.runtime.backend} it would not be where the trainer "
            "is; use backend: inline, or mode: orchestrated"
        )


def check_installed() -> None:
    """Raises ConfigError when TRL is not there."""
    if importlib.util.find_spec("trl") is None:
        raise ConfigError("mode: simple needs TRL, which is not installed; pip install 'mrl[trl]'")


class SimpleRun(RecordedRun):
    """One of TRL's trainers' loops, in a worker that tells of every step."""

    working_folder = "trl"
    trains = "simple"
    prepared: PreparedSimple

    def __init__(self, config: OrchestratorConfig, run_dir: Path, *, resume: bool = False) -> None:
        super().__init__(config, run_dir, resume=resume)
        self.checkpointed = 0

    async def _prepare(self) -> None:
        self.prepared = await in_thread(prepare_simple, self.config)
        if self.prepared.spec.online:
            tasks = self.prepared.tasks + self.prepared.eval_tasks
            steps = total_steps(self.config, len(self.prepared.tasks))
            await self._try_rewards(tasks, steps, loop=False)

    def _newest_checkpoint(self) -> Path | None:
        return self.store.checkpoint_path(self.checkpointed) if self.checkpointed else None

    def _clean_up(self) -> None:
        """Nothing: the worker removes what it wrote when it is closed."""

    # --- the worker -------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        from mrl.simple.worker import SimpleWorker

        config, backend = self.config, self.backend
        self.checkpointed = self.step
        await backend.reserve({self.trains: actor_resources(config)})
        rewards = reward_worker_args(config.reward) if self.prepared.spec.online else None
        if rewards is not None:
            rewards["reward_funcs"] = await rewards_for(backend, rewards["reward_funcs"])
        objects = ("train_dataset", "eval_dataset", "reward_funcs", "reward_processing_classes")
        worker = await backend.spawn(
            SimpleWorker,
            name=self.trains,
            resources=actor_resources(config),
            args={
                "options": {name: value for name, value in config.flat().items() if name not in objects}
                | await model_for(backend, config),
                "tasks": self.prepared.tasks,
                "eval_tasks": self.prepared.eval_tasks,
                "rewards": rewards,
                "max_model_len": self.prepared.max_model_len,
                "folder": backend.folder(self.run_dir, ""),
                "resume_from": None if self.point is None else await backend.put(self.point.checkpoint.path),
                "base_name": base_name(config),
            },
        )
        self.progress.facts.workers = [WorkerHealth(worker.name)]
        facts: dict[str, Any] = await self._unless_stopped(worker.call("initialize"))
        self.total_steps = facts["total_steps"]
        check_disk(self.run_dir, facts["trainable_parameters"], copies=2)
        spec, counts = self.prepared.spec, self.prepared.counts
        shown = {"trainer": f"TRL's {spec.name}", "tasks" if spec.online else "examples": counts.tasks}
        self._announce("the trainer is up", facts, shown=shown, notices=[])
        if self.step >= self.total_steps:
            return
        await worker.call(
            "start", {"tasks": fingerprint(self.prepared.tasks), "trackers": self.trackers.run_ids(), "in_flight": []}
        )
        ended = stopped = False
        while not ended:
            if self.stopping and not stopped:
                stopped = True
                await worker.call("stop")
            for record in await worker.call("next_records", POLL_SECONDS):
                ended = ended or record["kind"] == "end"
                if record["kind"] == "checkpoint":
                    await self._bring(worker, record["step"])
                self._take(record)

    async def _bring(self, worker: WorkerHandle, step: int) -> None:
        """Have a checkpoint here that the worker has written. Raises CheckpointError."""
        here = self.store.checkpoint_path(step)
        there = f"{self.backend.folder(self.run_dir, here.parent.name)}/{here.name}"
        await bring(self.backend, worker, there, here)

    def _take(self, record: dict[str, Any]) -> None:
        kind, step = record["kind"], record["step"]
        if kind == "step":
            self.step, self.metrics = step, record["metrics"] | self.cost.metrics()
            self.store.write_step(step, self.metrics, record["groups"])
            self.trackers.log(step, self.metrics)
            self.watch.look(step, record["groups"])
            self._show_completions(record["groups"])
            self._look_at_cost()
        elif kind == "eval":
            self.eval_metrics = record["metrics"]
            self.store.write_eval(step, self.eval_metrics, record["groups"])
            self.trackers.log(step, self.eval_metrics)
            self.watch.look_at_evaluation(step, record["groups"])
        elif kind == "phase":
            self._report(record)
        elif kind == "checkpoint":
            self.checkpointed = step
            self.store.event("checkpoint", str(self.store.checkpoint_path(step)), step=step)
            if self.config.training.save_total_limit is not None:
                protect = {record["best"]["step"]} if record["best"] else set()
                prune(self.run_dir, self.config.training.save_total_limit, protect)
        elif kind == "checkpoint_failed":
            self.store.event("checkpoint_failed", record["message"], step=step)
            self._note(f"step {step}: {record['message']}. Going on without it (checkpoint_errors: continue)")

    def _report(self, record: dict[str, Any]) -> None:
        """What the trainer does now; what it counts, it knows when a stage ends."""
        facts, evaluating = self.progress.facts, record["name"] == "evaluating"
        wanted = len(self.prepared.eval_tasks) if evaluating else self.config.training.batch_size
        facts.step, facts.groups_wanted = record["step"], wanted if self.prepared.spec.online else 0
        facts.groups_done, facts.tokens = record["counts"]["groups_done"], record["counts"]["tokens"]
        self.progress.stage(record["name"])


# --- checks ---------------------------------------------------------------------------------------------------------


def _load_eval(
    config: OrchestratorConfig, spec: TrainerSpec, shape: tuple[str, ...], text_column: str
) -> tuple[list[Task], list[Row], int]:
    if spec.online:
        tasks, total = load_eval_tasks(config)
        return tasks, [], total
    rows, where, _ = load_eval_rows(config)
    if rows and check_shape(rows, spec, where, text_column) != shape:
        raise ConfigError(f"eval_dataset: {where} has not the columns {', '.join(shape)} that the training data has")
    return [], draw_eval(config, rows), len(rows)


def _check_lengths(parts: list[list[Task]], encoder: PromptEncoder, context: int, config: OrchestratorConfig) -> None:
    """TRL does not end a completion where the context ends, so prompt and longest completion must fit together."""
    completion = min(config.sampled_tokens, config.algorithm.max_completion_length)
    if completion >= context:
        raise ConfigError(
            f"max_completion_length: {completion} tokens leave no room for a prompt in max_model_len ({context}), and "
            f"TRL does not end a completion there; use e.g. {context // 2}"
        )
    for part in parts:
        check_prompt_lengths(part, lambda prompt: len(encoder.encode(prompt)), context - completion)


def _check_enough(tasks: list[Task], config: OrchestratorConfig, spec: TrainerSpec) -> None:
    if spec.learns_from == "rollouts" and len(tasks) < config.training.batch_size:
        raise ConfigError(
            f"batch_size: TRL leaves out incomplete batches, and {len(tasks)} tasks do not fill one of "
            f"{config.training.batch_size}; use {len(tasks)} or less"
        )


def _as_tasks(examples: list[Row]) -> list[Task]:
    return [Task(str(index), "", example) for index, example in enumerate(examples)]
