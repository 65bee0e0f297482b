"""What the sections share: strict fields, and errors that name the option and what would work."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from mrl.config.hints import named_elsewhere
from mrl.errors import ConfigError


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True, validate_default=False
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(type(self), error)) from None


def changed_options(section: Section, names: tuple[str, ...]) -> list[str]:
    """Those of `names` whose value is not the default."""
    fields = type(section).model_fields
    return [n for n in names if getattr(section, n) != fields[n].get_default(call_default_factory=True)]


def refuse_changed(section: Section, names: tuple[str, ...], needs: str) -> None:
    for name in changed_options(section, names):
        raise ConfigError(f"{name} has an effect only with {needs}: set that, or leave {name} out")


def unknown_option(shown: str, name: str, known: list[str], listed_by: str = "mrl train --help-all") -> str:
    if elsewhere := named_elsewhere(shown):
        return f"unknown option {shown!r}; {elsewhere}"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else f"; `{listed_by}` lists them"
    return f"unknown option {shown!r}{hint}"


def explain(section: type[Section], error: ValidationError) -> str:
    """Pydantic's report, as sentences that name the option, what was found and what would work."""
    sentences = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"]) or section.__name__
        found = repr(problem["input"])
        found = found if len(found) <= 200 else found[:200] + "…"
        if problem["type"] == "extra_forbidden":
            sentences.append(unknown_option(name, name, list(section.model_fields)))
            continue
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
        field = section.model_fields.get(name.split(".")[0])
        default = (
            ""
            if field is None or field.is_required()
            else f" (default: {field.get_default(call_default_factory=True)!r})"
        )
        sentences.append(f"{name}: {message}; found {found}{default}")
    return "; ".join(sentences)
