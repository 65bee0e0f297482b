"""An evaluation test, run: rows, rollouts, scores, one number, whether it passes, and the record of it all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

from mrl.evals.aggregate import aggregate, metric_means, passes
from mrl.evals.episode import Episodes
from mrl.evals.report import TestReport, raised, reason, write_record
from mrl.evals.targets import Target, Targets
from mrl.evaltests.carried import RESULT, row_of_rollout, tasks_of
from mrl.evaltests.results import EvaluateResult
from mrl.evaltests.rows import EvalMetadata, EvaluationRow, new_id
from mrl.evaltests.scoring import mark_finished
from mrl.evaltests.status import Status
from mrl.evaltests.test import EvaluationTest, Experiment
from mrl.processors.base import RolloutProcessorConfig, SourceProcessor
from mrl.processors.single_turn import NoOpRolloutProcessor
from mrl.processors.source import EvaluationSource, processor_of
from mrl.rewards.base import RewardReport, RewardRequest
from mrl.rewards.combine import held_out, mean_metrics
from mrl.rewards.combine import score_rows as score_requests
from mrl.rewards.evaluation import EvaluationReward
from mrl.rollouts import MessagePolicy
from mrl.rollouts.runner import Runner, close_source, start_source
from mrl.types import Group, Task, derive_seed
from mrl.workers.scoring import TrainerState, score_groups

Note = Callable[[str], None]
Progress = Callable[[int, int], None]


async def run_test(
    test: EvaluationTest,
    *,
    model: str | None = None,
    options: dict[str, Any] | None = None,
    num_runs: int | None = None,
    confidence: float = 0.95,
    only: str | None = None,
    record: bool = True,
    note: Note = lambda message: None,
    progress: Progress = lambda done, total: None,
) -> list[TestReport]:
    """Run every experiment of a test (only: the one of this name). A report for each, and for each model of it.

    model: an address (`http://HOST/v1`), a checkpoint's folder, a Hub id; None = what the test's completion_params
    name. options: flat options of mrl's, which go before completion_params. num_runs: instead of the test's. record:
    write each to a run's folder. Raises MRLError.
    """
    experiments = [one for one in test.experiments() if only is None or one.name == only]
    targets = Targets(model, options or {})
    invocation = os.environ.get("EP_INVOCATION_ID") or new_id()
    reports = []
    try:
        for experiment in experiments:
            run = _Run(test, experiment, targets, num_runs or test.params.overridden().num_runs, invocation, confidence)
            reports += await run.reports(record, note, progress)
    finally:
        await targets.close()
    return reports


class _Run:
    """An experiment while it lasts."""

    def __init__(
        self,
        test: EvaluationTest,
        experiment: Experiment,
        targets: Targets,
        runs: int,
        invocation: str,
        confidence: float,
    ) -> None:
        self.test, self.experiment, self.targets, self.runs = test, experiment, targets, runs
        self.confidence = confidence
        self.params = test.params.overridden()
        self.reward = EvaluationReward(test, experiment.kwargs)
        self.ids = {"invocation_id": invocation, "experiment_id": new_id()}
        self.run_ids = [new_id() for _ in range(runs)]
        self.logged: list[tuple[int, dict[str, float]]] = []

    async def reports(self, record: bool, note: Note, progress: Progress) -> list[TestReport]:
        start = perf_counter()
        rows = await asyncio.to_thread(self.experiment.rows)
        tasks = tasks_of(rows)
        found: list[tuple[Target, list[Group]]] = []
        total = len(tasks) * len(self.experiment.completion_params)
        ended = 0

        def finished(group: Group) -> None:
            nonlocal ended
            ended += 1
            progress(ended, total)

        for params in self.experiment.completion_params:
            asks = not isinstance(processor_of(self.test), NoOpRolloutProcessor)
            target = await self._target(params) if asks else self.targets.nobody(params)
            found.append((target, await self._attempted(tasks, target, note, finished)))
        await self._score_the_rest([groups for _, groups in found])
        seconds = perf_counter() - start
        logged = held_out(mean_metrics(self.logged))
        return [self._report(target, groups, seconds, logged, record) for target, groups in found]

    async def _target(self, params: dict[str, Any]) -> Target:
        """Who is asked. An endpoint that a processor of somebody's own asks, or does not, is not looked at before."""
        processor = processor_of(self.test)
        own = getattr(processor, "policy_factory", None)
        target = await self.targets.of(
            params, self.params.steps, check=own is None and isinstance(processor, SourceProcessor)
        )
        if own is not None and self.targets.model is None and isinstance(target.policy, MessagePolicy):
            target.policy = processor.policy(RolloutProcessorConfig(target.params))
        return target

    async def _attempted(
        self, tasks: list[Task], target: Target, note: Note, finished: Callable[[Group], None]
    ) -> list[Group]:
        source = EvaluationSource(target.setup, self.test, target.params, self.ids)
        runner = Runner(source, target.policy, at_once=self.params.max_concurrent_rollouts)  # type: ignore[arg-type]
        scoring: list[asyncio.Task[None]] = []

        def ended(group: Group) -> None:
            finished(group)
            if self._scores_early:  # while others are still being made
                scoring.append(asyncio.create_task(self._score([group])))

        try:
            source.check_tasks(tasks)
            await start_source(source, None, note)  # type: ignore[arg-type]
            seed = derive_seed(self.targets.options.get("seed") or 0, "eval")
            groups = await runner.run(tasks, self.runs, seed=seed, finished=ended)
            await asyncio.gather(*scoring)
        finally:
            for work in scoring:
                work.cancel()
            for problem in await close_source(source):
                note(problem)
        return groups

    @property
    def _scores_early(self) -> bool:
        alone = len(self.experiment.completion_params) == 1
        return self.test.mode == "pointwise" or (self.test.mode == "groupwise" and alone)

    async def _score_the_rest(self, by_params: list[list[Group]]) -> None:
        """Run by run: all rows together, or the answers of several completion_params to each row."""
        if self._scores_early:
            return
        for run in range(self.runs):
            if self.test.mode == "all":
                for groups in by_params:
                    await self._score([Group(group.task, [group.rollouts[run]]) for group in groups])
            else:
                for together in zip(*by_params, strict=True):
                    await self._score([Group(together[0].task, [group.rollouts[run] for group in together])])

    async def _score(self, groups: list[Group]) -> None:
        metrics = await score_groups(_Here(self.reward), groups, TrainerState(0, 0, None))
        self.logged.append((sum(len(group.rollouts) for group in groups), metrics))

    # --- what came of it --------------------------------------------------------------------------------------------

    def _report(
        self, target: Target, groups: list[Group], seconds: float, logged: dict[str, float], record: bool
    ) -> TestReport:
        episodes = Episodes(target.setup.tokenizer)
        runs = [[self._row(group, run, seconds, episodes) for group in groups] for run in range(self.runs)]
        found = aggregate(runs, self.params.aggregation_method, self.confidence)
        passed = passes(found, self.params.passed_threshold)
        rows = [row for run in runs for row in run]
        for row in rows:
            assert row.eval_metadata is not None
            assert row.evaluation_result is not None
            row.eval_metadata.passed = passed
            row.evaluation_result.agg_score, row.evaluation_result.standard_error = found.score, found.standard_error
            mark_finished(row)
        invalid = [row for row in rows if row.evaluation_result and not row.evaluation_result.is_score_valid]
        fails = os.environ.get("EP_RAISE_EVAL_EXCEPTIONS", "true").strip() != "false"
        report = TestReport(
            test=self.test.name,
            experiment=self.experiment.name,
            model=target.label,
            mode=self.test.mode,
            rows=len(groups),
            runs=self.runs,
            found=found,
            method=self.params.aggregation_method,
            threshold=self.params.passed_threshold,
            passed=passed,
            metrics=metric_means(rows, self.confidence),
            unscored=len(invalid),
            unscored_because=reason(invalid[0]) if invalid else None,
            errors=sum(raised(row) for row in invalid) if fails else 0,
            seconds=seconds,
            run_dir=None,
            logged=logged,
            done=rows,
            confidence=self.confidence,
        )
        if record:
            report.run_dir = write_record(report, target, groups)
        return report

    def _row(self, group: Group, run: int, seconds: float, episodes: Episodes) -> EvaluationRow:
        rollout = group.rollouts[run]
        row = row_of_rollout(group.task, rollout)
        result = rollout.extra.get(RESULT)
        row.evaluation_result = (
            EvaluateResult.model_validate(result)
            if result is not None
            else EvaluateResult(score=0.0, is_score_valid=False, error=rollout.error, reason=rollout.error)
        )
        if (episode := episodes.of(rollout)) is not None:
            row.execution_metadata.extra = (row.execution_metadata.extra or {}) | {"full_episode": episode}
        row.execution_metadata.run_id = self.run_ids[run]
        row.execution_metadata.invocation_id = self.ids["invocation_id"]
        row.execution_metadata.experiment_id = self.ids["experiment_id"]
        row.execution_metadata.experiment_duration_seconds = seconds
        row.input_metadata.session_data = (row.input_metadata.session_data or {}) | {"mode": self.test.mode}
        row.pid = os.getpid()
        row.eval_metadata = EvalMetadata(
            name=self.test.name,
            description=self.test.__doc__,
            status=Status.eval_running(),
            num_runs=self.runs,
            aggregation_method=self.params.aggregation_method,
            passed_threshold=self.params.passed_threshold,
        )
        return row


class _Here:
    """A reward as a scorer, in this process and without a limit of time."""

    def __init__(self, reward: EvaluationReward) -> None:
        self.reward = reward

    async def score(self, requests: list[RewardRequest], state: Any) -> RewardReport:
        return await score_requests([self.reward], requests, timeout=None, trainer_state=vars(state))
