"""What both sides agree on. Imports on every system, also where nothing else of this package does."""

from __future__ import annotations

import platform

LAYERS = ("A", "B", "C")
"""Strongest first; see `layers`."""
MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
SETTINGS_ENV = "MRL_SANDBOX"
"""Environment variable in which a supervisor finds its settings."""
