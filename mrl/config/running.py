"""Options of the rollouts, the score, the places where things run, and the record."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from mrl.config.section import Section, refuse_changed
from mrl.errors import ConfigError

_GPU = re.compile(r"[A-Za-z][\w.+-]*(:[1-9]\d*)?")
"""A type, as the backend names it, and how many: `H100`, `A100-80GB:4`."""


def type_and_number(gpu: str) -> tuple[str, int]:
    """Of GPUs, as `actor_gpu` gives them: ("A100", 2) of `A100:2`."""
    kind, _, number = gpu.partition(":")
    return kind, int(number or 1)


class GenerationConfig(Section):
    """The rollouts: the distribution completions are drawn from, and when they stop."""

    max_tokens: int | None = Field(None, ge=1)
    """Sampling stops after so many tokens; None = at `max_completion_length`. Completions longer than that are scored
    and stored, and left out of the loss."""
    temperature: float = Field(1.0, ge=0)
    """Logits are divided by it, while sampling and while training."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens whose probability reaches this; 1 = from all."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 = from all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Drop tokens less likely than this fraction of the most likely one; 0 = none."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a completion, besides the model's own end token."""


class RewardConfig(Section):
    """The score: which functions, how they are joined, where untrusted code runs."""

    reward_funcs: Any = None
    """One or several of: `sandbox` (run the tests: 0 or 1), `sandbox_partial` (fraction passed), `math_verify` (equal
    to the column `answer`), `reasoning_gym` (its tasks' verifier), `file.py:function`, `package.module:function`, a
    sequence classifier by its Hub id or folder, `{judge: {…}}` or a YAML file with it (docs/judges.md), or, in Python
    only, callables, models and `Judge`s. None = the rollout source's or the dataset's own where they have one, else
    `sandbox`."""
    reward_processing_classes: Any = None
    """Tokenizers of the models among `reward_funcs`, one (or None) for each reward; None = the models' own."""
    reward_weights: list[float] | None = None
    """Weights of a sum over the functions; None = their mean."""
    reward_timeout: float = Field(60.0, gt=0)
    """Seconds a reward function may take for one batch."""
    reward_trial: bool = True
    """Call each reward function with made-up completions before the run, to find one that takes text for messages or
    the other way round. Off: for functions that count their calls, or pay for them."""
    sandbox: str = "auto"
    """Where tested programs run: `auto` = `local`, isolated on this machine, where that works (`mrl sandbox check`),
    else an error; `modal` = on machines of Modal's; `process` = limits only, for code that does not set out to
    cheat."""
    sandbox_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the sandbox by name, e.g. `{"slots": 4, "modules": ["numpy"]}` for `auto` and `local`, `{"machines":
    8}` for `modal`; docs/sandbox.md lists them."""
    sandbox_timeout: float = Field(30.0, gt=0)
    """Wall-clock and CPU seconds a tested program may take."""
    sandbox_memory_mb: int = Field(512, ge=32)
    """Address space a tested program may use, in MB."""


class RuntimeConfig(Section):
    """Where things run and how weights travel."""

    backend: str = "inline"
    """Where workers live: `inline` = objects in this process, `ray` = a Ray cluster, `modal` = containers at Modal."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the backend's own, by name; `inline` has none."""
    engine: str = "transformers"
    """What rollout workers generate with: `transformers`, `vllm` (in a process of its own) or `vllm-remote` (servers
    that run already); see docs/vllm.md."""
    num_rollout_workers: int = Field(1, ge=1)
    """Workers that generate. In one process one is best; with `direct` they all share the actor's weights."""
    num_reward_workers: int = Field(1, ge=1)
    """Workers that score. With several, each reward function gets a share of the batch in each, the rollouts of a task
    together; with one, the whole batch."""
    actor_gpu: str | None = None
    """GPU type of the actor, with their number where it is above 1: `A100:4`; `cpu` for none, `cpu:2` for two processes
    without. None = the backend's choice (`ray`: one GPU of any type, if the cluster has any; `modal`: A100); `inline`
    uses the device that is there."""
    rollout_gpu: str | None = None
    """The same for each rollout worker; `modal` chooses A10."""
    weight_sync_method: str = "reload"
    """How new weights reach the rollout workers (docs/weight-sync.md): `reload` (files), `direct` (the actor's own
    module in one process, shared memory on one machine), `volume` (a shared disk), `object_store` (Ray's), `delta`
    (what changed), `checkpoint` (the engine is rebuilt). Where it is not given, backends on several machines take
    another one: docs/weight-sync.md has a table."""
    weight_sync_dir: str | None = None
    """Directory for methods that write files: a memory-backed one is fastest, `volume` needs one that all machines see.
    None = the run's folder."""
    delta_over: Literal["reload", "volume", "direct"] = "reload"
    """With `delta`, how the difference travels."""
    delta_full_every: int = Field(20, ge=1)
    """With `delta`, versions between two full copies."""
    sync_weights_every: int = Field(1, ge=1)
    """Steps between weight syncs; above 1 the rollouts are off-policy in between."""
    sync_timeout: float = Field(300.0, gt=0)
    """Seconds a weight update may take; a rollout worker that needs longer is replaced. So is one that answers nothing
    at all for as long, and for at least a minute."""
    max_worker_restarts: int = Field(10, ge=0)
    """Workers that died or could not be updated that a run replaces before it stops: of the rollout workers, of the
    reward workers, and of the actor so many each. With a new actor the run goes on from its last checkpoint."""
    call_timeout: float = Field(3600.0, gt=0)
    """Seconds any call to a worker may take before the worker counts as dead."""
    max_cost: float | None = Field(None, gt=0)
    """Dollars: a run that has cost so much, over all its sessions, ends with a checkpoint. For backends that rent
    machines (docs/cost.md). Looked at after every step."""

    @field_validator("actor_gpu", "rollout_gpu")
    @classmethod
    def _type_and_number(cls, value: str | None, field: ValidationInfo) -> str | None:
        if value is not None and not _GPU.fullmatch(value):
            raise ConfigError(
                f"{field.field_name}: {value!r} is no type of GPU with a number; give e.g. A100, or A100:2 for two"
            )
        return value

    @model_validator(mode="after")
    def _options_of_other_methods(self) -> Self:
        if self.weight_sync_method != "delta":
            refuse_changed(self, ("delta_over", "delta_full_every"), "weight_sync_method: delta")
        if self.weight_sync_method == "direct":
            refuse_changed(self, ("weight_sync_dir",), "a weight_sync_method that writes files: reload, volume, delta")
        return self


class RunConfig(Section):
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
