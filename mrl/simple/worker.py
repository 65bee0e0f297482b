"""One of TRL's trainers as a worker: plain data in, records out, every call short.

Training runs on a thread of the worker's own, so that the caller can ask for records, and stop it, from anywhere and
with a deadline on each call.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mrl.actor.lora import lora_config
from mrl.config import OrchestratorConfig
from mrl.errors import CheckpointError, ConfigError, MRLError, TrainingError
from mrl.loop.resume import random_state, set_random_state
from mrl.modeling.fixed_order import fixed_order
from mrl.models import autocast_dtype, load_classifier, load_model, load_tokenizer, pick_device
from mrl.rollouts.prompts import PromptEncoder
from mrl.rollouts.tools.functions import found
from mrl.simple.data import examples_dataset, prompts_dataset
from mrl.simple.hooks import hooked
from mrl.simple.option_rows import ChosenOptions, TrainerFacts
from mrl.simple.options import trl_options
from mrl.simple.recorder import Recorder
from mrl.simple.trainers import RL, TRAINERS
from mrl.store.checkpoints import write_checkpoint
from mrl.system.environment import computing_environment
from mrl.types import Task
from mrl.workers.reward import RewardWorker

TRAINING_FILES = ("optimizer.pt", "scheduler.pt", "trainer_state.json", "training_args.bin", "entropy_ctrl_state.json")
"""Of a checkpoint of TRL's: what training resumes from, beside `rng_state*.pth`. The rest is the model."""
END = "end"


