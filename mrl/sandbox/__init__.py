"""Sandboxes: programs nobody trusts in, verdicts out."""

from collections.abc import Callable

from mrl.registry import Registry
from mrl.sandbox.base import IOTest, Limits, Program, Sandbox, Test, TestResult, Verdict

SANDBOXES: Registry[Callable[..., Sandbox]] = Registry(
    "sandboxes",
    "sandbox",
    {
        "auto": "mrl.sandbox.local:make_auto",
        "local": "mrl.sandbox.local:LocalSandbox",
        "process": "mrl.sandbox.process:ProcessSandbox",
    },
)

__all__ = ["SANDBOXES", "IOTest", "Limits", "Program", "Sandbox", "Test", "TestResult", "Verdict"]
