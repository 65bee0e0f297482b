"""`evaluation_test`: a test's scores as rewards (docs/evaluation-tests.md)."""

from __future__ import annotations

import asyncio
from typing import Any

from mrl.errors import RewardError
from mrl.evaltests.carried import RESULT, ROW, row_of_attempt
from mrl.evaltests.find import find_test, place_of
from mrl.evaltests.results import EvaluateResult
from mrl.evaltests.scoring import score_rows
from mrl.rewards.base import Code, RewardRequest, Scores, Total


class EvaluationReward:
    """Scores rollouts with a test. Each metric of its results is one of the run's, `reward/metrics/NAME`.

    test, folder: the function, or its name (`mrl.evaltests.find`). kwargs: further arguments of the function; None =
    those of the test's first experiment.
    A row whose score is not valid is left out, and counted as `reward/invalid_scores`. Raises ConfigError.
    """

    name = "evaluation_test"

    def __init__(self, test: Any, kwargs: dict[str, Any] | None = None, folder: str | None = None) -> None:
        self.given, self.test = test, find_test(test, folder)
        every = self.test.experiments()
        self.kwargs = every[0].kwargs if kwargs is None else kwargs
        self.independent = self.test.mode != "all"
        self.bounded = False

    @staticmethod
    def code(options: dict[str, Any]) -> Code | None:
        """The file that these options name, which workers elsewhere need."""
        if (place := place_of(options["test"])) is None:
            return None

        def elsewhere(file: str) -> dict[str, Any]:
            found: dict[str, Any] = place.elsewhere(file)
            return {"test": found.pop("given"), **found}

        return Code(place.file, place.root, elsewhere)

    def recorded(self) -> Any:
        """As a recipe says it."""
        name = self.given if isinstance(self.given, str) else self.test.recorded()
        return {"evaluation_test": {"test": name}}

    async def score(self, requests: list[RewardRequest], *, trainer_state: Any) -> Scores:
        """Rollouts of one task are a group. Raises RewardError for a function that breaks its contract."""
        if foreign := next((request for request in requests if ROW not in request.columns), None):
            raise RewardError(f"evaluation_test: task {foreign.task_id!r} is no row of the test")
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(request.task_id, []).append(place)
        rows = [row_of_attempt(one.prompt, one.completion, one.columns) for one in requests]
        groups = [[rows[place] for place in group] for group in places.values()]
        at_once = asyncio.Semaphore(self.test.params.max_concurrent_evaluations)
        results: dict[int, EvaluateResult] = {}
        for group, scored in zip(
            places.values(), await score_rows(self.test, groups, self.kwargs, at_once), strict=True
        ):
            for place, row in zip(group, scored, strict=True):
                assert row.evaluation_result is not None
                results[place] = row.evaluation_result
        return _scores([results[place] for place in range(len(requests))])


def _scores(results: list[EvaluateResult]) -> Scores:
    scores = Scores([result.score if result.is_score_valid else None for result in results])
    metrics: dict[str, list[float]] = {"reward/invalid_scores": []}
    for row, result in enumerate(results):
        if not result.is_score_valid:
            said = result.error or result.reason or "the test said no reason"
            scores.errors[row] = f"evaluation_test: the score is not valid: {said}"
        metrics["reward/invalid_scores"].append(Total(not result.is_score_valid))
        for name, metric in result.metrics.items():
            if metric.is_score_valid:
                metrics.setdefault(f"reward/metrics/{name}", []).append(metric.score)
    scores.metrics = metrics
    scores.extra[RESULT] = [result.model_dump(mode="json", exclude_none=True) for result in results]
    return scores
