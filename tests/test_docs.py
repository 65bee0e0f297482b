"""What the documentation names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mrl.cli import COMMANDS
from mrl.config import flat_fields

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_exist(page: Path) -> None:
    from mrl.flags import ALIASES

    own = {"json", "num-samples", "by", "confidence", "output", "merged", "which", "step", "gradients", "format"}
    own |= {
        "simple-mode",
        "yes",
        "failed",
        "limit",
        "task",
        "dry-run",
        "help",
        "help-all",
        "tests",
        "timeout",
        "run",
        "rows",
    }
    known = {name.replace("_", "-") for name in flat_fields()} | own
    known |= {alias.removeprefix("--") for aliases in ALIASES.values() for alias in aliases}
    for command, rest in re.findall(r"^ {4}mrl ([a-z]+)(.*)$", page.read_text(), re.MULTILINE):
        assert command in COMMANDS, command
        for flag in re.findall(r"(?<!\S)--([a-z-]+)", rest.partition("#")[0]):
            assert flag in known, f"mrl {command} --{flag}"
