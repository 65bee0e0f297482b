"""What both sides agree on. Imports on every system, also where nothing else of this package does."""

from __future__ import annotations

import os

LAYERS = ("A", "B", "C")
"""Strongest first; see `layers`."""
_MACHINE = os.uname().machine.lower() if hasattr(os, "uname") else ""
MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(_MACHINE, _MACHINE)
SETTINGS_ENV = "MRL_SANDBOX"
"""Environment variable in which a supervisor finds its settings."""
