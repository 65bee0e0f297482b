"""Advantages: how much better a rollout, a turn or a token did than its baseline. One short file each."""

from mrl.algorithms.advantages.base import EPSILON, Advantage, AdvantageInputs, AdvantageSettings, Scale
from mrl.algorithms.advantages.group import group_advantages, zero_variance_fraction

__all__ = [
    "EPSILON",
    "Advantage",
    "AdvantageInputs",
    "AdvantageSettings",
    "Scale",
    "group_advantages",
    "zero_variance_fraction",
]
