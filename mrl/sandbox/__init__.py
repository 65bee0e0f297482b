"""Sandboxes: programs nobody trusts in, verdicts out."""

from mrl.registry import Registry
from mrl.sandbox.base import IOTest, Limits, Program, Sandbox, Test, TestResult, Verdict

SANDBOXES: Registry[type] = Registry("sandboxes", "sandbox", {"process": "mrl.sandbox.process:ProcessSandbox"})

__all__ = ["SANDBOXES", "IOTest", "Limits", "Program", "Sandbox", "Test", "TestResult", "Verdict"]
