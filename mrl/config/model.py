"""Options of the policy."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from mrl.config.section import Section, refuse_changed


class ModelConfig(Section):
    """The policy: which model, in which precision, all of it or an adapter."""

    model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """Hub id, local folder, `starter` (the shipped policy), or a run's name or folder (its newest checkpoint)."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose authors you trust."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward pass. Master weights are always float32; `auto` = bfloat16 autocast on GPUs that have
    it, float32 elsewhere."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`; `auto` takes the best there is."""
    max_model_len: int = Field(16384, ge=2)
    """Most tokens of prompt and completion together; lowered to what the model was made for."""
    max_decode_rows: int | None = Field(None, ge=1)
    """Completions that a rollout worker decodes at once; the others wait until one ends. None = as many as the
    machine's memory is good for. It changes no completion, only memory and speed."""
    prefix_cache_gb: float | None = Field(None, ge=0)
    """Memory in which a worker of engine `transformers` keeps the keys and values of conversations between their turns;
    what a turn begins with is then not computed again. 0 = none are kept; None = an eighth of the machine's memory, or
    of what is free on its GPU. It changes no completion, only memory and speed."""
    decode_step: Literal["auto", "eager", "static"] = "auto"
    """How engine `transformers` takes a decoding step: `eager`, on a cache that grows, or `static`, on one of fixed
    size, on CUDA by replaying CUDA graphs; `auto` = static on CUDA for models that can, else eager. It changes no
    completion, only memory and speed."""
    use_lora: bool = False
    """Train a low-rank adapter (LoRA, arXiv 2106.09685) instead of all weights."""
    lora_r: int = Field(16, ge=1)
    """Rank of the adapter."""
    lora_alpha: int = Field(32, ge=1)
    """The adapter's output is scaled by lora_alpha / lora_r."""
    lora_dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout on the adapter's input while training."""
    lora_target_modules: list[str] | None = None
    """Names of the modules that get an adapter; None = every linear layer but the output head."""

    @model_validator(mode="after")
    def _lora_options_need_lora(self) -> Self:
        if not self.use_lora:
            refuse_changed(self, ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"), "use_lora: true")
        return self
