"""What a rollout source is: one attempt at a task, with a policy that samples for it.

A source decides what the policy is asked and what comes of it: one prompt, several turns with tools, an environment. It
does not decide how many attempts run, when they are given up or what becomes of a failure: `mrl.rollouts.runner` does,
the same for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from mrl.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Group,
    Message,
    Rollout,
    SamplingParams,
    Task,
    TokenSequence,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mrl.rollouts.chat import AssistantTurn, ChatFormat, ToolSpec
    from mrl.rollouts.prompts import PromptEncoder


class PolicyClient(Protocol):
    """The policy as sources, agents and evaluations see it: live rollout workers, a checkpoint, a server."""

    max_model_len: int
    """Tokens of prompt and completion together."""

    @property
    def version(self) -> int:
        """Of the weights that all who sample have. While new ones are sent, it is still the older one."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. A request that cannot be served ends with the reason "error" and says why.

        Many calls may be under way. Cancelled, it takes the request back. Raises WorkerDied, EngineDied or SyncError
        when nobody is left who samples.
        """
        ...

    async def logprobs(self, sequences: list[TokenSequence]) -> list[list[float]]:
        """Of each completion's tokens, at the sequence's temperature. Raises EngineError where it cannot say them."""
        ...


@dataclass
class Reply:
    """What a policy that is asked with messages said."""

    turn: AssistantTurn
    finish_reason: FinishReason = "stop"
    prompt_tokens: int = 0
    """As far as it says how many; 0 = it does not."""
    completion_tokens: int = 0
    logprobs: Any = None
    """As it gave them."""


@runtime_checkable
class MessagePolicy(Protocol):
    """A policy that is asked with messages and whose tokens nobody sees: somebody's endpoint. Sources of conversations
    (`mrl.rollouts.multi_turn`) play with it as with a `PolicyClient`; what comes of it cannot be trained on."""

    max_model_len: int
    """A bound for what it may be told, where its own is not known."""

    async def reply(self, messages: list[Message], tools: list[ToolSpec], sampling: SamplingParams, seed: int) -> Reply:
        """Its next turn. Raises EngineError."""
        ...


@dataclass(frozen=True)
class TurnLimits:
    """What ends an attempt before it is done; then it is truncated, with the reward that it has. None = no limit."""

    turns: int | None = None
    """Completions."""
    turn_tokens: int | None = None
    """Sampled tokens of a completion."""
    rollout_tokens: int | None = None
    """Sampled tokens of all of them."""
    step_seconds: float | None = None
    """Of the environment's part of a turn."""
    rollout_seconds: float | None = None
    """Of the whole attempt."""


@dataclass(frozen=True)
class SourceSetup:
    """What a source is made from, besides its own options (`rollout_options`)."""

    tokenizer: PreTrainedTokenizerBase
    encoder: PromptEncoder
    sampling: SamplingParams
    """The run's distribution and limits, for every request."""
    limits: TurnLimits = field(default_factory=TurnLimits)
    """Of attempts of several turns."""
    vocab_size: int | None = None
    """Of the model, which may have more ids than its tokenizer; None = as many."""

    def chat(self) -> ChatFormat:
        """How the model writes conversations. Raises ConfigError where it has no chat template."""
        from mrl.rollouts.chat import chat_format

        return chat_format(self.tokenizer, self.encoder.template_kwargs, images=self.encoder.images)

    @property
    def vocabulary(self) -> int:
        """Token ids end before it."""
        return len(self.tokenizer) if self.vocab_size is None else self.vocab_size


@runtime_checkable
class RolloutSource(Protocol):
    """Implemented by one file per kind of experience in this package.

    Optional attributes: `scores = True` where its rollouts arrive with their reward, so that a run needs no reward
    function (a method, if that depends on the source's options, which it then gets); `gives_rewards()` says of an
    object whether it really does. A rollout that has a reward is not scored again; parts in `Rollout.rewards` are added
    to what reward functions give. `keeps_time = True` where it ends attempts at their limits itself
    (`mrl.rollouts.multi_turn`), so that `rollout_timeout` does not fail them. `start(backend, note)` and `close()`,
    asynchronous, are called before the first attempt (before anything expensive is loaded) and after the last; `close`
    may return sentences about what could not be closed, and attempts may follow all the same. `metrics()` gives numbers
    for each step, whose names `metric_names` lists. `may_change` names options that may differ when a run is resumed.
    """

    @classmethod
    def create(cls, setup: SourceSetup, **options: Any) -> Self:
        """Made once a run. Its keyword arguments are what `rollout_options` may hold. Raises ConfigError."""
        ...

    async def run(self, task: Task, attempt: int, policy: PolicyClient, seed: int) -> Rollout:
        """One attempt. All that is random in it derives from `seed`, which is another for every attempt.

        An exception makes a failed rollout of it, with the exception's text; other attempts go on. When cancelled it
        has to end.
        """
        ...


@runtime_checkable
class BatchSource(Protocol):
    """A source that needs all prompts of a step at once."""

    @classmethod
    def create(cls, setup: SourceSetup, **options: Any) -> Self:
        """As a RolloutSource's."""
        ...

    async def collect(self, tasks: list[Task], policy: PolicyClient, n: int, seed: int) -> list[Group]:
        """`n` rollouts of every task, in the tasks' order. Failed ones are among them; an exception ends the run.

        With a parameter `state` it also gets what reward functions get as `trainer_state`. Several calls may be under
        way, where a step takes the groups that end first.
        """
        ...
