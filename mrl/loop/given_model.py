"""A model and its tokenizer given as objects: written down in the run's folder, and from there on a model by name.

So every worker, engine and process can load it, the record names it, and a resumed run starts from the same weights.
The objects themselves are only read: what is trained is the copy.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.errors import ConfigError
from mrl.loop.preflight import check_disk
from mrl.models import model_class
from mrl.weights.checksum import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = "given-model"
CHECKSUM = "mrl-weights.txt"
"""In it, so that a resumed run knows whether it is given the same weights again."""


class GivenModel:
    """Raises ConfigError for objects that a file cannot stand for, saying what to give instead."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        transformers = sys.modules.get("transformers")
        if transformers is None or not isinstance(model, transformers.PreTrainedModel):
            raise ConfigError(
                f"model: give a name, a folder, or a language model of transformers, not an object of type "
                f"{type(model).__name__}"
            )
        _check_model(model)
        if tokenizer is None:
            raise ConfigError(
                "model: a loaded model needs its tokenizer too; give tokenizer as well, or the model by name"
            )
        self.written: Any = tokenizer
        """The tokenizer, or what has it and makes pixels of images."""
        if isinstance(tokenizer, transformers.ProcessorMixin):
            tokenizer = getattr(tokenizer, "tokenizer", None)
        if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
            raise ConfigError(f"tokenizer: give one of transformers, not an object of type {type(tokenizer).__name__}")
        rows = model.get_input_embeddings().weight.shape[0]
        if len(tokenizer) > rows:
            raise ConfigError(
                f"tokenizer: has {len(tokenizer)} tokens, and the model embeddings for {rows}; give the model's own, "
                "or call model.resize_token_embeddings first"
            )
        self.model: PreTrainedModel = model
        self.tokenizer: PreTrainedTokenizerBase = tokenizer

    @property
    def name(self) -> str:
        """What it was loaded from, for the run's name."""
        return getattr(self.model.config, "name_or_path", None) or type(self.model).__name__

    @staticmethod
    def folder(run_dir: Path) -> Path:
        """Where a run keeps it."""
        return run_dir / FOLDER

    def write(self, run_dir: Path, *, resume: bool) -> None:
        """Write it into the run's folder. resume: it is there already, and has to be the same. Raises ConfigError."""
        folder = self.folder(run_dir)
        weights = checksum(self.model.state_dict())
        if resume:
            written = folder / CHECKSUM
            if not written.is_file():
                raise ConfigError(f"model: {run_dir} began with a model by name; give that, or leave model out")
            if written.read_text() != weights:
                raise ConfigError(
                    f"model: has other weights than the one {run_dir} began with, which is kept in {folder}; leave "
                    "model and tokenizer out, or start a new run"
                )
            return
        if (run_dir / "config.yaml").exists():
            raise ConfigError(f"run_dir: {run_dir} already holds a run; choose another name or delete it")
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_disk(folder, self.model.num_parameters(), copies=1)
            self.model.save_pretrained(folder)
            self.written.save_pretrained(folder)
            (folder / CHECKSUM).write_text(weights)
        except (OSError, ValueError, RuntimeError, ConfigError) as error:
            self.remove(run_dir)
            raise ConfigError(f"model: cannot be written to {folder}: {error}; save it and give its folder") from error

    def remove(self, run_dir: Path) -> None:
        """Undo `write` where no run came of it."""
        if (run_dir / "config.yaml").exists():
            return
        shutil.rmtree(self.folder(run_dir), ignore_errors=True)
        if run_dir.is_dir() and not any(run_dir.iterdir()):
            run_dir.rmdir()


def _check_model(model: PreTrainedModel) -> None:
    if getattr(model, "peft_config", None):
        raise ConfigError("model: has an adapter; give its base with use_lora: true, or call merge_and_unload first")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ConfigError("model: its weights are quantised, and training takes whole ones; load it without")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            "model: some of its weights are not in memory (device_map); load it without, or give its name"
        )
    known = model_class(model.config)._model_mapping.get(type(model.config), ())
    if type(model) not in (known if isinstance(known, tuple) else (known,)):
        raise ConfigError(
            f"model: a {type(model).__name__} cannot be loaded again from files as what it is; give one of "
            "transformers' own language models, or a folder that AutoModelForCausalLM loads"
        )
