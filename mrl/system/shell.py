"""Commands that are shown to be pasted."""

from __future__ import annotations

import shlex


def command(*words: object) -> str:
    """A command line that a shell reads as exactly these words, whatever characters they hold."""
    return shlex.join(str(word) for word in words)
