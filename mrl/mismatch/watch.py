"""Watches the logprob gap: a step above `max_logprob_gap` gives a warning, a second one in a row ends the run.

Both messages name likely causes (mrl.mismatch.causes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mrl.backends import WorkerHandle
from mrl.config import OrchestratorConfig
from mrl.errors import MRLError, TrainingError
from mrl.mismatch.causes import Cause, WorkerView, all_causes, find_causes
from mrl.mismatch.probe import MismatchEvidence


class MismatchWatch:
    """Belongs to one run. note: tells the user. `in_a_row`: latest consecutive checked steps with too large a gap."""

    def __init__(self, config: OrchestratorConfig, note: Callable[[str], None]) -> None:
        self.config, self.note = config, note
        self.in_a_row = 0
        self._verdict: str | None = None
        self._doubted = False

    async def look(
        self, step: int, metrics: dict[str, float], actor: WorkerHandle, workers: Sequence[WorkerHandle]
    ) -> None:
        """After a step's update and before its weights are published: warn, or prepare to `stop`."""
        limit, gap = self.config.algorithm.max_logprob_gap, metrics.get("train/logprob_gap_unexplained")
        if limit is None or gap is None:
            return
        evidence: MismatchEvidence | None = await actor.call("mismatch_evidence")
        if evidence is None:
            self.in_a_row = 0
            return
        views = [await _ask(worker, evidence) for worker in workers]
        asked = self.config.generation
        causes = find_causes(evidence, views, asked)
        found = f"logprobs of sampler and trainer are {gap:.2g} nats per token apart, max_logprob_gap is {limit:g}"
        if evidence.moved:
            found += f" (tokens of older weights; {evidence.moved:.2g} nats, what updates may have moved, left out)"
            if not causes:
                self._doubt(f"step {step}: {found}. Likely causes:\n{_listed(all_causes(evidence, asked))}")
                return
        self.in_a_row += 1
        listed = "Likely causes:\n" + _listed(causes or all_causes(evidence, asked))
        if self.in_a_row == 1:
            self.note(f"step {step}: {found}. A second such step in a row stops the run. {listed}")
        else:
            self._verdict = f"step {step}: {found}, for the second step in a row. {listed}"

    def stop(self) -> None:
        """Raise TrainingError if the step just recorded was the second one in a row."""
        if self._verdict is not None:
            raise TrainingError(
                f"{self._verdict}\nCheckpoints are from before these two steps: a resumed run goes on from there. If "
                "the gap is as it should be, raise max_logprob_gap (null = never stop); see docs/weight-sync.md."
            )

    def _doubt(self, message: str) -> None:
        """Fast updates alone may explain the gap: say it once, and do not stop."""
        self.in_a_row = 0
        if not self._doubted:
            self.note(message)
        self._doubted = True


def _listed(causes: Sequence[Cause]) -> str:
    return "\n".join(f"  {number}. {cause.kind}: {cause.text}" for number, cause in enumerate(causes, 1))


async def _ask(worker: WorkerHandle, evidence: MismatchEvidence) -> WorkerView:
    """Ask a worker for its version, and to score the known sequences."""
    prompts, completions = [p for p, _ in evidence.probe], [c for _, c in evidence.probe]
    view = WorkerView(worker.name)
    try:
        facts: dict[str, Any] = await worker.call("initialize_for_weight_sync")
        view.dtype = facts["dtype"]
        view.version = (await worker.call("health"))["version"]
        if prompts:
            scored = await worker.call("compute_logprobs", prompts, completions, 1.0)
            view.logprobs = [value for one in scored for value in one]
    except MRLError:
        pass  # it cannot score, or is gone: the actor's evidence has to suffice
    return view
