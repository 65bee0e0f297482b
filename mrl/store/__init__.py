"""The record of a run: its folder, configuration, metrics, rollouts and checkpoints."""
