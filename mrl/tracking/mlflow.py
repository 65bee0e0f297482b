"""`mlflow`: a tracking server, or a database on this machine.

Its own settings hold: MLFLOW_TRACKING_URI (else MLflow's default, `mlflow.db` in the current folder) and
MLFLOW_EXPERIMENT_NAME (else `mrl`).
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from mrl.errors import ConfigError
from mrl.tracking.base import RunInfo, flat_params, safe_name
from mrl.types import Outcome

STATUS: dict[Outcome, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
PARAMS_PER_CALL = 100
PARAM_LENGTH = 500
"""The shortest limit a server may have."""


class MlflowTracker:
    """One MLflow run per run, continued under the same id.

    MLflow keeps every value it was ever given, so on a resume a metric's steps that it already has are not sent again.
    Parameters cannot change: those of the first start stay. NaN is kept; its databases turn an infinity into
    ±1.8e308, so that becomes the metric `NAME/non_finite` = 1 instead.
    """

    requires = ("mlflow",)
    run_id: str | None = None

    @staticmethod
    def check() -> None:
        """Raise ConfigError when a database on this machine is to be used and its driver is missing."""
        import mlflow

        local = mlflow.get_tracking_uri().startswith(("sqlite", "postgresql", "mysql", "mssql"))
        if local and importlib.util.find_spec("sqlalchemy") is None:
            raise ConfigError(
                "report_to: mlflow keeps runs in a database here and sqlalchemy is missing; "
                "pip install 'mrl[mlflow]', or set MLFLOW_TRACKING_URI to a server"
            )

    def start(self, run: RunInfo) -> None:
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):  # they log every table they create
            logging.getLogger(name).setLevel(logging.WARNING)
        self.client = MlflowClient()
        self.last_steps: dict[str, int] = {}
        if recorded := run.resume_ids.get("mlflow"):
            self.run_id = self.id = recorded
            self.client.update_run(self.id, status="RUNNING")
            self.last_steps = self._recorded()
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mrl")
        found = self.client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self.client.create_experiment(experiment)
        self.run_id = self.id = self.client.create_run(experiment_id, run_name=run.name).info.run_id
        self._log_params(run.config)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [
            Metric(name, value, now, step) for name, value in _storable(metrics) if step > self.last_steps.get(name, -1)
        ]
        if rows:
            self.client.log_batch(self.id, metrics=rows)

    def note(self, message: str) -> None:
        """Nothing: MLflow has no place for a run's messages."""

    def finish(self, status: Outcome = "finished") -> None:
        self.client.set_terminated(self.id, STATUS[status])

    def _log_params(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = (Param(safe_name(name), str(value)[:PARAM_LENGTH]) for name, value in flat_params(config))
        while chunk := list(islice(params, PARAMS_PER_CALL)):
            self.client.log_batch(self.id, params=chunk)

    def _recorded(self) -> dict[str, int]:
        """The last step of every metric the run has."""
        names = self.client.get_run(self.id).data.metrics
        return {name: max(m.step for m in self.client.get_metric_history(self.id, name)) for name in names}


def _storable(metrics: dict[str, float]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if math.isinf(value):
            yield f"{safe_name(name)}/non_finite", 1.0
        else:
            yield safe_name(name), value
