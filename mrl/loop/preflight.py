"""Everything that can be checked before the expensive part starts: data, rewards, names, lengths, disk."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.backends import BACKENDS
from mrl.config import OrchestratorConfig, RewardConfig
from mrl.config.ranks import check_ranks
from mrl.data import check_prompt_lengths, load_rows, require_columns
from mrl.data.load import Loaded
from mrl.data.tasks import Row, rows_to_tasks
from mrl.engines import ENGINES
from mrl.engines.vllm import devices as vllm_devices
from mrl.errors import ConfigError
from mrl.evaltests.carried import tasks_of
from mrl.evaltests.find import find_test
from mrl.evaltests.rows import EvaluationRow
from mrl.experience.metric_names import check_best_metric, loggers, metric_names
from mrl.loop.colocate import check_colocate, gpu_shares
from mrl.loop.images import check_images, processor_of
from mrl.loop.resources import (
    actor_ranks,
    check_resources,
    needs,
    reward_resources,
    rollout_resources,
    settle_sync,
    shares_modules,
)
from mrl.models import context_length, load_config, load_tokenizer, pick_device
from mrl.rollouts import ROLLOUT_SOURCES, BatchSource, RolloutSource, SourceSetup, TurnLimits, check_source
from mrl.rollouts.prompts import PromptEncoder
from mrl.sandbox import SANDBOXES
from mrl.sync import SYNC_METHODS
from mrl.system.units import plural, size
from mrl.tracking import check_trackers
from mrl.types import SamplingParams, Task, derive_seed
from mrl.workers.reward import RewardWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES_PER_PARAMETER = 4
"""Checkpoints hold float32 master weights."""


@dataclass
class Prepared:
    """What the checks found out, for the run to use."""

    tasks: list[Task]
    eval_tasks: list[Task]
    tokenizer: PreTrainedTokenizerBase
    encoder: PromptEncoder
    max_model_len: int
    notices: list[str]
    counts: Counts
    early_scoring: bool
    """Whether a group is scored while others are still being sampled."""
    source: RolloutSource | BatchSource
    """What makes the rollouts."""
    setup: SourceSetup
    """What it was made from."""


@dataclass(frozen=True)
class Counts:
    """How many tasks a run takes, of how many there are: "128 of 500", or "500"."""

    tasks: str
    held_out: str


def prepare(config: OrchestratorConfig) -> Prepared:
    """Check a run's configuration against the world. Raises the typed error of whatever will not do."""
    check_names(config)
    check_resources(config, *needs(config).values())
    check_ranks(config.training, config.model, actor_ranks(config))
    settle_sync(config)
    _let_source_score(config)
    if config.generation.temperature == 0:
        raise ConfigError("temperature: 0 always samples the same tokens, so there is nothing to learn from; use 1.0")
    if config.runtime.weight_sync_method == "direct" and config.runtime.sync_weights_every > 1:
        raise ConfigError(
            "sync_weights_every: with weight_sync_method direct the workers share the actor's module and always have "
            "its newest weights; use weight_sync_method: reload, or sync_weights_every: 1"
        )
    _check_shared_weights(config)
    _check_stale_sync(config)
    check_engine(config)
    gpu_notices = vllm_devices.notices(*engine_gpus(config)) if config.runtime.engine == "vllm" else []
    colocated = colocated_places(config)
    rewards = RewardWorker(**reward_worker_args(config.reward))
    tasks, all_tasks = load_train_tasks(config)
    eval_tasks, all_eval_tasks = load_eval_tasks(config)
    source = ROLLOUT_SOURCES.get(config.rollout.source)
    counted = getattr(source, "metric_names", ())
    names = metric_names(config, rewards.rewards, evaluates=bool(eval_tasks), of_source=counted)
    notices = check_best_metric(
        config.training.best_metric, names, loggers(rewards.rewards), evaluates=bool(eval_tasks)
    )
    for part in (tasks, eval_tasks):
        if part:
            check_rewards(rewards, part, config)
    if eval_tasks:
        rewards.check_attempts(1)
    counts = Counts(taken_of(len(tasks), all_tasks), taken_of(len(eval_tasks), all_eval_tasks))
    prepared = _with_model(config, tasks, eval_tasks, counts, rewards)
    _check_test(config, prepared.source)
    if colocated:
        _, actor = engine_gpus(config)
        assert actor is not None
        gpu_notices = [gpu_shares(config, actor, prepared.max_model_len).sentence(actor)]
    prepared.notices += gpu_notices + notices
    return prepared


