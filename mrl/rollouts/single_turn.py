"""One prompt, one completion: the plainest source of experience."""

from __future__ import annotations

from collections import Counter
from time import perf_counter
from typing import TYPE_CHECKING

from mrl.rollouts.prompts import PromptEncoder
from mrl.types import Completion, GenerateRequest, Group, Rollout, Sample, SamplingParams, Task, derive_seed
from mrl.workers.pool import PolicyClient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SingleTurn:
    """Samples `n` completions per task in one call to the policy."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoder: PromptEncoder, sampling: SamplingParams) -> None:
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.sampling = sampling

    async def collect(self, tasks: list[Task], policy: PolicyClient, n: int, *, seed: int) -> list[Group]:
        start = perf_counter()
        prompts = [tuple(self.encoder.encode(task.prompt)) for task in tasks]
        attempts = _attempts(tasks, n)
        requests = [
            GenerateRequest(f"{task.id}#{k}", prompt_ids, self.sampling, derive_seed(seed, task.id, k))
            for task, prompt_ids, own in zip(tasks, prompts, attempts, strict=True)
            for k in own
        ]
        completions = await policy.generate(requests)
        seconds = perf_counter() - start
        groups = []
        for index, task in enumerate(tasks):
            own = completions[index * n : (index + 1) * n]
            numbered = zip(attempts[index], own, strict=True)
            rollouts = [self._rollout(task, prompts[index], k, c, seconds) for k, c in numbered]
            groups.append(Group(task, rollouts))
        return groups

    def _rollout(
        self, task: Task, prompt_ids: tuple[int, ...], attempt: int, completion: Completion, seconds: float
    ) -> Rollout:
        text = str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        answer = {"role": "assistant", "content": text}
        sample = Sample(
            prompt_ids=list(prompt_ids),
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            mask=[1] * len(completion.token_ids),
            policy_version=completion.policy_version,
            finish_reason=completion.finish_reason,
        )
        return Rollout(
            id=completion.request_id,
            task_id=task.id,
            attempt=attempt,
            messages=[*self.encoder.messages(task.prompt), answer],
            samples=[sample],
            prompt=task.prompt,
            completion=text if isinstance(task.prompt, str) else [answer],
            seconds={"generate": seconds},
        )


def _attempts(tasks: list[Task], n: int) -> list[range]:
    """Numbers of each task's attempts: a task that is among them once more (a dataset smaller than a batch) is not
    attempted with the same seeds again."""
    before: Counter[str] = Counter()
    numbers = []
    for task in tasks:
        numbers.append(range(before[task.id], before[task.id] + n))
        before[task.id] += n
    return numbers
