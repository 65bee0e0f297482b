"""Rollout processors: who say how the rows of an evaluation test are attempted (docs/evaluation-tests.md)."""
