"""Advantages, losses, KL, log-probabilities: pure functions on tensors, readable beside the papers.

A loss is one short file and one line here; another package adds its own with `@LOSSES.register("name")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrl.registry import Registry

if TYPE_CHECKING:
    from mrl.algorithms.base import Loss

LOSSES: Registry[Loss] = Registry(
    "losses",
    "loss_type",
    {
        "grpo": "mrl.algorithms.grpo:GRPO",
        "dapo": "mrl.algorithms.dapo:DAPO",
        "dr_grpo": "mrl.algorithms.dr_grpo:DR_GRPO",
        "bnpo": "mrl.algorithms.bnpo:BNPO",
        "cispo": "mrl.algorithms.cispo:CISPO",
        "sapo": "mrl.algorithms.sapo:SAPO",
    },
)

__all__ = ["LOSSES"]
