"""The data types that all other modules share.

A `Task` is attempted G times. Each attempt is a `Rollout` of one or more `Sample`s, the rollouts of one task are a
`Group`, and the actor sees only a `TrainBatch`. Tokens are never re-tokenised: training uses the exact ids that were
sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

Message = dict[str, Any]
"""A chat message as `apply_chat_template` takes it: at least `role` and `content`."""

Prompt = str | list[Message]


@dataclass(slots=True)
class Task:
    """One dataset row."""

    id: str
    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict)
    """Every other column of the row; reward functions receive them as keyword arguments."""


# --- requests and completions ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling distribution, and when to stop."""

    temperature: float = 1.0
    """Logits are divided by it. 0 takes the most likely token."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches this; 1 = off."""
    top_k: int = 0
    """Only the k most likely tokens; 0 = off."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one; 0 = off."""
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    """Strings that end the completion once they appear in its text. The tokens that spell them are kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the completion, besides the model's own end-of-sequence ids. Kept as the last token."""


@dataclass(frozen=True, slots=True)
class Media:
    """An image, and the tokens that stand for it."""

    data: bytes = field(repr=False)
    """The encoded file: PNG, JPEG …"""
    kind: Literal["image"] = "image"
    start: int = 0
    """Where its tokens begin: in the prompt, and in a `Sample` in prompt and completion together."""
    length: int = 0
    """How many there are, with those that the processor puts between them. The same id elsewhere is no image."""
    sha256: str = ""
    """Of `data`, in hex."""

    def __post_init__(self) -> None:
        if not self.sha256:
            object.__setattr__(self, "sha256", hashlib.sha256(self.data).hexdigest())


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion to sample. Requests with equal `prompt_ids` and images share their prefill."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """Determines its tokens, independent of other requests. 0 <= seed < 2**63."""
    session: str | None = None
    """Id of the conversation it continues: a session's requests go to the worker with their prefix in its KV cache."""
    media: tuple[Media, ...] = ()
    """In the order of their positions in the prompt. An engine or a model that takes none refuses the request."""


FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a completion ended: stop token or string, token limit, aborted, or the request cannot be served."""


@dataclass(slots=True)
class Completion:
    """What an engine sampled for one request."""

    request_id: str
    token_ids: list[int]
    """The sampled ids, the stop token included."""
    logprobs: list[float]
    """Natural-log probability of each id under the distribution it was drawn from (after temperature, top-p …)."""
    finish_reason: FinishReason
    policy_version: int | list[int]
    """Of the weights that sampled it; one per token if they changed midway."""
    error: str | None = None
    """If the reason is "error": what is wrong with the request or its logits. There are no tokens then."""
    prefilled: int | None = field(default=None, compare=False)
    """Tokens that were computed before its first one: of its prompt, what no other request shared and no earlier turn
    of its session left; again where new weights came midway. None = the engine does not say."""

    @classmethod
    def failed(cls, request: GenerateRequest, error: str, version: int) -> Completion:
        """The completion of a request that cannot be served."""
        return cls(request.id, [], [], "error", version, error)


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt and completion to score."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    temperature: float = 1.0
    media: tuple[Media, ...] = ()
    """As a request's."""


WeightKind = Literal["weights", "adapter", "model", "delta"]


@dataclass(slots=True)
class WeightRef:
    """Where to load policy version `version` from: a live module in this process, or a directory."""

    version: int
    module: nn.Module | None = None
    path: str | None = None
    kind: WeightKind = "weights"
    """Contents of the directory. weights: every tensor; adapter: a LoRA adapter (PEFT's files); model: a model folder
    with its configuration, for which the engine is restarted; delta: the changes since version `base`."""
    checksum: str | None = None
    """Of the tensors (see `mrl.weights.checksum`); a worker answers with the checksum of what it loaded."""
    bytes: int = 0
    """Size of what was published."""
    pull_seconds: float | None = None
    """For a disk shared between machines: wait this long for the directory to appear, and copy it before use."""
    base: int | None = None
    """For a delta: the version it changes."""
    machine: str | None = None
    """The machine whose memory has the directory (`machine_id`); workers elsewhere fetch it from `addresses` with
    `token`."""
    addresses: list[str] = field(default_factory=list)
    token: str | None = field(default=None, repr=False)
    stored: Any = field(default=None, repr=False)
    """Of a directory in an object store (`mrl.weights.object_store.Stored`), which workers make before use."""


