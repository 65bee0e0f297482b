"""`wandb`: Weights & Biases, online or offline (`WANDB_MODE=offline`).

Its own settings hold: WANDB_PROJECT (else `mrl`), WANDB_NAME, WANDB_ENTITY, WANDB_DIR, WANDB_TAGS, WANDB_MODE …
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from mrl.errors import ConfigError
from mrl.tracking.base import RunInfo
from mrl.tracking.wandb_files import last_step
from mrl.types import Outcome

EXIT_CODES: dict[Outcome, int] = {"finished": 0, "interrupted": 130, "failed": 1}


class WandbTracker:
    """One W&B run per run, continued under the same id.

    W&B takes no step twice and none that goes backwards, so on a resume the rows it already has stay as they are and
    are not sent again. Online it says itself where it stopped; offline the files of the run's earlier parts do.
    """

    requires = ("wandb",)
    run_id: str | None = None

    @staticmethod
    def check() -> None:
        """Raise ConfigError where W&B would ask for a key (in the middle of the run's display)."""
        import wandb

        offline = wandb.setup().settings.mode in ("offline", "disabled", "dryrun")
        if offline or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
            return
        if not wandb.login(prompt=False):
            raise ConfigError(
                "report_to: wandb has no API key; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
            )

    def start(self, run: RunInfo) -> None:
        import wandb

        self.run_id = run.resume_ids.get("wandb") or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        folder = Path(os.environ.get("WANDB_DIR") or run.folder)
        folder.mkdir(parents=True, exist_ok=True)
        recorded = last_step(folder / "wandb", self.run_id) if run.step else -1
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mrl"),
            name=os.environ.get("WANDB_NAME", run.name),
            id=self.run_id,
            resume="allow",
            dir=str(folder),
            config=run.config,
            reinit="create_new",  # leaves a run of the caller's own alone
            settings=wandb.Settings(console="off"),  # the terminal's display is no log
        )
        self.next_step = max(self.run.starting_step, recorded + 1 if self.run.offline else 0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step >= self.next_step:
            self.run.log(metrics, step=step)

    def note(self, message: str) -> None:
        self.run.write_logs(message)

    def finish(self, status: Outcome = "finished") -> None:
        self.run.finish(exit_code=EXIT_CODES[status])
