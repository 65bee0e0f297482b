"""From tests to questions, and from answers to verdicts: what decides, outside the process that runs code."""

from mrl.sandbox.grading.compare import compare_output
from mrl.sandbox.grading.grade import Execute, judge

__all__ = ["Execute", "compare_output", "judge"]