def _let_source_score(config: OrchestratorConfig) -> None:
    """A source whose rollouts arrive with their reward needs no reward function."""
    source = ROLLOUT_SOURCES.get(config.rollout.source)
    scores = getattr(source, "scores", False)
    if config.reward.reward_funcs is None and (scores(**config.rollout.source_options) if callable(scores) else scores):
        config.reward.reward_funcs = "own"


def _check_test(config: OrchestratorConfig, source: Any) -> None:
    """Whether an evaluation test can be trained on."""
    if config.rollout.evaluation_test is None:
        return
    test = find_test(config.rollout.evaluation_test)
    if not getattr(source, "can_train", True):
        raise ConfigError(
            f"evaluation_test: {test.name}: {type(source.processor).__name__} makes rollouts whose tokens nobody sees, "
            "so nothing can be learned from them; use SingleTurnRolloutProcessor, AgentRolloutProcessor, "
            "OpenEnvRolloutProcessor or RemoteRolloutProcessor"
        )
    if test.mode == "all" and config.runtime.num_reward_workers > 1:
        raise ConfigError(
            f"num_reward_workers: {test.name} has mode all, which scores a step's rollouts in one call; use 1"
        )


def _check_shared_weights(config: OrchestratorConfig) -> None:
    """A module that is being trained cannot sample."""
    runtime, overlap, mode = config.runtime, config.overlap, config.overlap.async_mode
    if runtime.weight_sync_method != "direct":
        return
    shares = shares_modules(config) and "module" in getattr(ENGINES.get(runtime.engine), "accepts", ("module",))
    if shares and mode != "off":
        raise ConfigError(
            f"async_mode: {mode} needs rollout workers with weights of their own, and with weight_sync_method direct "
            "they share the actor's module; use weight_sync_method: reload"
        )
    if shares and overlap.over_sampling > 1:
        raise ConfigError(
            f"over_sampling: {overlap.over_sampling:g} leaves rollouts behind that still decode when the step trains, "
            "and with weight_sync_method direct they do so on the actor's own module; use weight_sync_method: reload, "
            "or over_sampling: 1"
        )


def _check_stale_sync(config: OrchestratorConfig) -> None:
    """Checkpoints keep the samplers' weights where they are older than the actor's, which takes a file of them."""
    runtime = config.runtime
    adapter = config.model.use_lora and runtime.engine != "transformers" and config.serving.lora_sync == "adapter"
    if adapter and runtime.weight_sync_method == "delta":
        raise ConfigError("weight_sync_method: delta sends all weights; use lora_sync: merged, or reload")
    if runtime.sync_weights_every == 1:
        return
    if runtime.weight_sync_method in ("delta", "checkpoint", "object_store"):
        raise ConfigError(
            f"sync_weights_every: above 1 it needs weight_sync_method reload or volume, found "
            f"{runtime.weight_sync_method}"
        )
    if adapter:
        raise ConfigError("sync_weights_every: above 1 it needs lora_sync: merged, so that a resumed run can go on")


def prepare_evaluation(config: OrchestratorConfig, by: str | None = None, attempts: int = 1) -> Prepared:
    """The same checks for an evaluation of the tasks in `dataset_split`. by: a column it groups by. attempts: at each
    task."""
    check_names(config)
    check_resources(config, rollout_resources(config), reward_resources())
    _let_source_score(config)
    check_engine(config)
    rewards = RewardWorker(**reward_worker_args(config.reward))
    tasks, all_tasks = load_train_tasks(config)
    check_rewards(rewards, tasks, config)
    rewards.check_attempts(attempts)
    if by is not None:
        require_columns(tasks, [by], "by: breaking the results down")
    return _with_model(config, tasks, [], Counts(taken_of(len(tasks), all_tasks), "0"), rewards)


