"""TRL's trainer classes with three hooks: what was generated, what was scored, and where checkpoints go.

Generation and scoring have no public hook in TRL; `trl` is pinned to one minor version, and a hook that is not there
is an error when the class is made, never a silent gap in the record.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from mrl.actor.optimizer import group_options, set_group_options, set_schedule
from mrl.errors import ConfigError
from mrl.simple.recorder import Recorder
from mrl.simple.trainers import TrainerSpec


def hooked(spec: TrainerSpec, recorder: Recorder, save: Callable[[Callable[[], None]], None]) -> type[Any]:
    """The trainer's class, telling `recorder` and saving through `save`, which gets what writes TRL's own checkpoint.

    Raises ConfigError when this version of TRL lacks a hook.
    """
    base = spec.load("trainer")
    needed = {
        "rollouts": ("_generate", "_generate_and_score_completions"),
        "pairs": ("_generate", "_calculate_rewards_from_functions"),
    }
    for name in needed.get(spec.learns_from, ()):
        if not hasattr(base, name):
            raise ConfigError(f"mode: simple: this TRL's {base.__name__} has no {name}; pip install 'mrl[trl]'")

    class Saved(base):  # type: ignore[valid-type, misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            save(lambda: base._save_checkpoint(self, model, trial))

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            # What was stored would take the place of options that were allowed to change.
            made, rates = group_options(self.optimizer), list(self.lr_scheduler.base_lrs)
            super()._load_optimizer_and_scheduler(checkpoint)
            set_group_options(self.optimizer, made)
            self.lr_scheduler.base_lrs = rates
            set_schedule(self.optimizer, self.lr_scheduler, self.lr_scheduler.last_epoch)

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            recorder.evaluating = True
            recorder.begin("evaluating")
            try:
                return super().evaluate(*args, **kwargs)
            finally:
                recorder.evaluating = False

    class Rollouts(Saved):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            sampler = super()._get_train_sampler(dataset)
            # TRL's sampler draws an order per epoch from one generator and starts over when a run is resumed: prompts
            # would repeat the first epoch's order.
            for _ in range(recorder.epochs_done if sampler.shuffle else 0):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
            return sampler

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            recorder.begin("generating")
            recorder.masks = None
            try:
                made = super()._generate(*args, **kwargs)
            finally:
                recorder.generated(perf_counter() - start)
            if getattr(self, "rollout_func", None) is not None:
                recorder.masks = made[2]
            return made

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            prompts = zip(output["prompt_ids"], output["prompt_mask"], strict=True)
            recorder.complete([ids[mask.bool()].tolist() for ids, mask in prompts], output["advantages"].tolist())
            return output

    class Pairs(Saved):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            recorder.begin("generating")
            generated = super()._generate(*args, **kwargs)
            recorder.generated(perf_counter() - start)
            self.mrl_generated = generated[:4]
            return generated

        def _calculate_rewards_from_functions(
            self, prompts: Any, completions: Any, completion_ids_list: Any, **columns: Any
        ) -> Any:
            prompt_ids, prompt_mask, completion_ids, completion_mask = self.mrl_generated
            pairs = zip(completion_ids, completion_mask, strict=True)
            completion_ids_list = [ids[mask.bool()].tolist() for ids, mask in pairs]  # TRL's are padded
            rewards = super()._calculate_rewards_from_functions(prompts, completions, completion_ids_list, **columns)
            rows = zip(prompt_ids, prompt_mask, strict=True)
            recorder.complete([ids[mask.bool()].tolist() for ids, mask in rows], None)
            return rewards

    chosen = {"rollouts": Rollouts, "pairs": Pairs}.get(spec.learns_from, Saved)
    chosen.__name__ = chosen.__qualname__ = base.__name__  # model cards name it
    return chosen
