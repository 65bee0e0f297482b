"""Logprobs under the reference model: which samples need them, and how they become known.

The actor has the reference model; it is asked once for all samples of a step, in one order, since the last bits depend
on which samples are computed together. `add_reference_logprobs` is called beside scoring, so that the actor works while
rewards wait, and before the step for what is not known by then.
"""

from __future__ import annotations

from collections.abc import Sequence

from mrl.backends import WorkerHandle
from mrl.config import OrchestratorConfig
from mrl.experience.groups import is_trainable
from mrl.types import Group, Sample


async def add_reference_logprobs(groups: list[Group], config: OrchestratorConfig, actor: WorkerHandle) -> None:
    """Make `Sample.reference_logprobs` known where a KL term may need them and they are not known yet."""
    samples = reference_samples(groups, config)
    if samples:
        found = await actor.call("reference_logprobs", samples, config.generation.temperature)
        set_reference_logprobs(samples, found)


def reference_samples(groups: list[Group], config: OrchestratorConfig) -> list[Sample]:
    """The samples that lack them, whatever their reward turns out to be."""
    if config.algorithm.beta == 0:
        return []
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if config.algorithm.kl_in != "reward":
        rollouts = [rollout for rollout in rollouts if is_trainable(rollout, config)]
    return [s for rollout in rollouts for s in rollout.samples if s.reference_logprobs is None]


def set_reference_logprobs(samples: Sequence[Sample], logprobs: Sequence[list[float]]) -> None:
    """Put what the actor found where it belongs."""
    for sample, found in zip(samples, logprobs, strict=True):
        sample.reference_logprobs = found
