"""A conversation kept in token space: what the policy saw and sampled, id by id.

    messages ─▶ next_prompt ─▶ the engine ─▶ add_completion ─▶ what was said ─▶ messages …
                     └──────────── samples: the same ids ────────────┘

Prompt k+1 begins with exactly the tokens of prompt k and completion k, so that all turns are one Sample. Where the chat
template writes the past differently once it goes on (thinking removed), or the caller replaced it (a history that was
compacted), the next prompt is rendered anew and a new Sample begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mrl.rollouts.chat import AssistantTurn, ChatFormat, ImageWriter, Past, ToolSpec
from mrl.types import Completion, FinishReason, Media, Message, Sample


@dataclass
class _Track:
    """One token sequence as it grows."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    media: list[Media] = field(default_factory=list)
    """The images among them."""

    def add_environment(self, ids: Sequence[int]) -> None:
        """Tokens that nobody sampled. They have the version of the weights that sampled before them."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [self.versions[-1]] * len(ids)

    def add_sampled(self, completion: Completion) -> None:
        count, version = len(completion.token_ids), completion.policy_version
        self.ids += completion.token_ids
        self.mask += [1] * count
        self.logprobs += completion.logprobs
        self.versions += version if isinstance(version, list) else [version] * count
        self.finish_reason = completion.finish_reason

    def sample(self) -> Sample:
        version: int | list[int] = self.versions[0] if len(set(self.versions)) == 1 else list(self.versions)
        return Sample(
            *(list(self.prompt_ids), list(self.ids), list(self.logprobs), list(self.mask), version, self.finish_reason),
            media=tuple(self.media),
        )


class Conversation:
    """Messages and completions in turn.

    messages: up to the first completion. tools: shown to the policy by the template. images: for messages with images,
    of a model that takes them. `turns` counts completions, `extended` those whose prompt continued the one before.
    """

    def __init__(
        self,
        chat: ChatFormat,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        images: ImageWriter | None = None,
    ) -> None:
        if not messages:
            raise ValueError("a conversation begins with a message")
        self.chat, self.tools, self.images = chat, list(tools), images
        self.messages: list[Message] = list(messages)
        self.turns = self.extended = 0
        self._tracks: list[_Track] = []
        self._past: Past | None = None
        """Up to the last completion; None where the next prompt is rendered anew."""
        self._new: list[Message] = []
        """Messages since then."""
        self._next: tuple[list[int], list[int] | None] | None = None
        """The next prompt, and its part that continues the last sample; None = it begins a new one."""
        self._next_media: list[Media] | None = None
        """The images in it."""

    def add(self, *messages: Message) -> None:
        """Messages of the user, the system or tools, after the last completion."""
        for message in messages:
            if message.get("role") == "assistant":
                raise ValueError("what the assistant says is added as a completion, by its tokens")
        self.messages += messages
        self._new += messages
        self._next = self._next_media = None

    def replace(self, messages: Sequence[Message]) -> None:
        """Go on from another history, e.g. a shorter one; a new Sample begins."""
        if not messages:
            raise ValueError("a conversation goes on from a message")
        self.messages, self._new, self._past = list(messages), [], None
        self._next = self._next_media = None

    def next_prompt(self) -> tuple[int, ...]:
        """What the policy is asked next. Raises DataError for messages that the chat template refuses."""
        if self._next is None:
            self._next = self._continue()
        return tuple(self._next[0])

    def next_media(self) -> tuple[Media, ...]:
        """The images in `next_prompt`. Raises DataError for one that cannot be read."""
        prompt = self.next_prompt()
        assert self._next is not None
        if self._next_media is None:
            suffix = self._next[1]
            if self.images is None:
                self._next_media = []
            elif suffix is None:
                self._next_media = self.images.media(prompt, self.messages)
            else:
                before = self._tracks[-1].media
                self._next_media = [*before, *self.images.media(prompt, self._new, len(prompt) - len(suffix))]
        return tuple(self._next_media)

    def add_completion(self, completion: Completion) -> AssistantTurn:
        """What was sampled for `next_prompt`, and what it says. Raises ValueError for a completion without tokens."""
        if not completion.token_ids:
            raise ValueError(f"{completion.request_id}: a completion without tokens ({completion.finish_reason})")
        prompt, media = list(self.next_prompt()), self.next_media()
        assert self._next is not None
        suffix = self._next[1]
        if suffix is None:
            self._tracks.append(_Track(prompt))
        else:
            self._tracks[-1].add_environment(suffix)
            self.extended += 1
        self._tracks[-1].media = list(media)
        self._tracks[-1].add_sampled(completion)
        self.turns += 1
        turn = self.chat.parse(completion.token_ids, prompt, self.tools)
        closed = completion.finish_reason == "stop" and self.chat.closes(completion.token_ids[-1])
        self._past = Past(list(self.messages), prompt, list(completion.token_ids), turn, closed, self.tools)
        self.messages.append(turn.message)
        self._new, self._next, self._next_media = [], None, None
        return turn

    @property
    def samples(self) -> list[Sample]:
        """Everything so far, as it is trained on."""
        return [track.sample() for track in self._tracks]

    def _continue(self) -> tuple[list[int], list[int] | None]:
        past = self._past
        if past is None:
            return self.chat.render(self.messages, self.tools), None
        if not self._new:
            raise ValueError("the assistant had the last word: add a message first")
        before = [*past.prompt_ids, *past.completion_ids]
        suffix = self.chat.extend(past, self._new)
        if suffix:
            return [*before, *suffix], suffix
        prompt = self.chat.render(self.messages, self.tools)
        if len(prompt) > len(before) and prompt[: len(before)] == before:
            return prompt, prompt[len(before) :]
        return prompt, None