def check_engine(config: OrchestratorConfig) -> None:
    """Raise ConfigError for options that the engine has no use for, or when this machine lacks what it needs, if it is
    to run here."""
    name, backend = config.runtime.engine, config.runtime.backend
    options = config.serving.options_of(name)
    here = BACKENDS.get(backend).shares_memory
    if config.serving.vllm_devices and not here:
        raise ConfigError(f"vllm_devices: backend {backend} chooses them; use rollout_gpu, with their number: A100:2")
    if here and (check := getattr(ENGINES.get(name), "check", None)):
        check(**options)


def engine_gpus(config: OrchestratorConfig) -> tuple[list[list[int]], int | None]:
    """The GPUs of each of a run's vLLM engines, and the actor's (None = it is on none), as far as they are chosen here:
    workers that are elsewhere use what they see. Raises ConfigError."""
    import torch

    if not BACKENDS.get(config.runtime.backend).shares_memory:
        return [[] for _ in range(config.runtime.num_rollout_workers)], None
    seen = torch.cuda.device_count()
    actor = vllm_devices.actors_gpu(config.model.device, seen)
    engines, ranks = config.runtime.num_rollout_workers, actor_ranks(config)
    return vllm_devices.share_out(config.serving, engines, seen, actor, ranks), actor


def colocated_places(config: OrchestratorConfig) -> list[int]:
    """With `colocate`, which rollout workers share the actor's GPU. Raises ConfigError where it cannot be."""
    import torch

    if not config.serving.colocate:
        return []
    gpus, actor = engine_gpus(config)
    check_colocate(config, gpus, actor, torch.cuda.device_count())
    return [place for place, own in enumerate(gpus) if actor in own]


def check_rewards(rewards: RewardWorker, tasks: list[Task], config: OrchestratorConfig) -> None:
    """Raise RewardError or DataError when a reward cannot score these tasks."""
    looks = config.rollout.environment_factory is not None and BACKENDS.get(config.runtime.backend).shares_memory
    if config.rollout.source != "rollout_func":  # whose further lists are columns too
        rewards.check_columns([*tasks[0].columns, *(["environments"] if looks else [])])
    rewards.check_rows([(task.id, task.columns) for task in tasks])


def reward_worker_args(reward: RewardConfig) -> dict[str, Any]:
    """What a `RewardWorker` is made with."""
    return {
        "reward_funcs": reward.reward_funcs,
        "reward_weights": reward.reward_weights,
        "reward_timeout": reward.reward_timeout,
        "reward_processing_classes": reward.reward_processing_classes,
        "sandbox": reward.sandbox,
        "sandbox_options": reward.sandbox_options,
        "sandbox_limits": {
            "wall_seconds": reward.sandbox_timeout,
            "cpu_seconds": reward.sandbox_timeout,
            "memory_mb": reward.sandbox_memory_mb,
        },
    }


def taken_of(taken: int, total: int | None) -> str:
    """How many rows were taken of how many, as text. total: None = a stream, which nobody counted."""
    return f"the first {taken}" if total is None else str(taken) if taken == total else f"{taken} of {total}"


def load_train_tasks(config: OrchestratorConfig) -> tuple[list[Task], int | None]:
    """The tasks to train on, and of how many `max_samples` took them. Raises ConfigError when none are named, DataError
    when they will not do."""
    loaded = load_train_rows(config)
    return _tasks_of(config, loaded), loaded.total


def _tasks_of(config: OrchestratorConfig, loaded: Loaded) -> list[Task]:
    owned = config.rollout.environment_factory is not None
    return rows_to_tasks(loaded.rows, loaded.where, need_prompts=not owned)


def load_train_rows(config: OrchestratorConfig) -> Loaded:
    """The rows behind them. Raises ConfigError, DataError."""
    data = config.data
    if config.rollout.evaluation_test is not None:
        return _test_rows(config, find_test(config.rollout.evaluation_test).training_rows(), data.max_samples)
    source = data.train_dataset if data.train_dataset is not None else data.dataset_name
    if source is None and config.rollout.environment_factory is not None:
        return _placeholders(config)
    if source is None:
        raise ConfigError(
            "no dataset: set dataset_name (a Hub id, file or folder, or tiny-code), or pass train_dataset in Python"
        )
    return _load(config, source, data.dataset_split, data.max_samples)


