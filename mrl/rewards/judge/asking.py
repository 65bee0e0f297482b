"""Verdicts by content: from the cache, from whoever asks for the same now, or from the endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mrl.rewards.base import Total
from mrl.rewards.judge.cache import AnswerCache
from mrl.rewards.judge.endpoint import Answer, Endpoint, NoAnswer
from mrl.rewards.judge.options import JudgeOptions
from mrl.rewards.judge.verdicts import Unreadable, Verdict
from mrl.types import Message

Read = Callable[[str], Verdict]
_SHOWN = 200


@dataclass
class Tally:
    """What scoring one batch took."""

    wanted: int = 0
    """Verdicts."""
    found: int = 0
    """Of those, in the cache, or asked for already."""
    requests: int = 0
    """Answered by the endpoint, or given up."""
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def metrics(self, prefix: str, options: JudgeOptions) -> dict[str, list[float]]:
        """By name. Without a verdict to ask for there is no share that was cached."""
        cost = options.cost(self.prompt_tokens, self.completion_tokens)
        counts = ("requests", "retries", "prompt_tokens", "completion_tokens")
        metrics: dict[str, list[float]] = {f"{prefix}/{name}": [Total(getattr(self, name))] for name in counts}
        metrics |= {} if cost is None else {f"{prefix}/cost": [Total(cost)]}
        return metrics | ({f"{prefix}/cached_fraction": [self.found / self.wanted]} if self.wanted else {})


class Asker:
    """Asks for one judge, on one event loop."""

    def __init__(self, options: JudgeOptions, endpoint: Endpoint, cache: AnswerCache) -> None:
        self.options, self.endpoint, self.cache = options, endpoint, cache
        self.structured = options.structured
        """Whether the endpoint takes schemas, as far as is known."""
        self._places = asyncio.Semaphore(options.concurrency)
        self._asked: dict[str, asyncio.Task[Verdict]] = {}

    async def verdict(
        self, messages: list[Message], schema: dict[str, Any] | None, read: Read, tally: Tally, vote: int = 0
    ) -> Verdict:
        """What the judge says. An answer that cannot be read is asked for once more. vote: of several of the same.

        Raises NoAnswer and Unreadable.
        """
        tally.wanted += 1
        key = self._key(messages, vote)
        if (asked := self._asked.get(key)) is not None:
            tally.found += 1
            return await asyncio.shield(asked)
        if (text := self.cache.get(key)) is not None:
            try:
                verdict = read(text)
            except Unreadable:  # it was read by other rules then, e.g. on another scale
                pass
            else:
                tally.found += 1
                return verdict
        asked = asyncio.ensure_future(self._ask(key, messages, schema, read, tally))
        self._asked[key] = asked
        asked.add_done_callback(lambda done: (self._asked.pop(key, None), done.cancelled() or done.exception()))
        return await asyncio.shield(asked)  # an answer that is paid for is kept, whoever still waits for it

    async def close(self) -> None:
        """Give up what is being asked, and end the connections."""
        asked = list(self._asked.values())
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await self.endpoint.close()

    async def _ask(
        self, key: str, messages: list[Message], schema: dict[str, Any] | None, read: Read, tally: Tally
    ) -> Verdict:
        answer = await self._complete(messages, schema, tally)
        try:
            verdict = read(answer.text)
        except Unreadable as problem:
            answer = await self._complete([*messages, *_complaint(answer.text, problem)], schema, tally)
            try:
                verdict = read(answer.text)
            except Unreadable as second:
                cut = "; it was cut, max_tokens sets the limit" if answer.cut else ""
                raise Unreadable(f"no readable answer in two ({second}{cut}): {answer.text[:_SHOWN]!r}") from None
        self.cache.put(key, answer.text)
        return verdict

    async def _complete(self, messages: list[Message], schema: dict[str, Any] | None, tally: Tally) -> Answer:
        async with self._places:  # what others have found out meanwhile counts
            return await self._complete_now(messages, schema, tally)

    async def _complete_now(self, messages: list[Message], schema: dict[str, Any] | None, tally: Tally) -> Answer:
        body = self._body(messages)
        if schema is not None and self.structured:
            format_ = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
            try:
                return await self._send(body | {"response_format": format_}, tally)
            except NoAnswer as failure:
                if not failure.refused:
                    raise
            answer = await self._send(body, tally)
            self.structured = False
            return answer
        return await self._send(body, tally)

    async def _send(self, body: dict[str, Any], tally: Tally) -> Answer:
        options = self.options
        if options.max_cost is not None:
            spent = options.cost(*self.cache.spent(options.name)) or 0.0
            if spent >= options.max_cost:
                raise NoAnswer(f"max_cost ({options.max_cost:g}) is spent")
        tally.requests += 1
        try:
            answer = await self.endpoint.ask(body)
        except NoAnswer as failure:
            tally.retries += failure.retries
            raise
        tally.retries += answer.retries
        tally.prompt_tokens += answer.prompt_tokens
        tally.completion_tokens += answer.completion_tokens
        self.cache.add_spent(options.name, answer.prompt_tokens, answer.completion_tokens)
        return answer

    def _body(self, messages: list[Message]) -> dict[str, Any]:
        options = self.options
        fields = {"temperature": options.temperature, "max_tokens": options.max_tokens} | options.params
        return {"model": options.model, "messages": messages} | {k: v for k, v in fields.items() if v is not None}

    def _key(self, messages: list[Message], vote: int) -> str:
        """Of what decides the answer: who is asked, with what, how, and which vote of several it is."""
        content = [self.options.base_url, self._body(messages), vote]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _complaint(text: str, problem: Unreadable) -> list[Message]:
    """Follows an answer that could not be read; nothing where there was none."""
    if not text:
        return []
    complaint = f"That cannot be read: {problem}. Answer again, exactly in the form asked for."
    return [{"role": "assistant", "content": text}, {"role": "user", "content": complaint}]
