"""Reward shaping by completion length."""

from __future__ import annotations


def soft_overlong_punishment(length: int, limit: int, cache: int) -> float:
    """0 up to `limit - cache` tokens, then a straight line to -1 at `limit` (DAPO, arXiv 2503.14476, eq. 13)."""
    if length <= limit - cache:
        return 0.0
    if length <= limit:
        return (limit - cache - length) / cache
    return -1.0


def length_rewards(lengths_G: list[int], correct_G: list[bool]) -> list[float]:
    """Shorter is better, within a group (Kimi k1.5, arXiv 2501.12599, section 2.3.3).

    0.5 for the shortest rollout down to -0.5 for the longest; a wrong one is never rewarded for being short. 0 for all
    when they are equally long.
    """
    if not lengths_G or max(lengths_G) == min(lengths_G):
        return [0.0] * len(lengths_G)
    shortest, longest = min(lengths_G), max(lengths_G)
    scores_G = [0.5 - (length - shortest) / (longest - shortest) for length in lengths_G]
    return [score if correct else min(0.0, score) for score, correct in zip(scores_G, correct_G, strict=True)]