def _test_rows(config: OrchestratorConfig, rows: list[EvaluationRow], limit: int | None) -> Loaded:
    """Rows of an evaluation test, as those of a dataset."""
    taken = tasks_of(rows[: limit or None])
    columns = [{"id": task.id, "prompt": task.prompt, **task.columns} for task in taken]
    return Loaded(columns, f"evaluation_test {config.rollout.evaluation_test}", len(rows))


def _placeholders(config: OrchestratorConfig) -> Loaded:
    """Rows without anything, for environments that make their tasks themselves: as many as a step has."""
    if isinstance(config.rollout.environment_factory, dict):
        raise ConfigError(
            "no dataset: with several environments it needs a column 'environment' that says which a task has; set "
            "dataset_name or train_dataset"
        )
    if config.training.max_steps < 1:
        raise ConfigError(
            "no dataset: where the environment makes its tasks itself, max_steps says how long to train; set it, or "
            "dataset_name or train_dataset"
        )
    return Loaded([{} for _ in range(config.training.batch_size)], "no dataset", config.training.batch_size)


def load_eval_tasks(config: OrchestratorConfig) -> tuple[list[Task], int]:
    """The held-out tasks, and of how many they were drawn; none when nothing says where they are. Raises ConfigError,
    DataError."""
    loaded = load_eval_rows(config)
    tasks = _tasks_of(config, loaded) if loaded.rows else []
    return [tasks[index] for index in _drawn(config, len(tasks))], len(tasks)


def load_eval_rows(config: OrchestratorConfig) -> Loaded:
    """All rows of the held-out data, of which `eval_samples` are drawn. Raises ConfigError, DataError."""
    data = config.data
    if data.eval_dataset is None and data.eval_split is None:
        if config.training.eval_steps:
            raise ConfigError("eval_steps needs held-out tasks: set eval_split or eval_dataset")
        return Loaded([], "", 0)
    if config.rollout.evaluation_test is not None:
        if data.eval_split is not None or data.eval_dataset is None:
            raise ConfigError(
                "eval_split: the evaluation_test's rows have no splits; give eval_dataset, a file of rows held out"
            )
        return _test_rows(config, find_test(config.rollout.evaluation_test).rows_of(data.eval_dataset), None)
    source = next(s for s in (data.eval_dataset, data.train_dataset, data.dataset_name) if s is not None)
    return _load(config, source, data.eval_split or "train", None)


def draw_eval(config: OrchestratorConfig, rows: list[Row]) -> list[Row]:
    """The held-out rows of an evaluation: the same draw as for tasks."""
    return [rows[index] for index in _drawn(config, len(rows))]


def _drawn(config: OrchestratorConfig, count: int) -> list[int]:
    wanted = config.data.eval_samples
    if wanted is None or wanted >= count:
        return list(range(count))
    # Drawn, not the first: files are often sorted by kind.
    return random.Random(derive_seed(config.training.seed, "held-out")).sample(range(count), wanted)


def total_steps(config: OrchestratorConfig, tasks: int) -> int:
    """Steps of the whole run: `max_steps`, or as many whole batches as it takes to attempt every task `num_epochs`
    times."""
    training = config.training
    return training.max_steps if training.max_steps > 0 else -(-training.num_epochs * tasks // training.batch_size)


def check_disk(folder: Path, parameters: int, copies: int) -> None:
    """Raise ConfigError when `copies` checkpoints of so many parameters cannot fit beside `folder`."""
    needed = parameters * BYTES_PER_PARAMETER * copies
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"run_dir: {folder} has {size(free)} free and {plural(copies, 'checkpoint')} need {size(needed)}; "
            "free space, choose another run_dir, or raise save_steps"
        )


