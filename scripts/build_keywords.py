"""Writes mrl/config/keywords.py: the options as keywords that editors complete and type checkers know.

    python scripts/build_keywords.py

Types and order are the configuration's; a test compares the file with what this makes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

from mrl.config import OrchestratorConfig

TARGET = Path(__file__).parent.parent / "mrl" / "config" / "keywords.py"
OBJECTS = {
    "model": "str | ModelConfig | dict[str, Any] | PreTrainedModel",
    "tokenizer": "PreTrainedTokenizerBase",
    "algorithm": "str | AlgorithmConfig | dict[str, Any]",
}
"""Keywords that are more than an option: objects where the configuration takes names, or an option and a section."""
HEAD = '''"""The options as keywords, for editors and type checkers. Made by scripts/build_keywords.py: do not edit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mrl.config import (
%s
    )


class Options(TypedDict, total=False):
    """Every option of `OrchestratorConfig` by its flat name, its sections, and what only Python can give."""
'''


def build() -> str:
    """The module's source."""
    sections = {name: field.annotation.__name__ for name, field in OrchestratorConfig.model_fields.items()}
    lines = [HEAD % "\n".join(f"        {kind}," for kind in sorted(sections.values()))]
    for name, kind in sections.items():
        lines.append(f"    # {name}")
        lines += [f"    {option}: {annotation}" for option, annotation in annotations(kind).items()]
        only_python = ("tokenizer",) if name == "model" else ()
        lines += [f"    {argument}: {OBJECTS[argument]}" for argument in only_python]
    lines.append("    # whole sections")
    lines += [f"    {name}: {kind} | dict[str, Any]" for name, kind in sections.items() if name not in OBJECTS]
    return "\n".join(lines) + "\n"


def annotations(section: str) -> dict[str, str]:
    """The types of a section's options, as they are written in its source."""
    kind = getattr(importlib.import_module("mrl.config"), section)
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    found = {part.target.id: part.annotation for part in body if isinstance(part, ast.AnnAssign)}
    return {name: OBJECTS.get(name, ast.unparse(part)).replace("'", '"') for name, part in found.items()}


if __name__ == "__main__":
    TARGET.write_text(build(), encoding="utf-8")
