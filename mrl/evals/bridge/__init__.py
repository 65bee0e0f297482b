"""Evaluation tests' rollouts for trainers that take a `rollout_func`: ours, and TRL's."""
