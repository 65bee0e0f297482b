"""All sections together, and their flat names."""

from __future__ import annotations

import inspect
from typing import Any, Self

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from mrl.algorithms import LOSSES
from mrl.config.algorithm import AlgorithmConfig
from mrl.config.data import DataConfig
from mrl.config.hints import named_elsewhere
from mrl.config.model import ModelConfig
from mrl.config.overlap import OverlapConfig
from mrl.config.rollout import RolloutConfig
from mrl.config.running import GenerationConfig, RewardConfig, RunConfig, RuntimeConfig
from mrl.config.section import Section, unknown_option
from mrl.config.serving import ServingConfig
from mrl.config.simple import SimpleConfig
from mrl.config.training import TrainingConfig
from mrl.errors import ConfigError

EACH = ("reward_funcs", "tools")
"""Options that are lists of names, mappings and objects; other lists of mappings are datasets."""


class OrchestratorConfig(Section):
    """Every option of a run. Build it from sections, or flat with `from_flat`."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    serving: ServingConfig = Field(default_factory=ServingConfig)
    overlap: OverlapConfig = Field(default_factory=OverlapConfig)
    run: RunConfig = Field(default_factory=RunConfig)
    trl: SimpleConfig = Field(default_factory=SimpleConfig)

    @field_validator("model", mode="before")
    @classmethod
    def _model_by_name(cls, value: Any) -> Any:
        if isinstance(value, (str, dict, ModelConfig)):
            return {"model": value} if isinstance(value, str) else value
        raise ConfigError(
            f"model: give a name or a folder, not an object of type {type(value).__name__}; a loaded model is an "
            "argument of MRLTrainer"
        )

    @classmethod
    def from_flat(cls, **options: Any) -> OrchestratorConfig:
        """Build it from flat names. Raises ConfigError for an unknown name (with the nearest one) or a bad value."""
        return cls(**nest(options))

    def flat(self) -> dict[str, Any]:
        """Every option by its flat name."""
        return {name: getattr(getattr(self, section), name) for name, (section, _) in flat_fields().items()}

    @property
    def sampled_tokens(self) -> int:
        """After how many tokens sampling stops: `max_tokens`, else where training does."""
        return self.generation.max_tokens or self.algorithm.max_completion_length

    def to_dict(self) -> dict[str, Any]:
        """Plain data by section, for YAML and JSON. Callables and datasets become a description of themselves."""
        return {
            section: {name: _plain(getattr(part, name), each=name in EACH) for name in type(part).model_fields}
            for section, part in ((name, getattr(self, name)) for name in type(self).model_fields)
        }

    @model_validator(mode="after")
    def _algorithm_goes_with_the_rest(self) -> Self:
        algorithm, sampled = self.algorithm, self.sampled_tokens
        if self.training.num_iterations > 1 and not LOSSES.get(algorithm.loss_type).reuse:
            raise ConfigError(
                f"num_iterations: loss_type {algorithm.loss_type} has no ratio that would hold a second update to the "
                "policy that sampled; use num_iterations: 1, or another loss_type, e.g. dapo"
            )
        free = algorithm.max_completion_length - algorithm.soft_punish_cache
        if algorithm.soft_punish_cache and sampled <= free:
            raise ConfigError(
                f"soft_punish_cache: completions end at max_tokens ({sampled}), before the {free} tokens from which "
                "they would be punished; set max_completion_length to max_tokens"
            )
        return self

    @model_validator(mode="after")
    def _overlap_goes_with_the_rest(self) -> Self:
        overlap, algorithm = self.overlap, self.algorithm
        if overlap.stale_rollouts == "correct" and algorithm.importance_sampling == "none":
            raise ConfigError("stale_rollouts: correct needs importance_sampling, e.g. truncated; or use drop")
        if overlap.async_mode == "pipeline" and algorithm.zero_variance_groups == "resample":
            raise ConfigError(
                "zero_variance_groups: resample does not go with async_mode pipeline; use queue, where other groups "
                "take the places of those without a signal as they end"
            )
        if self.runtime.sync_weights_every > 1 and overlap.async_mode != "off":
            raise ConfigError(
                f"sync_weights_every: weights are sent after every step with async_mode {overlap.async_mode}; use 1, "
                "and async_mode: queue with max_staleness for older rollouts"
            )
        return self

    @model_validator(mode="after")
    def _an_evaluation_test_brings_tasks_and_score(self) -> Self:
        if self.rollout.evaluation_test is None:
            return self
        for name in ("train_dataset", "dataset_name"):
            if getattr(self.data, name) is not None:
                raise ConfigError(f"{name}: the evaluation_test brings its rows; leave one of the two out")
        own = {"evaluation_test": {"test": self.rollout.evaluation_test}}
        given = self.reward.reward_funcs
        if given is not None and not (isinstance(given, dict) and list(given) == ["evaluation_test"]):
            raise ConfigError(
                "reward_funcs: the evaluation_test says what a rollout is worth; leave one of the two out"
            )
        self.reward.reward_funcs = own
        return self

    @model_validator(mode="after")
    def _tasks_may_bring_their_reward(self) -> Self:
        from mrl.data.sources import own_reward

        if self.reward.reward_funcs is None and self.data.dataset_name is not None:
            self.reward.reward_funcs = own_reward(self.data.dataset_name)
        return self

    def notices(self) -> list[str]:
        """What a user should know before the run starts: where one option changes what another means."""
        notes = []
        limit, sampled = self.algorithm.max_completion_length, self.sampled_tokens
        if sampled > limit:
            notes.append(
                f"max_tokens ({sampled}) is above max_completion_length ({limit}): completions longer than {limit} "
                "tokens are scored and stored whole, and left out of the loss (counted as rollout/overlong). "
                f"Set max_tokens to {limit} to stop sampling there."
            )
        elif sampled < limit and "max_completion_length" in self.algorithm.model_fields_set:
            notes.append(f"max_tokens ({sampled}) ends completions before max_completion_length ({limit}).")
        if self.runtime.backend == "inline":
            given = {name: getattr(self.runtime, name) for name in ("actor_gpu", "rollout_gpu")}
            ignored = [name for name, gpu in given.items() if gpu is not None]
            if ignored:
                notes.append(
                    f"{' and '.join(ignored)}: backend inline rents no machines and uses this one's devices; of "
                    "actor_gpu it takes the number."
                )
        if self.algorithm.importance_sampling == "none" and (
            self.generation.top_p < 1 or self.generation.top_k or self.generation.min_p
        ):
            notes.append(
                "top_p, top_k or min_p filter the sampled distribution and importance_sampling is none: the policy "
                "gradient is biased. Use importance_sampling: truncated, or sample from everything (top_p: 1)."
            )
        if self.algorithm.loss_type == "gspo" and "epsilon" not in self.algorithm.model_fields_set:
            notes.append(
                f"epsilon ({self.algorithm.epsilon}): gspo's ratios hardly leave 1, so this clips nothing. Its paper "
                "uses epsilon: 3e-4 and epsilon_high: 4e-4."
            )
        return notes


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
                    if inner in fields:
                        raise ConfigError(f"{name}.{inner}: {inner} is an option of {fields[inner][0]}; move it there")
                    raise ConfigError(unknown_option(f"{name}.{inner}", inner, list(fields)))
            _merge(nested, name, values)
        elif name in fields:
            _merge(nested, fields[name][0], {name: value})
        else:
            inner = next((key for key in value if isinstance(key, str)), None) if isinstance(value, dict) else None
            shown = name if inner is None or named_elsewhere(inner) is None else f"{name}.{inner}"
            raise ConfigError(unknown_option(shown, name, [*fields, *sections]))
    return nested


def _merge(nested: dict[str, Any], section: str, values: dict[str, Any]) -> None:
    into = nested.setdefault(section, {})
    for name, value in values.items():
        if name in into:
            raise ConfigError(
                f"{name} is given twice, flat and in {section} (as {into[name]!r} and {value!r}): give it once"
            )
        into[name] = value


def _set_values(section: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, BaseModel):
        raise ConfigError(f"{section} is a group of options, found {value!r}; write them below it, or flat")
    return {name: getattr(value, name) for name in value.model_fields_set}


def _plain(value: Any, each: bool = False) -> Any:
    """each: a list is written down item by item, also where the items are mappings."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if callable(recorded := getattr(value, "recorded", None)) and not isinstance(value, type):  # a reward, a server
        return recorded()
    items = value if isinstance(value, (list, tuple)) else None
    if items is not None and (each or all(_is_short(v) for v in items)):
        return [_plain(v) for v in items]
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if callable(value):
        try:
            line = inspect.getsourcelines(value)[1]
            return f"<{value.__module__}.{value.__qualname__}, {inspect.getsourcefile(value)}:{line}>"
        except (TypeError, OSError, AttributeError):
            return f"<{type(value).__name__} {getattr(value, '__name__', '')}>"
    return f"<{type(value).__name__}, {len(value)} rows>" if hasattr(value, "__len__") else f"<{type(value).__name__}>"


def _is_short(value: Any) -> bool:
    """Whether it is no row of a dataset."""
    return isinstance(value, (str, int, float)) or callable(value) or hasattr(value, "recorded")
