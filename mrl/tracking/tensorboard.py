"""`tensorboard`: event files in the run's folder; look at them with `tensorboard --logdir runs`."""

from __future__ import annotations

import yaml

from mrl.tracking.base import RunInfo
from mrl.types import Outcome

FOLDER = "tensorboard"
FLUSH_SECONDS = 10


class TensorBoardTracker:
    """Steps that are logged again after a resume replace the earlier ones. NaN and infinities are kept as they are."""

    requires = ("tensorboard",)
    run_id: str | None = None  # the files are found by the run's folder

    def start(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard takes a purge as a restart only from the second one on, so a new run writes one as well.
        purge = run.step + 1 if run.step else 0
        self.writer = SummaryWriter(str(run.folder / FOLDER), purge_step=purge, flush_secs=FLUSH_SECONDS)
        self.step = run.step
        options = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
        self.writer.add_text("config", f"```yaml\n{options}```", run.step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.step = step
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def note(self, message: str) -> None:
        self.writer.add_text("notes", message, self.step)

    def finish(self, status: Outcome = "finished") -> None:
        self.writer.add_text("notes", status, self.step)
        self.writer.close()
