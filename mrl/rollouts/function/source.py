"""`rollout_func`: a function of the user's makes all rollouts of a step, as TRL's trainers call it.

    (prompts, trainer)                 every prompt as often as it wants rollouts, messages as messages (TRL 1.16)
    (prompts, args, processing_class)  every prompt once, messages as text; args.num_generations of each (TRL 0.24)

It is synchronous and may block, so it runs on a thread of its own, one call at a time, while the event loop goes on
serving the policy. What it raises fails the rollouts it was to make.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

from mrl.errors import ConfigError, DataError, EngineError, RolloutError
from mrl.rollouts.base import PolicyClient, SourceSetup
from mrl.rollouts.function.returned import Expected, attempts_of, read_rollouts
from mrl.rollouts.function.sampling import Sampler, Seeds, has_images
from mrl.rollouts.function.trainer import Call, RolloutTrainer, call_args
from mrl.rollouts.runner import ENDS_ALL, failed_rollout
from mrl.rollouts.tools.environments import OwnThread
from mrl.rollouts.tools.functions import described, found
from mrl.types import Group, Message, Prompt, Task, TokenSequence, derive_seed

Form = Literal["trainer", "args"]
_NONE = object()


class FunctionSource:
    """Rollouts that a function makes. url: of the route that it may fetch completions from, where there is one."""

    def __init__(self, setup: SourceSetup, function: Callable[..., Any], form: Form) -> None:
        self.setup, self.function, self.form = setup, function, form
        self.url: str | None = None
        self.thread = OwnThread("mrl-rollout-func")
        weakref.finalize(self, self.thread.end)
        self.turn = asyncio.Lock()
        self._seeds = self._outside = Seeds(derive_seed(0, "outside of rollout_func"))

    @classmethod
    def create(cls, setup: SourceSetup, *, rollout_func: Any = None) -> Self:
        if rollout_func is None:
            raise ConfigError("rollout_source: rollout_func needs a rollout_func")
        function = found(rollout_func, "rollout_func")
        return cls(setup, function, form_of(function))

    def check_tasks(self, tasks: list[Task]) -> None:
        """Raise DataError for prompts with images, which rollout functions have no way to hand on."""
        for task in tasks:
            if has_images(self.setup.encoder.messages(task.prompt)):
                raise DataError(f"task {task.id!r} has images, and a rollout_func takes none; leave one of the two out")

    def seed_of(self, prompt_ids: tuple[int, ...]) -> int:
        """The seed of the next completion of a prompt that is asked for, by the call under way where there is one."""
        return self._seeds(prompt_ids)

    async def collect(
        self, tasks: list[Task], policy: PolicyClient, n: int, seed: int, state: Any = None
    ) -> list[Group]:
        """One call of the function. state: what reward functions get as `trainer_state`.

        Raises RolloutError where it breaks its contract, and what the policy raises when nobody is left who samples.
        """
        async with self.turn:
            self._seeds = Seeds(derive_seed(seed, "rollout_func", *(task.id for task in tasks)))
            call = Call(Sampler(policy, self.setup, self.seed_of), policy.version)
            try:
                returned = await self.thread.call(self.function, *self._arguments(call, tasks, n, state))
            except ENDS_ALL:
                raise
            except Exception as error:  # the user's, whatever it is
                return _all_failed(tasks, n, self._reason(error))
            finally:
                call.end()
                self._seeds = self._outside
            expected = Expected(
                described(self.function),
                self.setup,
                policy.max_model_len,
                call.version,
                policy.version + 1,  # a worker may have new weights before all have
                prompts_once=self.form == "args",
            )
            groups = read_rollouts(returned, tasks, n, expected)
            await self._add_logprobs(groups, policy)
            return groups

    def _arguments(self, call: Call, tasks: list[Task], n: int, state: Any) -> tuple[Any, ...]:
        args = call_args(self.setup, n, self.url)
        if self.form == "args":
            return [self._as_text(task.prompt) for task in tasks], args, self.setup.tokenizer
        prompts = [self._as_given(task.prompt) for task in tasks for _ in range(n)]
        return prompts, RolloutTrainer(call, self.setup, args, state)

    def _as_given(self, prompt: Prompt) -> Prompt:
        """A copy, as the dataset has it; as messages where the run's options make it so."""
        if isinstance(prompt, str) and not self.setup.encoder.insists_on_chat:
            return prompt
        messages: list[Message] = [dict(message) for message in self.setup.encoder.messages(prompt)]
        return messages

    def _as_text(self, prompt: Prompt) -> str:
        given = self._as_given(prompt)
        if isinstance(given, str):
            return given
        kwargs = self.setup.encoder.template_kwargs
        return str(
            self.setup.tokenizer.apply_chat_template(given, add_generation_prompt=True, tokenize=False, **kwargs)
        )

    async def _add_logprobs(self, groups: list[Group], policy: PolicyClient) -> None:
        """The policy's own, for rollouts without: how far their sampler was from it stays unknown."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        samples = [sample for rollout in rollouts for sample in rollout.samples if not sample.logprobs]
        if not samples:
            return
        temperature = self.setup.sampling.temperature
        sequences = [TokenSequence(tuple(s.prompt_ids), tuple(s.completion_ids), temperature) for s in samples]
        try:
            scored = await policy.logprobs(sequences)
        except EngineError as error:
            raise RolloutError(
                f"rollout_func: {described(self.function)} returned no logprobs, and this engine cannot say them "
                f"({error}); return those of the sampled tokens"
            ) from error
        for sample, logprobs in zip(samples, scored, strict=True):
            sample.logprobs = [value if sampled else 0.0 for value, sampled in zip(logprobs, sample.mask, strict=True)]

    def _reason(self, error: Exception) -> str:
        """What it raised, and where in the function's file."""
        text = f"{described(self.function)} raised {type(error).__name__}: {error}".rstrip(": ")
        file = inspect.getsourcefile(inspect.unwrap(self.function)) if inspect.isfunction(self.function) else None
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else text


def form_of(function: Any) -> Form:
    """How it wants to be called. Raises ConfigError, naming file and line, for what cannot be called so."""
    if not callable(function):
        raise ConfigError(f"rollout_func: {function!r} is no function, but of type {type(function).__name__}")
    who = described(function)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        raise ConfigError(f"rollout_func: {who} is asynchronous, and has to be a plain function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "trainer"
    named = list(signature.parameters)
    older = named[1:3] == ["args", "processing_class"]
    if not older and _takes(signature, 2):
        return "trainer"
    if _takes(signature, 3):
        return "args"
    raise ConfigError(
        f"rollout_func: {who} takes ({', '.join(named)}); it has to take (prompts, trainer), or "
        "(prompts, args, processing_class)"
    )


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[_NONE] * count)
    except TypeError:
        return False
    return True


def _all_failed(tasks: list[Task], n: int, reason: str) -> list[Group]:
    return [
        Group(task, [failed_rollout(task, attempt, reason) for attempt in attempts])
        for task, attempts in attempts_of(tasks, n)
    ]
