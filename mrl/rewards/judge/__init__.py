"""`judge`: a language model behind an OpenAI-compatible endpoint scores completions by a rubric (docs/judges.md)."""

from mrl.rewards.judge.judge import Judge

__all__ = ["Judge"]
