"""Options of simple mode, where TRL's own trainers do the training."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from mrl.config.section import Section, refuse_changed


class SimpleConfig(Section):
    """Whose loop runs: mrl's, or one of TRL's trainers (docs/simple-mode.md)."""

    mode: Literal["orchestrated", "simple"] = "orchestrated"
    """`orchestrated` = mrl's own loop; `simple` = a trainer of TRL's, with mrl's options, data, rewards, record and
    checkpoints (`--simple-mode` for short). What has no meaning in the chosen mode is refused."""
    algorithm: str = "grpo"
    """With `mode: simple`: which of TRL's trainers: grpo, rloo, online_dpo, sft, dpo, kto or reward."""
    trl_args: dict[str, Any] = Field(default_factory=dict)
    """With `mode: simple`: further options of TRL's config for that trainer, by TRL's names, e.g. `{"packing": true}`;
    those that mrl has an option for are set by that one."""

    @model_validator(mode="after")
    def _trl_options_need_simple_mode(self) -> Self:
        if self.mode != "simple":
            refuse_changed(self, ("algorithm", "trl_args"), "mode: simple (--simple-mode)")
        return self
