"""The options of a run in simple mode: refused where they mean nothing, written to the trainer's configuration else.

What each option means is in the table of mrl/simple/option_table.py. One that means nothing to the chosen trainer must
keep its default: nothing is accepted and ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from mrl.config import OrchestratorConfig, flat_fields
from mrl.errors import ConfigError
from mrl.simple.option_rows import ChosenOptions, Meaning, TrainerFacts, TrainerRun
from mrl.simple.option_table import AGGREGATION, MEANINGS, RESERVED, TRL_LOSSES, fixed
from mrl.simple.trainers import RL, TrainerSpec


def check_options(config: OrchestratorConfig, spec: TrainerSpec) -> None:
    """Raises ConfigError naming the first option that was changed and means nothing to this trainer, or a combination
    that it cannot do."""
    values = config.flat()
    for name, (_, field) in flat_fields().items():
        meaning = MEANINGS.get(name, Meaning(frozenset()))
        default = field.get_default(call_default_factory=True)
        if spec.name in meaning.trainers or values[name] == default or values[name] in meaning.also:
            continue
        advice = f" ({meaning.advice})" if meaning.advice else ""
        raise ConfigError(
            f"{name}: {values[name]!r} has no meaning with mode: simple and algorithm: {spec.name}{advice}; leave it "
            f"at {default!r}, or use mode: orchestrated"
        )
    chosen = ChosenOptions(values, spec)
    _check_batch(chosen)
    if spec.online:
        _check_sampling(config, chosen)
    if spec.name == "grpo":
        _check_loss(chosen)
    if values["device"].partition(":")[2] not in ("", "0"):
        raise ConfigError(
            f"device: TRL's trainers take the first device they see, not {values['device']!r}; "
            f"set CUDA_VISIBLE_DEVICES={values['device'].partition(':')[2]} and use device: cuda"
        )


def notices(config: OrchestratorConfig, spec: TrainerSpec, tasks: int) -> list[str]:
    """Where TRL's loop differs from mrl's without an option to say so."""
    chosen, notes = ChosenOptions(config.flat(), spec), []
    if spec.online and chosen.is_filtered:
        notes.append(
            "top_p, top_k or min_p filter the sampled distribution and TRL's trainer does not correct for it: the "
            "policy gradient is biased. Sample from everything (top_p: 1), or use mode: orchestrated."
        )
    if spec.name in RL and tasks % chosen["batch_size"]:
        notes.append(
            f"TRL leaves out the last, smaller batch of an epoch: {tasks % chosen['batch_size']} of {tasks} tasks each."
        )
    if spec.name == "kto" and chosen["shuffle"] and "shuffle" in _given(config):
        notes.append("shuffle: KTO compares neighbours, so the order is shuffled once and the same in every epoch.")
    return notes


def trl_options(config: OrchestratorConfig, spec: TrainerSpec, facts: TrainerFacts) -> dict[str, Any]:
    """The keyword arguments of the trainer's configuration, `trl_args` included. Raises ConfigError for those."""
    known = {field.name for field in dataclasses.fields(spec.load("config"))}
    run = TrainerRun(config.flat(), spec, facts)
    written = fixed(run)
    for meaning in MEANINGS.values():
        if spec.name in meaning.trainers:
            written |= meaning.written(run)
    own = {name: value for name, value in written.items() if name in known}
    return own | _checked_args(run["trl_args"], spec, known, own)


def owned_by(name: str, spec: TrainerSpec) -> str | None:
    """mrl's option that says what TRL's option `name` says to this trainer, or None."""
    for option, meaning in MEANINGS.items():
        if name in meaning.trl and spec.name in meaning.trainers:
            return option
    return RESERVED.get(name)


def _checked_args(args: dict[str, Any], spec: TrainerSpec, known: Iterable[str], own: dict[str, Any]) -> dict[str, Any]:
    for name in args:
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"trl_args: {spec.config.partition(':')[2]} has no option {name!r}{hint}")
        option = owned_by(name, spec)
        if option is not None or name in own:
            raise ConfigError(f"trl_args: {name} is set by mrl's own option {option or name}; use that one")
    return args


# --- combinations ---------------------------------------------------------------------------------------------------


def _check_batch(chosen: ChosenOptions) -> None:
    rows, parts = chosen.rows, chosen["gradient_accumulation_steps"]
    if rows % parts:
        fitting = max(part for part in range(1, parts) if rows % part == 0)
        what = "batch_size × num_generations" if chosen.spec.name in RL else "batch_size"
        raise ConfigError(
            f"gradient_accumulation_steps: TRL splits a step into equal parts, and {parts} does not divide {what} = "
            f"{rows}; use {fitting}"
        )


def _check_sampling(config: OrchestratorConfig, chosen: ChosenOptions) -> None:
    if chosen["temperature"] == 0:
        raise ConfigError("temperature: 0 always samples the same tokens, so there is nothing to learn from; use 1.0")
    sampled, trained = config.sampled_tokens, config.algorithm.max_completion_length
    if sampled > trained:
        raise ConfigError(
            f"max_tokens: TRL trains on everything it samples, so {sampled} cannot be above max_completion_length "
            f"({trained}); use {trained}"
        )
    if "importance_sampling" in _given(config) and chosen["importance_sampling"] != "none" and chosen.is_filtered:
        raise ConfigError(
            f"importance_sampling: {chosen['importance_sampling']} cannot be had with mode: simple, where TRL does not "
            "correct for top_p, top_k or min_p; sample from everything (top_p: 1), or set importance_sampling: none"
        )


def _check_loss(chosen: ChosenOptions) -> None:
    if chosen["loss_type"] not in TRL_LOSSES:
        raise ConfigError(
            f"loss_type: TRL has no {chosen['loss_type']!r} that is the same as mrl's; use one of "
            f"{', '.join(TRL_LOSSES)}, or mode: orchestrated"
        )
    if chosen["advantage_type"] not in AGGREGATION:
        raise ConfigError(
            f"advantage_type: TRL's GRPO has no {chosen['advantage_type']!r}; use group or gdpo, or mode: orchestrated"
        )
    if chosen["loss_type"] == "bnpo" and chosen["gradient_accumulation_steps"] > 1:
        raise ConfigError(
            "gradient_accumulation_steps: TRL's bnpo normalises each part of a step by itself, so the loss depends on "
            "how many there are; use loss_type: dapo, which is the same for any number, or 1"
        )


def _given(config: OrchestratorConfig) -> set[str]:
    """Options the user wrote; of a resumed run, those that are not at their defaults."""
    return {name for section in type(config).model_fields for name in getattr(config, section).model_fields_set}
