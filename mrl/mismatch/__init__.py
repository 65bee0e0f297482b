"""Sampler against trainer: how far apart they are, why, and what corrects for it."""