class SimpleWorker:
    """Trains with one of TRL's trainers. Lives on any backend; everything it is given is plain data.

    options: flat, without datasets and reward functions. tasks, eval_tasks: prompts to answer, or, for trainers that
    learn from examples, the examples as `columns`. rewards: what a `RewardWorker` is made with. folder: the run's.
    base_name: what adapters in checkpoints say they adapt; None = the place that the model was loaded from.
    """

    def __init__(
        self,
        options: dict[str, Any],
        tasks: list[Task],
        eval_tasks: list[Task],
        rewards: dict[str, Any] | None,
        max_model_len: int,
        folder: str,
        resume_from: str | None = None,
        base_name: str | None = None,
    ) -> None:
        self.config = OrchestratorConfig.from_flat(**options)
        self.spec = TRAINERS.get(self.config.trl.algorithm)
        self.tasks, self.eval_tasks, self.rewards = tasks, eval_tasks, rewards
        self.max_model_len = max_model_len
        self.folder = Path(folder)
        self.base_name = base_name
        self.working_folder = self.folder / "trl"
        self.resume_from = None if resume_from is None else Path(resume_from)
        self.updates = ChosenOptions(self.config.flat(), self.spec).updates
        self.records: queue.Queue[dict[str, Any]] = queue.Queue()
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.state: dict[str, Any] = {}

    def initialize(self) -> dict[str, Any]:
        """Load the model and build the trainer. Returns facts about them. Raises ConfigError, ModelError."""
        import transformers
        from transformers.trainer_callback import PrinterCallback, ProgressCallback

        transformers.utils.logging.set_verbosity_error()
        config, spec = self.config, self.spec
        device = pick_device(config.model.device)
        if device.type == "cuda" and torch.cuda.device_count() > 1:
            raise ConfigError(
                f"device: mode: simple trains on one GPU and sees {torch.cuda.device_count()}; "
                "set CUDA_VISIBLE_DEVICES to one of them"
            )
        facts = TrainerFacts(
            output_dir=str(self.working_folder),
            bf16=autocast_dtype(config.model, device) is torch.bfloat16,
            use_cpu=device.type == "cpu",
            context=self.max_model_len,
            evaluates=bool(self.eval_tasks),
        )
        values = trl_options(config, spec, facts)
        tokenizer = load_tokenizer(config.model)
        encoder = PromptEncoder.of(tokenizer, config.data)
        model = (load_classifier if spec.classifier else load_model)(config.model).train()
        model.name_or_path = self.base_name or model.name_or_path
        eos_ids = _eos_ids(model, tokenizer)
        rewards = RewardWorker(**self.rewards) if self.rewards is not None else None
        if rewards is not None:
            rewards.open(str(self.folder.absolute()))
        self.recorder = Recorder(
            config,
            spec,
            [*self.tasks, *self.eval_tasks],
            rewards,
            encoder,
            eos_ids,
            self.updates,
            self.records.put,
        )
        arguments: dict[str, Any] = {}
        if spec.online:
            arguments["reward_funcs"] = self._reward_functions(values)
        if config.rollout.rollout_func is not None:
            arguments["rollout_func"] = found(config.rollout.rollout_func, "rollout_func")
        if config.model.use_lora:
            arguments["peft_config"] = lora_config(config.model, "SEQ_CLS" if spec.classifier else "CAUSAL_LM")
        with self._explained(), _no_progress_bars():
            self.trainer = hooked(spec, self.recorder, self._save)(
                model=model,
                args=spec.load("config")(**values),
                processing_class=tokenizer,
                callbacks=[self.recorder],
                **self._datasets(encoder),
                **arguments,
            )
        for callback in (PrinterCallback, ProgressCallback):
            self.trainer.remove_callback(callback)
        self._use_policy_as_reference()
        self.recorder.total_steps = self._count_steps()
        self.trainer.args.max_steps = self.recorder.total_steps * self.updates
        parameters = list(self.trainer.model.parameters())
        return {
            "parameters": sum(p.numel() for p in parameters),
            "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "device": str(device),
            "forward_dtype": "bfloat16" if facts.bf16 else "float32",
            "total_steps": self.recorder.total_steps,
            "environment": computing_environment(device),
            "trl": {
                name: value for name, value in values.items() if isinstance(value, str | int | float | list | dict)
            },
        }

    def start(self, state: dict[str, Any]) -> None:
        """Begin, or go on. state: what every checkpoint's state holds besides the worker's part. Returns at once."""
        self.state = state
        self.thread = threading.Thread(target=self._train, name="mrl-simple", daemon=True)
        self.thread.start()

    def next_records(self, seconds: float) -> list[dict[str, Any]]:
        """What happened since, waiting up to `seconds` for the first. The last one's kind is `end`.

        Raises what ended the training, after the records before it.
        """
        records: list[dict[str, Any]] = []
        with contextlib.suppress(queue.Empty):
            records.append(self.records.get(timeout=seconds))
            while True:
                records.append(self.records.get_nowait())
        if records and records[-1]["kind"] == END and self.error is not None:
            if len(records) > 1:  # first what was recorded, then the error
                self.records.put(records.pop())
                return records
            raise self.error
        return records

    def stop(self) -> None:
        """End after the step that is running, with a checkpoint."""
        self.recorder.stopping = True

    def close(self) -> None:
        """End for good."""
        if hasattr(self, "recorder"):
            self.recorder.stopping = True
            if self.thread is not None:
                self.thread.join(timeout=60)
        shutil.rmtree(self.working_folder, ignore_errors=True)

    # --- training ---------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        try:
            resume = None if self.resume_from is None else self._as_trl_checkpoint(self.resume_from)
            with self._explained(), fixed_order(self.trainer.args.device):
                self.trainer.train(resume_from_checkpoint=resume)
        except BaseException as error:
            self.error = error
            with contextlib.suppress(Exception):  # the error is what matters
                self.recorder.write_step()  # what was generated is written down, whatever came after
        finally:
            with contextlib.suppress(Exception):  # a verifier that fails to close is no reason to lose the run
                self.recorder.close()
            self.records.put({"kind": END, "step": self.recorder.step})

    def _save(self, write_trl_checkpoint: Callable[[], None]) -> None:
        """TRL's own checkpoint, put in mrl's shape."""
        step = self.recorder.step
        path = self.folder / "checkpoints" / f"step-{step}"
        last = self.recorder.stopping or step >= self.recorder.total_steps

        def write(folder: Path) -> None:
            shutil.rmtree(self.working_folder, ignore_errors=True)
            write_trl_checkpoint()
            (written,) = self.working_folder.glob("checkpoint-*")
            for file in written.iterdir():
                training = file.name in TRAINING_FILES or file.name.startswith("rng_state")
                shutil.move(file, folder / "trainer" / file.name if training else folder / file.name)

        best_before = self.recorder.best
        self.recorder.update_best(step)
        state = self.state | {
            "step": step,
            "policy_version": step,
            "random": random_state(),
            "best": self.recorder.best,
        }
        try:
            write_checkpoint(path, write, state)
        except CheckpointError as error:
            if last or self.config.training.checkpoint_errors == "stop":
                raise
            self.recorder.best = best_before  # this one is not there to be named
            self.records.put({"kind": "checkpoint_failed", "step": step, "message": str(error)})
            return
        self.records.put({"kind": "checkpoint", "step": step, "best": self.recorder.best})

    def _as_trl_checkpoint(self, checkpoint: Path) -> str:
        """A folder of links in the shape of a TRL checkpoint."""
        import json

        from mrl.store.checkpoints import STATE

        state = json.loads((checkpoint / STATE).read_text())
        set_random_state(state["random"])
        self.recorder.best = state["best"]
        if self.spec.name in RL:
            self.recorder.epochs_done = state["step"] // (len(self.tasks) // self.config.training.batch_size)
        self.trainer.args.eval_on_start = False
        folder = self.working_folder / "resume" / f"checkpoint-{state['step'] * self.updates}"
        folder.mkdir(parents=True)
        for file in [*checkpoint.iterdir(), *(checkpoint / "trainer").iterdir()]:
            if file.is_file():
                (folder / file.name).symlink_to(file.resolve())
        return str(folder)

    # --- setting up -------------------------------------------------------------------------------------------------

    def _datasets(self, encoder: PromptEncoder) -> dict[str, Any]:
        if self.spec.online:
            numbers = range(len(self.tasks)), range(len(self.tasks), len(self.tasks) + len(self.eval_tasks))
            made = [
                prompts_dataset(*part, encoder) for part in zip((self.tasks, self.eval_tasks), numbers, strict=True)
            ]
        else:
            rows = [[task.columns for task in part] for part in (self.tasks, self.eval_tasks)]
            made = [examples_dataset(part, self.config, self.spec) for part in rows]
        return {"train_dataset": made[0], "eval_dataset": made[1] if self.eval_tasks else None}

    def _reward_functions(self, values: dict[str, Any]) -> list[Callable[..., Any]]:
        """One function with the joined reward; where TRL is told to normalise each by itself, one each."""

        def reward(**columns: Any) -> list[float | None]:
            return self.recorder.reward(**columns)

        if values.get("multi_objective_aggregation") != "normalize_then_sum":
            return [reward]
        names = [reward.name for reward in self.recorder.rewards.rewards]
        functions = [_named(name, index, self.recorder) for index, name in enumerate(names)]
        values["reward_weights"] = self.config.reward.reward_weights
        return functions

    def _use_policy_as_reference(self) -> None:
        """TRL loads the reference by the model's name, which may be another revision, or a base without its adapter."""
        reference = getattr(self.trainer, "ref_model", None)
        if reference is not None:
            reference.load_state_dict(self.trainer.model.state_dict())

    def _count_steps(self) -> int:
        training = self.config.training
        if training.max_steps > 0:
            return training.max_steps
        if self.spec.name in RL:
            return training.num_epochs * (len(self.tasks) // training.batch_size)
        parts = len(self.trainer.get_train_dataloader())
        return training.num_epochs * max(-(-parts // training.gradient_accumulation_steps), 1)

    @contextlib.contextmanager
    def _explained(self) -> Any:
        """Turns TRL's errors into mrl's, with a message that names TRL."""
        try:
            yield
        except MRLError:
            raise
        except (ValueError, TypeError, NotImplementedError, ImportError, KeyError, AttributeError) as error:
            kind = TrainingError if hasattr(self, "trainer") else ConfigError
            raise kind(f"algorithm: {self.spec.name}: TRL says {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _no_progress_bars() -> Any:
    """TRL tokenises with a bar for each pass; the run has a progress display of its own."""
    import datasets

    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()


def _named(name: str, index: int, recorder: Recorder) -> Callable[..., Any]:
    def function(**columns: Any) -> list[float | None]:
        if index == 0:
            recorder.reward(**columns)
        return recorder.reward_by_name(index)

    function.__name__ = name
    return function


def _eos_ids(model: Any, tokenizer: Any) -> set[int]:
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = declared if isinstance(declared, list) else [declared]
    return {tokenizer.eos_token_id, *(i for i in ids if i is not None)}
