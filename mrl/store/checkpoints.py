"""Checkpoints: whole or absent, and a model folder that transformers loads as it is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from mrl.errors import CheckpointError


def write_model(path: Path, model: Any, tokenizer: Any, state: dict[str, Any]) -> Path:
    """Write `model` (an adapter, if it has one) and `tokenizer` beside `path`, then rename. Raises CheckpointError."""
    partial = path.with_name(path.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "mrl_state.json").write_text(json.dumps(state))
        shutil.rmtree(path, ignore_errors=True)
        os.replace(partial, path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {path} could not be written ({error.strerror or error}); free space there, or choose another "
            "run_dir"
        ) from error
    return path
