"""Rewards: what a completion is worth, and why it could not be told."""

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
from mrl.rewards.functions import check_columns, resolve_rewards
from mrl.rewards.members import REWARDS

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