def _with_model(
    config: OrchestratorConfig, tasks: list[Task], eval_tasks: list[Task], counts: Counts, rewards: RewardWorker
) -> Prepared:
    model_config = load_config(config.model)
    tokenizer = load_tokenizer(config.model)
    processor = processor_of(config)
    encoder = PromptEncoder.of(tokenizer, config.data, processor)
    check_images(config, [*tasks, *eval_tasks], taken=processor is not None)
    max_model_len = context_length(model_config, config.model.max_model_len)
    for part in (tasks, eval_tasks):
        check_prompt_lengths(part, lambda prompt: len(encoder.encode(prompt)), max_model_len - 1)
    notices = _notices(config, max_model_len) + encoder.notices()
    vocabulary = model_config.get_text_config().vocab_size
    setup = SourceSetup(tokenizer, encoder, sampling_params(config), turn_limits(config), vocabulary)
    made = ROLLOUT_SOURCES.get(config.rollout.source).create(setup, **config.rollout.source_options)
    gives = getattr(made, "gives_rewards", None)
    if config.reward.reward_funcs == "own" and gives is not None and not gives():
        raise ConfigError(
            "reward_funcs: the environment has no get_reward and no step_reward, so give a function that says what "
            "counts"
        )
    for part in filter(None, (tasks, eval_tasks)):
        if check := getattr(made, "check_tasks", None):
            check(part)
    early = _can_score_early(config, rewards)
    return Prepared(tasks, eval_tasks, tokenizer, encoder, max_model_len, notices, counts, early, made, setup)


def sampling_params(config: OrchestratorConfig) -> SamplingParams:
    """The run's sampling distribution and limits."""
    generation = config.generation
    return SamplingParams(
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
        max_tokens=config.sampled_tokens,
        stop=tuple(generation.stop),
    )


def turn_limits(config: OrchestratorConfig) -> TurnLimits:
    """The run's limits of attempts of several turns."""
    options = config.rollout
    return TurnLimits(
        turns=options.max_turns,
        turn_tokens=config.generation.max_tokens,
        rollout_tokens=options.max_rollout_tokens or config.algorithm.max_completion_length,
        step_seconds=options.step_timeout,
        rollout_seconds=options.rollout_timeout,
    )


def _can_score_early(config: OrchestratorConfig, rewards: RewardWorker) -> bool:
    """Whether rewards may look at a group by itself, and take nothing from who samples meanwhile: a CPU that decodes
    and tests programs at once does both more slowly than one after the other."""
    runtime = config.runtime
    here = BACKENDS.get(runtime.backend).shares_memory and runtime.engine != "vllm-remote"
    samples_on_cpu = here and pick_device(config.model.device).type == "cpu"
    return not samples_on_cpu and all(getattr(reward, "independent", False) for reward in rewards.rewards)


def check_names(config: OrchestratorConfig) -> None:
    """Raise ConfigError for a backend, engine, sync method, sandbox, rollout source or tracker there is not."""
    runtime = config.runtime
    for registry, name in (
        (BACKENDS, runtime.backend),
        (ENGINES, runtime.engine),
        (SYNC_METHODS, runtime.weight_sync_method),
        (SANDBOXES, config.reward.sandbox),
    ):
        registry.get(name)
    source = check_source(config.rollout.source, config.rollout.source_options)
    for limit in ("rollout_timeout", "max_concurrent_rollouts"):
        if hasattr(source, "collect") and getattr(config.rollout, limit) is not None:
            raise ConfigError(
                f"{limit}: rollout_source {config.rollout.rollout_source} makes all rollouts of a step in one call, so "
                "there are no single attempts to limit; leave it out"
            )
    check_trackers(config.run.report_to)


def _load(config: OrchestratorConfig, source: Any, split: str, max_samples: int | None) -> Loaded:
    data = config.data
    return load_rows(
        source,
        config=data.dataset_config,
        split=split,
        prompt_column=data.prompt_column,
        rename=data.rename,
        max_samples=max_samples,
        seed=config.training.seed,
    )


def _notices(config: OrchestratorConfig, max_model_len: int) -> list[str]:
    notes = config.notices()
    if max_model_len < config.model.max_model_len and "max_model_len" in config.model.model_fields_set:
        notes.append(f"max_model_len: {config.model.model} was made for {max_model_len} tokens; using that.")
    name = "max_completion_length" if config.generation.max_tokens is None else "max_tokens"
    given = config.generation.model_fields_set | config.algorithm.model_fields_set
    if config.sampled_tokens >= max_model_len and name in given:
        notes.append(
            f"{name} ({config.sampled_tokens}): prompt and completion share {max_model_len} tokens, so "
            "completions end earlier."
        )
    return notes
