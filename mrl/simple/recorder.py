"""What happens in one of TRL's trainers, as mrl's record has it: steps with metrics and every rollout."""

from __future__ import annotations

import asyncio
import math
from statistics import fmean
from time import perf_counter
from typing import Any

from transformers import TrainerCallback

from mrl.config import OrchestratorConfig
from mrl.errors import TrainingError
from mrl.experience.failures import check_failures
from mrl.experience.metrics import rollout_metrics
from mrl.loop.checkpointing import best_so_far
from mrl.rewards.base import RewardRequest
from mrl.rewards.combine import mean_metrics, plain
from mrl.simple.data import TASK
from mrl.simple.metrics import METRICS, RECORDED_ELSEWHERE
from mrl.simple.trainers import TrainerSpec
from mrl.types import Group, Message, Rollout, Sample, Task
from mrl.workers.scoring import TrainerState

NOT_KNOWN = math.nan
"""The logprob of a sampled token: TRL's trainers do not keep the sampler's."""
PASSED = ("prompts", TASK, "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL passes to a reward function besides completions; all else is of a rollout function."""


class Recorder(TrainerCallback):
    """Scores what the trainer generates, puts steps together, and says when to evaluate, to save and to stop.

    emit: takes each finished record, plain data. updates: of the trainer per step of mrl (`num_iterations`).
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        spec: TrainerSpec,
        tasks: list[Task],
        rewards: Any,
        encoder: Any,
        eos_ids: set[int],
        updates: int,
        emit: Any,
    ) -> None:
        self.config, self.spec, self.tasks, self.rewards, self.encoder = config, spec, tasks, rewards, encoder
        self.eos_ids, self.updates, self.emit = eos_ids, updates, emit
        self.loop = asyncio.Runner()
        self.stopping = False
        self.total_steps = 0
        self.metrics: dict[str, float] = {}
        self.eval_metrics: dict[str, float] = {}
        self.eval_step: int | None = None
        """Step after which they were measured."""
        self.best: dict[str, Any] | None = None
        self.evaluating = False
        self.phase = ""
        self.step, self.epoch = 0, 0.0
        self.epochs_done = 0
        """Epochs that a resumed run has behind it."""
        self.batch: list[Rollout] = []
        """Of the last call of the reward function."""
        self.masks: list[list[int]] | None = None
        """Of the completions generated last, where a rollout function says which tokens the policy sampled."""
        self.eval_groups: list[Group] = []
        self._begin_step()

    # --- what the trainer calls -----------------------------------------------------------------------------------

    def reward(self, completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        """TRL's reward function: mrl's rewards, joined as mrl joins them. `None` = could not be scored."""
        start = perf_counter()
        numbers = columns[TASK]
        attempts: dict[int, int] = {}
        rollouts = []
        for number, completion, ids in zip(numbers, completions, completion_ids, strict=True):
            attempt = attempts[number] = attempts.get(number, -1) + 1
            rollouts.append(self._rollout(self.tasks[number], attempt, completion, list(ids)))
        for row, rollout in enumerate(rollouts):
            rollout.extra = {name: values[row] for name, values in columns.items() if name not in PASSED}
            if self.masks is not None:
                rollout.samples[0].mask = list(self.masks[row])
        requests = [
            RewardRequest(
                r.id, r.prompt, r.completion, r.completion_ids, self.tasks[number].columns | r.extra, r.task_id
            )
            for number, r in zip(numbers, rollouts, strict=True)
        ]
        self._keep(numbers, rollouts)
        self.begin("scoring")
        state = TrainerState(self.step, self.total_steps, None if self.evaluating else self.epoch)
        report = self.loop.run(self.rewards.score(requests, state))
        seconds = perf_counter() - start
        for rollout, result in zip(rollouts, report.results, strict=True):
            rollout.rewards = result.rewards
            rollout.extra |= result.extra
            rollout.seconds["reward"] = seconds
            if result.reward is None:
                rollout.fail(result.error or "no reward function scored it")
            else:
                rollout.reward = result.reward
        self._add_seconds("reward", seconds)
        self.logged.append(report.metrics)
        self.batch = rollouts
        return [rollout.reward for rollout in rollouts]

    def reward_by_name(self, index: int) -> list[float | None]:
        """The same batch's values of one reward function."""
        return [None if r.reward is None else list(r.rewards.values())[index] for r in self.batch]

    def begin(self, phase: str) -> None:
        """What the trainer is doing now, for those who watch."""
        phase = "evaluating" if self.evaluating else phase
        if phase != self.phase:
            self.phase = phase
            groups = self.eval_groups if self.evaluating else self.groups
            tokens = sum(rollout.num_tokens for group in groups for rollout in group.rollouts)
            scored = [all(r.reward is not None or r.status == "failed" for r in group.rollouts) for group in groups]
            counts = {"groups_done": sum(scored), "tokens": tokens}
            self.emit({"kind": "phase", "step": self.step, "name": phase, "counts": counts})

    def generated(self, seconds: float) -> None:
        """The trainer sampled for so long."""
        self._add_seconds("generate", seconds)

    def complete(self, prompt_ids: list[list[int]], advantages: list[float] | None) -> None:
        """What the trainer knows of the rollouts it just had scored."""
        for row, rollout in enumerate(self.batch):
            rollout.samples[0].prompt_ids = prompt_ids[row]
            rollout.seconds["generate"] = self.seconds.get("generate", 0.0)
            if advantages is not None and rollout.status == "ok" and not self.evaluating:
                rollout.advantage = advantages[row]
        if not self.evaluating:
            self._check_rewards()
        self.begin("training")

    # --- what transformers calls ----------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step // self.updates
        self.started = perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step, self.epoch = state.global_step // self.updates + 1, float(state.epoch or 0.0)
        if not self.spec.online:
            self.begin("training")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates:  # the same rollouts are trained on again
            return
        training, step = self.config.training, state.global_step // self.updates
        last = self.stopping or step >= self.total_steps
        control.should_training_stop = last
        control.should_save = last or bool(training.save_steps and step % training.save_steps == 0)
        if args.eval_strategy != "no":  # a run that is stopped writes a checkpoint and does not evaluate
            ends = step >= self.total_steps
            control.should_evaluate = ends or bool(training.eval_steps and step % training.eval_steps == 0)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        logs = logs or {}
        if "loss" not in logs or self.evaluating:
            return
        self.updates_logged.append({name: float(v) for name, v in logs.items() if isinstance(v, int | float)})
        if state.global_step % self.updates == 0:
            self.write_step()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **_: Any) -> None:
        metrics, groups = metrics or {}, self.eval_groups
        seconds = float(metrics.get("eval_runtime", 0.0))
        if self.spec.online:
            found = rollout_metrics(groups, self.config, prefix="eval")
            self.eval_metrics = {name: value for name, value in found.items() if name.startswith("eval/")}
        else:
            names = {n: n.removeprefix("eval_") for n in metrics if n.startswith("eval_")}
            skipped = ("runtime", "samples_per_second", "steps_per_second")
            self.eval_metrics = {f"eval/{n}": float(metrics[o]) for o, n in names.items() if n not in skipped}
        self.eval_metrics["time/eval"] = seconds
        self.eval_step = step = state.global_step // self.updates
        self.emit({"kind": "eval", "step": step, "metrics": self.eval_metrics, "groups": groups})
        self.eval_groups = []
        if self.stopping and step:  # asked while it was evaluating
            control.should_training_stop = control.should_save = True
        self.started = perf_counter()  # evaluations come between steps and are not a part of one

    # --- the record -------------------------------------------------------------------------------------------------

    def write_step(self) -> None:
        """Hand over the step as far as it is known; nothing when nothing happened."""
        if not self.updates_logged and not self.groups:
            return
        metrics: dict[str, float] = {"rollout/epoch": self.epoch}
        metrics |= plain(mean_metrics((1, report) for report in self.logged))
        if self.groups:
            metrics |= rollout_metrics(self.groups, self.config)
        metrics |= self._trained()
        seconds = perf_counter() - self.started
        # What is left is the update; the trainer's own bookkeeping is a part of it.
        self.seconds |= {"train": max(seconds - sum(self.seconds.values()), 0.0), "step": seconds}
        metrics |= {f"time/{name}": value for name, value in self.seconds.items()}
        if self.groups:
            tokens = sum(rollout.num_tokens for group in self.groups for rollout in group.rollouts)
            metrics |= {"rollout/tokens": float(tokens), "rollout/tokens_per_second": tokens / seconds}
        self.emit({"kind": "step", "step": self.step, "metrics": metrics, "groups": self.groups})
        self.metrics = metrics
        logged_updates = self.updates_logged
        self._begin_step()
        if logged_updates:
            self._check_finite(metrics)

    def update_best(self, step: int) -> None:
        """Note whether this step's checkpoint is the best by `best_metric`. Raises ConfigError for no such metric."""
        known = self.metrics | (self.eval_metrics if self.eval_step == step else {})
        self.best = best_so_far(self.best, self.config.training.best_metric, step, known)

    def close(self) -> None:
        """End the rewards and the loop they ran on."""
        if self.rewards is not None:
            self.loop.run(self.rewards.close())
        self.loop.close()

    def _begin_step(self) -> None:
        self.groups: list[Group] = []
        self.logged: list[dict[str, float]] = []
        self.updates_logged: list[dict[str, float]] = []
        self.seconds: dict[str, float] = {}
        self.started = perf_counter()

    def _rollout(self, task: Task, attempt: int, completion: Any, ids: list[int]) -> Rollout:
        text = completion if isinstance(completion, str) else str(completion[-1].get("content") or "")
        answer: list[Message] = (
            [{"role": "assistant", "content": text}] if isinstance(completion, str) else list(completion)
        )
        sample = Sample(
            prompt_ids=[],
            completion_ids=ids,
            logprobs=[NOT_KNOWN] * len(ids),
            mask=[1] * len(ids),
            policy_version=max(self.step - 1, 0) if not self.evaluating else self.step,
            finish_reason="stop" if ids and ids[-1] in self.eos_ids else "length",
        )
        return Rollout(
            id=f"{task.id}#{attempt}",
            task_id=task.id,
            attempt=attempt,
            messages=[*self.encoder.messages(task.prompt), *answer],
            samples=[sample],
            prompt=task.prompt,
            completion=text if isinstance(task.prompt, str) else answer,
        )

    def _keep(self, numbers: list[int], rollouts: list[Rollout]) -> None:
        groups: dict[int, Group] = {}
        for number, rollout in zip(numbers, rollouts, strict=True):
            groups.setdefault(number, Group(self.tasks[number], [])).rollouts.append(rollout)
        (self.eval_groups if self.evaluating else self.groups).extend(groups.values())

    def _add_seconds(self, name: str, seconds: float) -> None:
        if not self.evaluating:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _trained(self) -> dict[str, float]:
        """TRL's own numbers, the mean over the step's updates."""
        trained: dict[str, float] = {}
        for name in {name for logs in self.updates_logged for name in logs}:
            rollouts = self.spec.online and name.startswith(("completions/", "rewards/reward", "num_tokens"))
            if name in RECORDED_ELSEWHERE or rollouts:
                continue
            values = [logs[name] for logs in self.updates_logged if name in logs]
            trained[METRICS.get(name, f"trl/{name}")] = values[-1] if name == "learning_rate" else fmean(values)
        return trained

    def _check_rewards(self) -> None:
        if self.spec.learns_from == "rollouts":
            check_failures(self.groups, self.config, self.step)
            return
        failed = next((rollout for rollout in self.batch if rollout.status == "failed"), None)
        if failed is not None:
            raise TrainingError(
                f"step {self.step}: {failed.id} could not be scored ({failed.error}), and TRL's {self.spec.name} would "
                "take it for 0. Mend the reward, or use algorithm grpo or rloo, which leave such completions out"
            )

    def _check_finite(self, metrics: dict[str, float]) -> None:
        broken = [n for n in ("train/loss", "train/grad_norm") if not math.isfinite(metrics.get(n, 0.0))]
        if broken:
            raise TrainingError(
                f"step {self.step}: {' and '.join(broken)} not finite, and the weights are updated with it. "
                f"Lower learning_rate (now {self.config.training.learning_rate}) or max_grad_norm (now "
                f"{self.config.training.max_grad_norm}), and go on from the last checkpoint with --resume"
            )
