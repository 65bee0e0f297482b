"""Rollout sources: where experience comes from."""

from mrl.rollouts.base import RolloutSource

__all__ = ["RolloutSource"]