# --- experience -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sample:
    """One trainable token sequence. `mask`, `logprobs` and `completion_ids` have equal length."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """The sampler's, under the distribution it sampled from; ignored where `mask` is 0."""
    mask: list[int]
    """1 = sampled by the policy, 0 = from the environment (tool results and the like)."""
    policy_version: int | list[int]
    """Of the weights that sampled it; per token if they changed midway."""
    finish_reason: FinishReason = "stop"
    reference_logprobs: list[float] | None = field(default=None, repr=False, compare=False)
    """Logprobs under the reference model, if a KL term needs them and they are already computed."""
    media: tuple[Media, ...] = ()
    """The images among its tokens, in their order; in a completion they are the environment's."""
    trainer_gap: list[float] | None = field(default=None, repr=False, compare=False)
    """The trainer's logprob less the sampler's of each token, 0 where `mask` is 0; None unless it was trained on. The
    record has it in half precision."""
    advantages: list[float] | None = field(default=None, repr=False, compare=False)
    """Of each token, where they differ; the record has them in half precision."""

    @property
    def prompt_key(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Equal for samples whose prompts are the same, images included."""
        images = tuple(image.sha256 for image in self.media if image.start < len(self.prompt_ids))
        return tuple(self.prompt_ids), images

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.mask)


TURN_COUNTS = ("turns", "turns_extended", "tool_calls", "tool_errors", "malformed_calls")
"""What sources of several turns count in `Rollout.metrics`: completions; those whose prompt continued the one before,
token by token; calls of tools, those that ended with an error, and those that could not be read."""
RolloutStatus = Literal["ok", "failed"]
Outcome = Literal["finished", "interrupted", "failed"]
"""How a run ended."""


@dataclass(slots=True)
class Rollout:
    """One attempt at a task."""

    id: str
    task_id: str
    attempt: int
    messages: list[Message]
    """The whole conversation, the prompt included."""
    samples: list[Sample]
    prompt: Prompt = ""
    completion: str | list[Message] = ""
    """What reward functions get: text for a text prompt, messages for a conversation (TRL's contract)."""
    reward: float | None = None
    """`None` = it could not be scored, which is not the same as 0."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    step_rewards: list[float] = field(default_factory=list)
    """The environment's reward for each turn of the policy, in order (mrl.algorithms.turns). They are parts of
    `reward`; the difference to their sum was given at the end."""
    advantage: float | None = None
    """The mean over its sampled tokens if they differ."""
    status: RolloutStatus = "ok"
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """Columns a rollout source or `log_extra` adds; shown with the rollout, passed to reward functions."""
    seconds: dict[str, float] = field(default_factory=dict)
    limit: str = ""
    """The limit that ended it before it was done, e.g. `max_turns`; its reward is what it had by then. "" = none did,
    or it was the token limit of its only completion."""

    @property
    def completion_ids(self) -> list[int]:
        """Ids of the last sample's completion."""
        return self.samples[-1].completion_ids if self.samples else []

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy sampled, over all samples."""
        return sum(sample.num_sampled for sample in self.samples)

    @property
    def truncated(self) -> bool:
        """Whether a limit ended it."""
        return bool(self.limit) or (bool(self.samples) and self.samples[-1].finish_reason == "length")

    def fail(self, error: str) -> None:
        """Mark it as not scorable: it is kept and shown with its error, but left out of the loss."""
        self.status, self.error, self.reward = "failed", error, None


@dataclass(slots=True)
class Group:
    """The rollouts of one task: the unit of relative advantage."""

    task: Task
    rollouts: list[Rollout]


@dataclass(slots=True)
class TrainBatch:
    """What the actor gets: samples and advantages, without tasks or rollouts."""

    samples: list[Sample]
    advantages: Sequence[float | list[float]]
    """One per sample, or for a sample one per completion token."""
    num_sequences: int
    """Rollouts the loss is averaged over: these samples', and those left out for advantage 0 or for their length."""
    num_tokens: int
    """Tokens the loss is averaged over: these samples', and those of samples with advantage 0."""
    temperature: float = 1.0
    """The samplers' temperature; the actor computes logprobs at the same one."""
    top_p: float = 1.0
    """With `top_k` and `min_p`, the samplers' filter: the logprob gap that it causes is expected."""
    top_k: int = 0
    min_p: float = 0.0
    rollout_tokens: Sequence[int] | None = None
    """Per sample, the sampled tokens of its rollout, over all samples of that; None = each has a rollout of its own."""

    def __post_init__(self) -> None:
        assert len(self.samples) == len(self.advantages), (len(self.samples), len(self.advantages))
        assert self.rollout_tokens is None or len(self.rollout_tokens) == len(self.samples)


# --- randomness -----------------------------------------------------------------------------------------------------


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on every part and on their order, e.g. (run seed, step, task id, attempt)."""
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
