"""A tiny model that calls tools: whole calls are single tokens, and it is built so that it mostly says one of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.conftest import build_model
from tests.rollouts.chat_templates import CHATML


def build_calling_model(
    folder: Path, says: Sequence[str], *, strength: float = 3.0, context: int = 2048, **changes: object
) -> Path:
    """says: texts that are tokens of their own. strength: how much likelier they and the turn's end are, in nats.
    context: tokens that it takes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    build_model(folder, tied=False, max_position_embeddings=context, **changes)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(says))
    tokenizer.chat_template = CHATML
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    likely = [*tokenizer.convert_tokens_to_ids(list(says)), tokenizer.eos_token_id]
    with torch.no_grad():
        # The first coordinate is large and the same everywhere, so that the head reads a constant there.
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.lm_head.weight[:, 0] = -strength / 2
        model.lm_head.weight[likely, 0] = strength / 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
