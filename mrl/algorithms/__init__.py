"""Advantages, losses, KL, logprobs: pure functions on tensors, readable beside the papers.

A loss or an advantage is one short file and one line here. Another package, or a script, adds its own with `@loss` or
`@advantage`, or through an entry point (`mrl.losses`, `mrl.advantages`); examples/custom_loss.py shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mrl.registry import Registry

if TYPE_CHECKING:
    from mrl.algorithms.advantages.base import Advantage, Compute
    from mrl.algorithms.base import Loss, PerToken

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
        "gspo": "mrl.algorithms.gspo:GSPO",
        "luspo": "mrl.algorithms.luspo:LUSPO",
        "vespo": "mrl.algorithms.vespo:VESPO",
        "reinforce": "mrl.algorithms.reinforce:REINFORCE",
    },
)

ADVANTAGES: Registry[Advantage] = Registry(
    "advantages",
    "advantage_type",
    {
        "group": "mrl.algorithms.advantages.group:GROUP",
        "rloo": "mrl.algorithms.advantages.rloo:RLOO",
        "reinforce_pp": "mrl.algorithms.advantages.reinforce_pp:REINFORCE_PP",
        "reinforce_pp_baseline": "mrl.algorithms.advantages.reinforce_pp:REINFORCE_PP_BASELINE",
        "maxrl": "mrl.algorithms.advantages.maxrl:MAXRL",
        "gdpo": "mrl.algorithms.advantages.gdpo:GDPO",
        "turn": "mrl.algorithms.advantages.turn:TURN",
        "token": "mrl.algorithms.advantages.token:TOKEN",
        "process": "mrl.algorithms.advantages.process:PROCESS",
    },
)


def loss(name: str, **fields: Any) -> Callable[[PerToken], PerToken]:
    """Decorator: the function is the loss `name`. fields: `normalization`, and others of `mrl.algorithms.base.Loss`."""
    from mrl.algorithms.base import Loss

    def add(per_token: PerToken) -> PerToken:
        LOSSES.register(name)(Loss(per_token, **fields))
        return per_token

    return add


def advantage(name: str, **fields: Any) -> Callable[[Compute], Compute]:
    """Decorator: the function is the advantage `name`. fields: those of `mrl.algorithms.advantages.base.Advantage`."""
    from mrl.algorithms.advantages.base import Advantage

    def add(compute: Compute) -> Compute:
        ADVANTAGES.register(name)(Advantage(compute, **fields))
        return compute

    return add


__all__ = ["ADVANTAGES", "LOSSES", "advantage", "loss"]
