"""The rewards that have a name."""

from typing import Any

from mrl.registry import Registry

REWARDS: Registry[Any] = Registry(
    "rewards",
    "reward_funcs",
    {
        "classifier": "mrl.rewards.classifier:Classifier",
        "evaluation_test": "mrl.rewards.evaluation:EvaluationReward",
        "judge": "mrl.rewards.judge:Judge",
        "sandbox": "mrl.rewards.code:CodeReward",
        "sandbox_partial": "mrl.rewards.code:PartialCodeReward",
        "math_verify": "mrl.rewards.math_verify:MathVerifyReward",
        "own": "mrl.rewards.own:OwnReward",
        "reasoning_gym": "mrl.rewards.reasoning_gym:ReasoningGymReward",
    },
)
"""Rewards by name. A member is a reward function, a `Reward`, or a class of one; a class is called with those of
`sandbox`, `limits` and `tokenizer` that it accepts, and the options it was given."""
