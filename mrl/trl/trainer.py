"""TRL's `GRPOTrainer`, with its arguments, as an `MRLTrainer`."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.errors import ConfigError
from mrl.store.checkpoints import copy_model, find_checkpoint
from mrl.trainer import MRLTrainer
from mrl.trl.config import GRPOConfig, given
from mrl.trl.options import mrl_options

if TYPE_CHECKING:
    from mrl.loop.recorded_run import RunResult

_SHOWS_PROGRESS = ("RichProgressCallback", "ProgressCallback", "PrinterCallback", "NotebookProgressCallback")

_INSTEAD = {
    "push_to_hub": ": `mrl checkpoints RUN push USER/NAME` publishes a checkpoint, which train() has saved",
    "evaluate": ": eval_strategy says when held-out tasks are attempted, and `mrl eval RUN` does it afterwards",
}
"""What scripts call after training, and what does it here."""


class RichProgressCallback:
    """Nothing to do: `report_to: console` shows how a run gets on."""


class GRPOTrainer:
    """Trains with mrl by the arguments of TRL's class of this name.

    Raises ConfigError for what has no meaning here, and warns (UserWarning) where something else holds. The run is
    `self.trainer`, mrl's own.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Any] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        self.args = GRPOConfig() if args is None else args
        _refuse(callbacks, optimizers, quantization_config)
        multi_turn = bool(tools) or environment_factory is not None
        options, notes = mrl_options(self.args, multi_turn=multi_turn, rollout_func=rollout_func is not None)
        values = given(self.args)
        options |= _rewards(reward_funcs, values["reward_weights"])
        if reward_processing_classes is not None:
            options["reward_processing_classes"] = reward_processing_classes
        options |= _adapter(peft_config, notes)
        options |= _model(model, processing_class)
        options["train_dataset"] = train_dataset
        if eval_dataset is not None and values["eval_strategy"] == "no":
            notes.append("eval_dataset: eval_strategy is 'no', so it is not used")
        elif eval_dataset is not None:
            options["eval_dataset"] = eval_dataset
        if multi_turn:
            options |= {"tools": tools or None, "environment_factory": environment_factory}
        if rollout_func is not None:
            options["rollout_func"] = rollout_func
        if values["output_dir"] is not None:
            options["run_dir"] = _run_dir(Path(values["output_dir"]), notes)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        self.trainer = MRLTrainer(**options)

    def train(self) -> RunResult:
        """Run to the end. Returns what it came to, mrl's RunResult. Raises a subclass of MRLError."""
        return self.trainer.train()

    def save_model(self, output_dir: str | None = None) -> None:
        """Copy the model of the newest checkpoint to a folder, by default the run's own, which is `output_dir` of the
        arguments: from_pretrained() takes it from there, as after TRL's. Raises CheckpointError before there is one,
        and for a folder that cannot be written."""
        run = self.trainer.run_dir
        own = output_dir is None or str(output_dir) == str(given(self.args)["output_dir"])
        target = run if own else Path(str(output_dir)).expanduser()
        copy_model(find_checkpoint(run, "newest").path, target)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"mrl's GRPOTrainer has no {name!r}{_INSTEAD.get(name, '; its run is `trainer`')}")


def _refuse(callbacks: Any, optimizers: Any, quantization: Any) -> None:
    for callback in callbacks or []:
        kind = callback if isinstance(callback, type) else type(callback)
        if kind.__name__ not in _SHOWS_PROGRESS:
            raise ConfigError(f"callbacks: mrl calls no {kind.__name__}; trackers are told of every step (report_to)")
    if any(one is not None for one in optimizers):
        raise ConfigError("optimizers: the optimizer is AdamW: adam_beta1, adam_beta2, weight_decay, lr_scheduler_type")
    if quantization is not None:
        raise ConfigError("quantization_config: weights are not quantised; a peft_config needs the least memory")


def _rewards(functions: Any, weights: list[float] | None) -> dict[str, Any]:
    """TRL's reward is a sum, each function with weight 1 unless weights say otherwise; mrl's without weights a mean."""
    if functions is None or (isinstance(functions, list) and not functions):
        return {}
    functions = list(functions) if isinstance(functions, list | tuple) else [functions]
    return {"reward_funcs": functions, "reward_weights": weights or [1.0] * len(functions)}


def _adapter(config: Any, notes: list[str]) -> dict[str, Any]:
    if config is None:
        return {}
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        raise ConfigError(f"peft_config: mrl trains LoRA adapters, not {type(config).__name__}; give a LoraConfig")
    taken = {"r", "lora_alpha", "lora_dropout", "target_modules", "task_type", "peft_type", "inference_mode"}
    plain = LoraConfig().to_dict()
    for name, value in config.to_dict().items():
        if name not in taken and value != plain[name]:
            raise ConfigError(f"peft_config: {name}={value!r} is not taken over; leave it out")
    targets = config.target_modules
    if targets is None:
        notes.append("peft_config: no target_modules, so every linear layer but the output head gets an adapter")
    elif isinstance(targets, str) and targets != "all-linear":
        raise ConfigError(
            f"peft_config: target_modules={targets!r} is a pattern; give a list of names, or 'all-linear'"
        )
    named = None if targets is None or targets == "all-linear" else sorted(targets)
    return {
        "use_lora": True,
        "lora_r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "lora_target_modules": named,
    }


def _model(model: Any, processing: Any) -> dict[str, Any]:
    """By name where the tokenizer is the model's own, else as objects."""
    tokenizer = getattr(processing, "tokenizer", processing)
    if not isinstance(model, str):
        if tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
        return {"model": model, "tokenizer": tokenizer}
    if tokenizer is None or _is_own(tokenizer, model):
        return {"model": model}
    from transformers import AutoModelForCausalLM

    return {"model": AutoModelForCausalLM.from_pretrained(model), "tokenizer": tokenizer}


def _is_own(tokenizer: Any, model: str) -> bool:
    """Whether a tokenizer is as the model's folder has it."""
    from transformers import AutoTokenizer

    if tokenizer.name_or_path != model:
        return False
    own = AutoTokenizer.from_pretrained(model)
    return own.chat_template == tokenizer.chat_template and own.get_vocab() == tokenizer.get_vocab()


def _run_dir(wanted: Path, notes: list[str]) -> str:
    """`output_dir`, or where a run is there already, which TRL would write over, one beside it."""
    names = itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2)))
    free = next(folder for folder in names if not folder.exists() or not any(folder.iterdir()))
    if free != wanted:
        notes.append(f"output_dir={str(wanted)!r}: there is something already, so this run is in {str(free)!r}")
    return str(free)
