"""`single_turn`: one prompt, one completion. The plainest source of experience."""

from __future__ import annotations

from typing import Self

from mrl.rollouts.base import PolicyClient, SourceSetup
from mrl.rollouts.runner import failed_rollout, rollout_id
from mrl.types import Completion, GenerateRequest, Media, Rollout, Sample, Task


class SingleTurn:
    """One completion per attempt."""

    def __init__(self, setup: SourceSetup) -> None:
        self.setup = setup
        self._prompt: tuple[Task, tuple[int, ...], tuple[Media, ...]] | None = None
        """The task encoded last: its attempts come one after the other."""

    @classmethod
    def create(cls, setup: SourceSetup) -> Self:
        return cls(setup)

    async def run(self, task: Task, attempt: int, policy: PolicyClient, seed: int) -> Rollout:
        prompt_ids, media = self._encode(task)
        request = GenerateRequest(rollout_id(task, attempt), prompt_ids, self.setup.sampling, seed, media=media)
        completion = await policy.generate(request)
        if completion.finish_reason == "error":
            return failed_rollout(task, attempt, completion.error or "the engine did not say why")
        return self._rollout(task, request, attempt, completion)

    def _encode(self, task: Task) -> tuple[tuple[int, ...], tuple[Media, ...]]:
        if self._prompt is None or self._prompt[0] is not task:
            encoder = self.setup.encoder
            ids = tuple(encoder.encode(task.prompt))
            self._prompt = task, ids, encoder.media(task.prompt, ids)
        return self._prompt[1:]

    def _rollout(self, task: Task, request: GenerateRequest, attempt: int, completion: Completion) -> Rollout:
        text = str(self.setup.tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        answer = {"role": "assistant", "content": text}
        sample = Sample(
            prompt_ids=list(request.prompt_ids),
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            mask=[1] * len(completion.token_ids),
            policy_version=completion.policy_version,
            finish_reason=completion.finish_reason,
            media=request.media,
        )
        return Rollout(
            id=completion.request_id,
            task_id=task.id,
            attempt=attempt,
            messages=[*self.setup.encoder.messages(task.prompt), answer],
            samples=[sample],
            prompt=task.prompt,
            completion=text if isinstance(task.prompt, str) else [answer],
        )
