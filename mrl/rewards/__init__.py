"""Rewards: what a completion is worth, and why it could not be told."""

from typing import Any

from mrl.registry import Registry

REWARDS: Registry[Any] = Registry(
    "rewards",
    "reward_funcs",
    {
        "sandbox": "mrl.rewards.code:CodeReward",
        "sandbox_partial": "mrl.rewards.code:PartialCodeReward",
        "math_verify": "mrl.rewards.math_verify:MathVerifyReward",
        "reasoning_gym": "mrl.rewards.reasoning_gym:ReasoningGymReward",
    },
)
"""Rewards by name. A member is a reward function, a `Reward`, or a class of one; a class is called with those of
`sandbox` and `limits` that it accepts."""

from mrl.rewards.base import (  # noqa: E402  (they need the registry)
    Reward,
    RewardReport,
    RewardRequest,
    RewardResult,
    Scores,
)
from mrl.rewards.code import (  # noqa: E402
    compute_reward,
    compute_reward_with_partial_credit,
    extract_code,
    parse_tests,
    reward_helper_function,
)
from mrl.rewards.functions import check_columns, resolve_rewards  # noqa: E402

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
