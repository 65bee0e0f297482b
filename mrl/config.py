"""Every option of a run, once: the same names in Python, YAML and on the command line.

`OrchestratorConfig` groups the options by concern. `MRLTrainer(**options)`, a recipe's top level and the command line's
flags use them flat (`learning_rate`, not `training.learning_rate`): no two sections share a field name. The sentence
under each field is its documentation and the command line's help.
"""

from __future__ import annotations

import difflib
import inspect
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from mrl.algorithms import LOSSES
from mrl.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True, validate_default=False
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None


class ModelConfig(_Section):
    """The policy: which model, in which precision, all of it or an adapter."""

    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """Hub id, local folder, `starter` (the shipped policy), or a run's name or folder (its newest checkpoint)."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose authors you trust."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward pass. Master weights are always float32; `auto` = bfloat16 autocast on GPUs that have
    it, float32 elsewhere."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`; `auto` takes the best there is."""
    max_model_len: int = Field(16384, ge=2)
    """Most tokens of prompt and completion together; lowered to what the model was made for."""
    use_lora: bool = False
    """Train a low-rank adapter (LoRA, arXiv 2106.09685) instead of all weights."""
    lora_r: int = Field(16, ge=1)
    """Rank of the adapter."""
    lora_alpha: int = Field(32, ge=1)
    """The adapter's output is scaled by lora_alpha / lora_r."""
    lora_dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout on the adapter's input while training."""
    lora_target_modules: list[str] | None = None
    """Names of the modules that get an adapter; None = every linear layer but the output head."""

    @model_validator(mode="after")
    def _lora_options_need_lora(self) -> Self:
        if not self.use_lora:
            _refuse_changed(self, ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"), "use_lora: true")
        return self


class DataConfig(_Section):
    """The tasks: where they come from and how their prompts are read."""

    train_dataset: Any = None
    """A `datasets.Dataset`, a list of dicts, or a callable that returns either (Python only)."""
    dataset_name: str | None = None
    """Hub id, local folder or file (jsonl, json, csv, parquet), or `tiny-code` (the shipped tasks)."""
    dataset_config: str | None = None
    """Configuration (subset) of a Hub dataset."""
    dataset_split: str = "train"
    """Split to train on."""
    eval_dataset: Any = None
    """Held-out tasks: anything `train_dataset` or `dataset_name` takes; None = the training dataset, when there is an
    `eval_split`. Where there are held-out tasks, they are attempted before the first and after the last step."""
    eval_split: str | None = None
    """Split to evaluate on, e.g. `heldout`, `test`; None = `train` of `eval_dataset`."""
    eval_samples: int | None = Field(64, ge=1)
    """How many held-out tasks an evaluation uses, drawn once by `seed`; None = all."""
    prompt_column: str | None = None
    """Column that holds the prompt, when it is not called `prompt`."""
    rename: dict[str, str] = Field(default_factory=dict)
    """Columns to rename, `{"old": "new"}`; reward functions see the new names."""
    max_samples: int | None = Field(128, ge=0)
    """Use only the first rows of the dataset; 0 or None = all."""
    shuffle: bool = True
    """Another order of the tasks each epoch, derived from `seed`."""
    prompt_format: Literal["auto", "chat", "text"] = "auto"
    """How a text prompt reaches the model: `chat` = as a user's message through the chat template, `text` = as it is,
    `auto` = `chat` where the tokenizer has a template. Prompts that are messages always go through the template."""
    system_prompt: str | None = None
    """System message put before every prompt that has none; needs a chat template."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.train_dataset is not None and self.dataset_name is not None:
            raise ConfigError("train_dataset and dataset_name both name the training tasks: give only one")
        if self.prompt_format == "text" and self.system_prompt is not None:
            raise ConfigError("system_prompt has no effect with prompt_format: text; use prompt_format: chat")
        return self


class TrainingConfig(_Section):
    """The update: how much of what is learned from how many rollouts."""

    learning_rate: float = Field(5e-6, gt=0)
    """Peak learning rate of AdamW. About 1e-6 to 1e-5 for full weights, ten times that for LoRA."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up: constant, or down to 0 at the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay (matrices only: not biases, not norms)."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay of the gradient's mean."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW: decay of the squared gradient's mean."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm when theirs is larger."""
    max_steps: int = -1
    """Steps to run; -1 = as many as `num_epochs` takes."""
    num_epochs: int = Field(5, ge=1)
    """Passes over the tasks, unless `max_steps` says otherwise."""
    batch_size: int = Field(8, ge=1)
    """Prompts per step; a step trains on batch_size × num_generations rollouts."""
    num_generations: int = Field(4, ge=2)
    """Rollouts per prompt (G): the group whose mean is the baseline."""
    num_iterations: int = Field(1, ge=1)
    """Optimizer steps on the same rollouts (μ in GRPO); clipping starts to matter at 2."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Split each step's samples into this many micro-batches, to save memory; the update is the same for any number."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    loss_type: str = "dapo"
    """grpo, dapo, dr_grpo, bnpo, cispo or sapo; docs/algorithms.md says when to use which."""
    epsilon: float = Field(0.2, gt=0)
    """Clipping: the ratio may fall to 1 - epsilon."""
    epsilon_high: float | None = Field(None, gt=0)
    """Clipping: the ratio may rise to 1 + epsilon_high; None = epsilon (DAPO's paper: 0.28). For `cispo` it is the
    largest ratio itself; None = 5.0 (ScaleRL)."""
    sapo_temperature_pos: float = Field(1.0, gt=0)
    """`sapo`: sharpness of the soft gate where the advantage is positive."""
    sapo_temperature_neg: float = Field(1.05, gt=0)
    """`sapo`: sharpness of the soft gate where the advantage is negative."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What an advantage is divided by: its group's standard deviation, the batch's, or nothing. The group's mean is
    subtracted in every case."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the reference model (the policy before training); 0 = no reference is kept."""
    importance_sampling: Literal["none", "truncated", "masked"] = "truncated"
    """Correction for the difference between sampler and trainer (engine, top-p, min-p …): weigh each token by their
    probability ratio, capped (`truncated`), or dropped above the cap (`masked`)."""
    importance_sampling_cap: float = Field(2.0, gt=0)
    """The cap of that ratio."""
    mask_truncated_completions: bool = False
    """Leave completions that hit the token limit out of the loss (they still count in their group's mean)."""
    max_completion_length: int = Field(1024, ge=1)
    """Longest completion that is trained on, in tokens. Where it is given and `max_tokens` is not, sampling stops
    there."""
    save_steps: int = Field(100, ge=0)
    """Write a checkpoint every so many steps, and always at the end; 0 = only at the end."""
    save_total_limit: int | None = Field(None, ge=1)
    """Keep only the latest so many checkpoints, and the best one; None = all."""
    best_metric: str | None = None
    """Metric whose best checkpoint is kept and can be named RUN@best, e.g. `eval/pass_rate` or `reward/mean`; larger is
    better, or with a minus sign in front smaller."""
    checkpoint_errors: Literal["continue", "stop"] = "continue"
    """When a checkpoint cannot be written (a full disk): say so and go on with the last good one, or stop the run. The
    last checkpoint of a run has to be written in any case."""
    eval_steps: int = Field(0, ge=0)
    """Attempt the held-out tasks every so many steps too; 0 = only before the first and after the last."""
    max_failed_fraction: float = Field(0.5, ge=0, le=1)
    """Stop when more than this share of a step's rollouts could not be generated or scored."""
    seed: int = Field(42, ge=0, lt=2**31)
    """Everything random derives from it."""

    @field_validator("max_steps")
    @classmethod
    def _max_steps_is_a_count(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("use -1 (as many as num_epochs takes) or a positive number")
        return value

    @field_validator("loss_type")
    @classmethod
    def _loss_is_known(cls, value: str) -> str:
        if value not in LOSSES.names():
            raise ValueError(f"use one of {', '.join(LOSSES.names())}")
        return value

    @model_validator(mode="after")
    def _options_of_other_losses(self) -> Self:
        if self.loss_type != "sapo":
            _refuse_changed(self, ("sapo_temperature_pos", "sapo_temperature_neg"), "loss_type: sapo")
        if self.loss_type in ("cispo", "sapo"):
            _refuse_changed(self, ("epsilon",), "a clipped loss_type (grpo, dapo, dr_grpo, bnpo)")
        if self.loss_type == "sapo":
            _refuse_changed(self, ("epsilon_high",), "a clipped loss_type or cispo")
        if self.loss_type not in ("cispo", "sapo") and self.epsilon >= 1:
            raise ConfigError(f"epsilon: {self.epsilon} lets the ratio fall to 0; use a value below 1, e.g. 0.2")
        if self.importance_sampling == "none":
            _refuse_changed(self, ("importance_sampling_cap",), "importance_sampling: truncated or masked")
        return self


class GenerationConfig(_Section):
    """The rollouts: the distribution completions are drawn from, and when they stop."""

    max_tokens: int = Field(8000, ge=1)
    """Sampling stops after so many tokens; where only `max_completion_length` is given, there. Completions longer than
    `max_completion_length` are scored and stored, and left out of the loss."""
    temperature: float = Field(0.7, ge=0)
    """Logits are divided by it, while sampling and while training."""
    top_p: float = Field(0.9, gt=0, le=1)
    """Sample from the smallest set of tokens whose probability reaches this; 1 = from all."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 = from all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Drop tokens less likely than this fraction of the most likely one; 0 = none."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a completion, besides the model's own end token."""


class RewardConfig(_Section):
    """The score: which functions, how they are joined, where untrusted code runs."""

    reward_funcs: Any = None
    """One or several of: `sandbox` (run the tests: 0 or 1), `sandbox_partial` (fraction passed), `file.py:function`,
    `package.module:function`, or callables (Python only). None = `sandbox`."""
    reward_weights: list[float] | None = None
    """Weights of a sum over the functions; None = their mean."""
    reward_timeout: float = Field(60.0, gt=0)
    """Seconds a reward function may take for one batch."""
    sandbox: str = "auto"
    """Where tested programs run: `auto` = `local`, isolated on this machine, where that works (`mrl sandbox check`), else
    an error; `process` = limits only, for code that does not set out to cheat."""
    sandbox_timeout: float = Field(10.0, gt=0)
    """Wall-clock and CPU seconds a tested program may take."""
    sandbox_memory_mb: int = Field(512, ge=32)
    """Address space a tested program may use, in MB."""


class RuntimeConfig(_Section):
    """Where things run and how weights travel."""

    backend: str = "inline"
    """Where workers live: `inline` = objects in this process."""
    engine: str = "transformers"
    """What rollout workers generate with."""
    num_rollout_workers: int = Field(2, ge=1)
    """Workers that generate. In one process one is best; with `direct` they all share the actor's weights."""
    actor_gpu: str = "A100"
    """GPU type of the actor on backends that rent machines; `inline` uses the device that is there."""
    rollout_gpu: str = "A10G"
    """GPU type of each rollout worker on backends that rent machines."""
    weight_sync_method: str = "reload"
    """How new weights reach the rollout workers: `reload` (through files, each worker has a copy) or `direct` (the
    actor's own module is shared: no copy, no time)."""
    sync_weights_every: int = Field(1, ge=1)
    """Steps between weight syncs; above 1 the rollouts are off-policy in between."""
    call_timeout: float = Field(3600.0, gt=0)
    """Seconds any call to a worker may take before the worker counts as dead."""


class RunConfig(_Section):
    """The record: where it goes and who else is told."""

    run_dir: str | None = None
    """This run's folder; None = `runs/` + `run_name`."""
    run_name: str | None = None
    """Name of the run; None = from model, dataset and time."""
    report_to: list[str] = Field(default_factory=lambda: ["console"])
    """Trackers told of every step, besides the run's own folder: console (live progress), jsonl, wandb, trackio,
    tensorboard, mlflow (docs/tracking.md); an empty list for none."""
    log_completions: int = Field(0, ge=0)
    """Print so many sampled completions with their rewards after each step."""
    resume: str | None = None
    """Go on with a run: its name or folder, or `auto` for the one at `run_dir` or `run_name`, which is started if there
    is none yet. Its own options hold; only what would not make it another run may change."""
    allow_change: list[str] = Field(default_factory=list)
    """Options that may differ from the resumed run's although that makes it another run."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.run_dir is not None and self.run_name is not None:
            raise ConfigError("run_dir and run_name both say where the run goes: give only one")
        if self.resume == "auto" and self.run_dir is None and self.run_name is None:
            raise ConfigError("resume: auto needs run_dir or run_name, to know which run to look for")
        if self.resume is None and self.allow_change:
            raise ConfigError("allow_change has an effect only with resume")
        return self


class OrchestratorConfig(_Section):
    """Every option of a run. Build it from sections, or flat with `from_flat`."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    @field_validator("model", mode="before")
    @classmethod
    def _model_by_name(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value

    @classmethod
    def from_flat(cls, **options: Any) -> OrchestratorConfig:
        """Build it from flat names. Raises ConfigError for an unknown name (with the nearest one) or a bad value."""
        return cls(**nest(options))

    def flat(self) -> dict[str, Any]:
        """Every option by its flat name."""
        return {name: getattr(getattr(self, section), name) for name, (section, _) in flat_fields().items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain data by section, for YAML and JSON. Callables and datasets become a description of themselves."""
        return {
            section: {name: _plain(getattr(part, name)) for name in type(part).model_fields}
            for section, part in ((name, getattr(self, name)) for name in type(self).model_fields)
        }

    @model_validator(mode="after")
    def _sampling_stops_where_training_does(self) -> Self:
        given = self.training.model_fields_set | self.generation.model_fields_set
        if "max_completion_length" in given and "max_tokens" not in given:
            self.generation.max_tokens = self.training.max_completion_length
        return self

    def notices(self) -> list[str]:
        """What a user should know before the run starts: where one option changes what another means."""
        notes = []
        limit, sampled = self.training.max_completion_length, self.generation.max_tokens
        if sampled > limit:
            notes.append(
                f"max_tokens ({sampled}) is above max_completion_length ({limit}): completions longer than {limit} "
                "tokens are scored and stored whole, and left out of the loss (counted as rollout/overlong). "
                f"Set max_tokens to {limit} to stop sampling there."
            )
        elif sampled < limit and "max_completion_length" in self.training.model_fields_set:
            notes.append(f"max_tokens ({sampled}) ends completions before max_completion_length ({limit}).")
        if self.runtime.backend == "inline":
            ignored = [n for n in ("actor_gpu", "rollout_gpu") if n in self.runtime.model_fields_set]
            if ignored:
                notes.append(f"{' and '.join(ignored)}: backend inline rents no machines and uses this one's device.")
        if self.training.importance_sampling == "none" and (
            self.generation.top_p < 1 or self.generation.top_k or self.generation.min_p
        ):
            notes.append(
                "top_p, top_k or min_p cut the sampled distribution and importance_sampling is none: the policy "
                "gradient is biased. Use importance_sampling: truncated, or sample from everything (top_p: 1)."
            )
        return notes


# --- flat names and files -------------------------------------------------------------------------------------------


def flat_fields() -> dict[str, tuple[str, FieldInfo]]:
    """Flat option name → (its section, its pydantic field), in the order of this file."""
    return {
        name: (section, field)
        for section, part in OrchestratorConfig.model_fields.items()
        for name, field in part.annotation.model_fields.items()  # type: ignore[union-attr]
    }


def nest(options: dict[str, Any]) -> dict[str, Any]:
    """Options by section. Takes flat names, whole sections, or both; raises ConfigError for names there are not."""
    fields, sections = flat_fields(), OrchestratorConfig.model_fields
    nested: dict[str, Any] = {}
    for name, value in options.items():
        if name in sections and (isinstance(value, (dict, BaseModel)) or name not in fields):
            values = value if isinstance(value, dict) else _set_values(name, value)
            for inner in values:
                if inner not in sections[name].annotation.model_fields:  # type: ignore[union-attr]
                    raise ConfigError(_unknown(f"{name}.{inner}", inner, list(fields)))
            _merge(nested.setdefault(name, {}), values)
        elif name in fields:
            _merge(nested.setdefault(fields[name][0], {}), {name: value})
        else:
            raise ConfigError(_unknown(name, name, [*fields, *sections]))
    return nested


def load_yaml(path: str | Path) -> dict[str, Any]:
    """A recipe's options, flat or by section. Raises ConfigError naming file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give the path of a YAML recipe") from None
    try:
        options = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: not valid YAML: {problem}") from None
    if options is None:
        return {}
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        raise ConfigError(f"{path}: a recipe is a list of `option: value` lines, found {type(options).__name__}")
    return {key: _yaml_numbers(value) for key, value in options.items()}


def _yaml_numbers(value: Any) -> Any:
    """YAML 1.1 reads `1e-5` as text (it wants `1.0e-5`); people write the former."""
    if isinstance(value, dict):
        return {key: _yaml_numbers(inner) for key, inner in value.items()}
    if isinstance(value, str) and "e" in value.lower() and value[:1] in "+-.0123456789":
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name in into and into[name] != value:
            raise ConfigError(f"{name} is given twice, as {into[name]!r} and {value!r}: give it once")
        into[name] = value


def _set_values(section: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, BaseModel):
        raise ConfigError(f"{section} is a group of options, found {value!r}; write them below it, or flat")
    return {name: getattr(value, name) for name in value.model_fields_set}


def _unknown(shown: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else "; `mrl train --help` lists them"
    return f"unknown option {shown!r}{hint}"


def _refuse_changed(section: _Section, names: tuple[str, ...], needs: str) -> None:
    for name in names:
        if getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True):
            raise ConfigError(f"{name} has an effect only with {needs}: set that, or leave {name} out")


def _explain(section: type[_Section], error: ValidationError) -> str:
    """Pydantic's report, as sentences that name the option, what was found and what would work."""
    sentences = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"]) or section.__name__
        found = problem["input"]
        if problem["type"] == "extra_forbidden":
            sentences.append(_unknown(name, name, list(section.model_fields)))
            continue
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        field = section.model_fields.get(name.split(".")[0])
        default = (
            ""
            if field is None or field.is_required()
            else f" (default: {field.get_default(call_default_factory=True)!r})"
        )
        sentences.append(f"{name}: {message}; found {found!r}{default}")
    return "; ".join(sentences)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(v, (str, int, float)) or callable(v) for v in value):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if callable(value):
        try:
            line = inspect.getsourcelines(value)[1]
            return f"<{value.__module__}.{value.__qualname__}, {inspect.getsourcefile(value)}:{line}>"
        except (TypeError, OSError, AttributeError):
            return f"<{type(value).__name__} {getattr(value, '__name__', '')}>"
    return f"<{type(value).__name__}, {len(value)} rows>" if hasattr(value, "__len__") else f"<{type(value).__name__}>"
