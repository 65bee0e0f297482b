"""Rewards: what a completion is worth, and why it could not be told."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mrl.rewards.base import (
    Reward,
    RewardReport,
    RewardRequest,
    RewardResult,
    Scores,
)
from mrl.rewards.code import (
    compute_reward,
    compute_reward_with_partial_credit,
    extract_code,
    parse_tests,
    reward_helper_function,
)
from mrl.rewards.members import REWARDS

if TYPE_CHECKING:
    from mrl.rewards.functions import check_columns, resolve_rewards

__all__ = [
    "REWARDS",
    "Reward",
    "RewardReport",
    "RewardRequest",
    "RewardResult",
    "Scores",
    "check_columns",
    "compute_reward",
    "compute_reward_with_partial_credit",
    "extract_code",
    "parse_tests",
    "resolve_rewards",
    "reward_helper_function",
]


def __getattr__(name: str) -> Any:
    """What reads options, files and runs is loaded where it is used: the isolated processes of verifiers, which import
    this package as well, have neither."""
    if name in ("check_columns", "resolve_rewards"):
        return getattr(importlib.import_module("mrl.rewards.functions"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
