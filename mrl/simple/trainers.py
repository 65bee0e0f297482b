"""TRL's trainers by name, and the columns each learns from."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any, Literal

from mrl.registry import Registry


@dataclass(frozen=True)
class TrainerSpec:
    """One of TRL's trainers."""

    name: str
    trainer: str
    """`module:class`."""
    config: str
    """`module:class` of its configuration."""
    learns_from: Literal["rollouts", "pairs", "examples"]
    """Its own completions in groups, pairs of its own completions, or the dataset's."""
    shapes: tuple[tuple[str, ...], ...]
    """Sets of columns, one of which the data must have."""
    classifier: bool = False
    """The model gets a head with one number instead of a vocabulary."""

    @property
    def online(self) -> bool:
        """Whether it generates, and so needs rewards and prompts rather than answers."""
        return self.learns_from != "examples"

    def load(self, which: Literal["trainer", "config"]) -> Any:
        """The class. Imports TRL: seconds."""
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        module, _, name = getattr(self, which).partition(":")
        return getattr(importlib.import_module(module), name)


def _trl(name: str, prefix: str, shapes: tuple[tuple[str, ...], ...], **more: Any) -> TrainerSpec:
    return TrainerSpec(name, f"trl:{prefix}Trainer", f"trl:{prefix}Config", shapes=shapes, **more)


PROMPTS = (("prompt",),)

GRPO = _trl("grpo", "GRPO", PROMPTS, learns_from="rollouts")
RLOO = _trl("rloo", "RLOO", PROMPTS, learns_from="rollouts")
ONLINE_DPO = TrainerSpec(
    "online_dpo",
    "trl.experimental.online_dpo:OnlineDPOTrainer",
    "trl.experimental.online_dpo:OnlineDPOConfig",
    learns_from="pairs",
    shapes=PROMPTS,
)
SFT = _trl("sft", "SFT", (("messages",), ("prompt", "completion"), ("text",)), learns_from="examples")
DPO = _trl("dpo", "DPO", (("prompt", "chosen", "rejected"), ("chosen", "rejected")), learns_from="examples")
KTO = _trl("kto", "KTO", (("prompt", "completion", "label"),), learns_from="examples")
REWARD = _trl(
    "reward",
    "Reward",
    (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    learns_from="examples",
    classifier=True,
)

RL = frozenset({"grpo", "rloo"})
ONLINE = RL | {"online_dpo"}
ALL = ONLINE | {"sft", "dpo", "kto", "reward"}
GRPO_ONLY = frozenset({"grpo"})

TRAINERS: Registry[TrainerSpec] = Registry(
    "trl_trainers",
    "algorithm",
    {spec.name: f"mrl.simple.trainers:{spec.name.upper()}" for spec in (GRPO, RLOO, ONLINE_DPO, SFT, DPO, KTO, REWARD)},
)
