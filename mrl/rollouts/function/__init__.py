"""Rollout functions as TRL takes them: a function of yours that makes all rollouts of a step."""

from mrl.rollouts.function.trainer import generate_rollout_completions

__all__ = ["generate_rollout_completions"]
