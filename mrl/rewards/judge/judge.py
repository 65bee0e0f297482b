"""The reward: which verdicts a batch needs, what they come to, and what they took."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from pydantic import PrivateAttr

from mrl.errors import ConfigError, RewardError
from mrl.rewards.base import RewardRequest, Scores
from mrl.rewards.judge.asking import Asker, Tally
from mrl.rewards.judge.cache import FILE, AnswerCache
from mrl.rewards.judge.endpoint import Endpoint, NoAnswer
from mrl.rewards.judge.options import JudgeOptions
from mrl.rewards.judge.rubric import MissingColumn, answer_text, groupwise_messages, pointwise_messages, prompt_text
from mrl.rewards.judge.verdicts import (
    SCORE,
    Unreadable,
    Verdict,
    group_format,
    group_schema,
    read_group,
    read_score,
    score_format,
    score_schema,
    shares_beaten,
)
from mrl.system.gather import all_of
from mrl.types import Message, Task, derive_seed

_Failed = (NoAnswer, Unreadable, MissingColumn)
TRIED = ("The answer is 4.", "I do not know.")
"""Made-up completions."""


class Judge(JudgeOptions):
    """A language model that scores completions by a rubric; see `JudgeOptions` for what it takes.

        Judge(model="gpt-4o-mini", base_url="https://api.openai.com/v1", api_key_env="OPENAI_API_KEY",
              rubric="Is the answer polite and to the point?")

    A completion that it gave no verdict on, because it was not there or could not be understood twice, has failed with
    the reason, and never scored 0. Raises ConfigError.
    """

    bounded: ClassVar[bool] = True  # each request has its time-out
    independent: ClassVar[bool] = True

    _folder: Path | None = PrivateAttr(None)
    _cache: AnswerCache | None = PrivateAttr(None)
    _asker: Asker | None = PrivateAttr(None)
    _loop: asyncio.AbstractEventLoop | None = PrivateAttr(None)

    @property
    def logged(self) -> tuple[str, ...]:
        """The metrics it logs."""
        counts = ["requests", "retries", "prompt_tokens", "completion_tokens", "cached_fraction"]
        counts += [] if self.prompt_price is None else ["cost"]
        return tuple(f"{self._prefix}/{name}" for name in [*counts, *(f"{name}/mean" for name in self.criteria)])

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises ConfigError when the rubric names what is no column."""
        known = sorted(set(columns))
        subject = "completions" if self.groupwise else "completion"
        if missing := sorted(self.columns - set(known)):
            raise ConfigError(
                f"rubric: {{{missing[0]}}} is neither {{prompt}}, {{{subject}}} nor a dataset column "
                f"({', '.join(known) or 'there are none'}); write {{{{{missing[0]}}}}} for the text itself"
            )

    def check_attempts(self, attempts: int) -> None:
        """Raises ConfigError when completions are put in order, and there is but one of each held-out task."""
        if self.groupwise == "order" and attempts < 2:
            raise ConfigError(
                f"groupwise: order: {self.name} compares a task's completions, and each held-out task is attempted "
                "once; use groupwise: scores, or leave the held-out tasks out (mrl eval: --num-samples 2 or more)"
            )

    def open(self, folder: Path | None) -> None:
        """Open the cache. folder: the run's. Raises RewardError."""
        if self._cache is not None and folder != self._folder:
            self._cache.close()
            self._cache = self._asker = None
        self._folder = folder
        self._opened_cache()

    async def score(self, requests: list[RewardRequest], *, trainer_state: Any) -> Scores:
        """Ask for a verdict on every completion, or on every task's. Raises RewardError when there is no key."""
        tally = Tally()
        rated = await (self._rate_groups if self.groupwise else self._rate_each)(requests, tally)
        scores = Scores([None] * len(requests), metrics=tally.metrics(self._prefix, self))
        for row, found in enumerate(rated):
            if isinstance(found, Verdict):
                scores.values[row] = self._joined(found.values)
            else:
                scores.errors[row] = f"{self.name}: {found}"
        verdicts = [found for found in rated if isinstance(found, Verdict)]
        for name in self.criteria if verdicts else ():
            scores.metrics[f"{self._prefix}/{name}/mean"] = [verdict.values[name] for verdict in verdicts]
            scores.extra[f"{self.name}_{name}"] = [v.values[name] if isinstance(v, Verdict) else None for v in rated]
        if any(verdict.reason for verdict in verdicts):
            scores.extra[f"{self.name}_reason"] = [v.reason if isinstance(v, Verdict) else None for v in rated]
        return scores

    async def try_once(self, task: Task) -> list[str]:
        """Have a made-up completion of a task judged: does the endpoint answer, and so that it can be read?

        Returns what that took, as a sentence. Raises RewardError when there is no answer.
        """
        texts = TRIED if self.groupwise else TRIED[:1]
        made_up: list[str | list[Message]] = [
            text if isinstance(task.prompt, str) else [{"role": "assistant", "content": text}] for text in texts
        ]
        requests = [RewardRequest(f"{task.id}/trial", task.prompt, c, [], task.columns, task.id) for c in made_up]
        tally = Tally()
        found = (await (self._rate_groups if self.groupwise else self._rate_each)(requests, tally))[0]
        if isinstance(found, NoAnswer):
            raise RewardError(f"reward_funcs: {self.name}: {found}; it was asked for a trial (reward_trial)")
        cost = self.cost(tally.prompt_tokens, tally.completion_tokens)
        took = f"{tally.prompt_tokens} + {tally.completion_tokens} tokens"
        notice = f"{self.name}: a trial of {self.model} took {took}{'' if cost is None else f', cost {cost:.2g}'}."
        if self.structured and not self._asker_here().structured:
            notice += " It refuses JSON schemas, so its answers are read as it writes them."
        if not isinstance(found, Verdict):
            notice += f" It gave no verdict: {found}."
        return [notice]

    async def close(self) -> None:
        """Give up what is being asked, and let go of connections and cache."""
        if self._asker is not None and self._loop is asyncio.get_running_loop():
            await self._asker.close()
        if self._cache is not None:
            self._cache.close()
        self._asker = self._cache = self._loop = None

    def recorded(self) -> dict[str, Any]:
        """As a recipe would say it."""
        return {"judge": self.model_dump(mode="json", exclude_defaults=True)}

    def __reduce__(self) -> Any:
        return _remade, (type(self), self.model_dump())  # connections stay where they are

    # --- verdicts ---------------------------------------------------------------------------------------------------

    async def _rate_each(self, requests: list[RewardRequest], tally: Tally) -> list[Verdict | Exception]:
        asker, format_text, schema = self._asker_here(), score_format(self), score_schema(self)

        async def rate(request: RewardRequest) -> Verdict | Exception:
            try:
                messages = pointwise_messages(self.rubric, format_text, request)
                votes = [
                    asker.verdict(messages, schema, lambda text: read_score(text, self), tally, vote)
                    for vote in range(self.samples)
                ]
                return _mean(await all_of(votes))
            except _Failed as failure:
                return failure

        return await all_of([rate(request) for request in requests])

    async def _rate_groups(self, requests: list[RewardRequest], tally: Tally) -> list[Verdict | Exception]:
        tasks: dict[str, list[int]] = {}
        for row, request in enumerate(requests):
            tasks.setdefault(request.task_id, []).append(row)
        rated: dict[int, Verdict | Exception] = {}
        for part in await all_of([self._rate_group(requests, rows, tally) for rows in tasks.values()]):
            rated |= part
        return [rated[row] for row in range(len(requests))]

    async def _rate_group(
        self, requests: list[RewardRequest], rows: list[int], tally: Tally
    ) -> dict[int, Verdict | Exception]:
        """Of one task's completions; equal ones are shown once, and get the same."""
        texts = [answer_text(requests[row].completion) for row in rows]
        distinct, ordered = sorted(set(texts)), self.groupwise == "order"
        if ordered and len(rows) == 1:
            alone = "one completion alone has no place in an order; groupwise: scores can score it"
            return {rows[0]: Unreadable(alone)}
        if ordered and len(distinct) == 1:
            return dict.fromkeys(rows, Verdict({SCORE: shares_beaten([0.0] * len(rows))[0]}))
        try:
            votes = [self._vote(requests[rows[0]], distinct, tally, vote) for vote in range(self.samples)]
            verdicts = await all_of(votes)
        except _Failed as failure:
            return dict.fromkeys(rows, failure)
        by_vote = [[verdict.values[text] for text in texts] for verdict in verdicts]
        if ordered:
            by_vote = [shares_beaten(values) for values in by_vote]
        means = [fmean(values) for values in zip(*by_vote, strict=True)]
        return {row: Verdict({SCORE: mean}, verdicts[0].reason) for row, mean in zip(rows, means, strict=True)}

    async def _vote(self, request: RewardRequest, texts: list[str], tally: Tally, vote: int) -> Verdict:
        """One verdict on the texts, shown in an order of its own; by text."""
        shown = list(texts)
        random.Random(derive_seed(self.seed, vote, prompt_text(request.prompt), *texts)).shuffle(shown)
        labels = [_label(number) for number in range(len(shown))]
        messages = groupwise_messages(
            self.rubric, group_format(self, labels), request, dict(zip(labels, shown, strict=True))
        )
        verdict = await self._asker_here().verdict(
            messages, group_schema(self, labels), lambda text: read_group(text, self, labels), tally, vote
        )
        by_text = {text: verdict.values[label] for label, text in zip(labels, shown, strict=True)}
        return Verdict(by_text, verdict.reason)

    def _joined(self, values: dict[str, float]) -> float:
        if not self.criteria:
            return values[SCORE]
        weights = {name: criterion.weight for name, criterion in self.criteria.items()}
        return sum(values[name] * weight for name, weight in weights.items()) / sum(weights.values())

    # --- what it asks with ------------------------------------------------------------------------------------------

    @property
    def _prefix(self) -> str:
        return f"reward/{self.name}"

    def _asker_here(self) -> Asker:
        """For the running event loop."""
        loop = asyncio.get_running_loop()
        if self._asker is None or self._loop is not loop:
            endpoint = Endpoint(self.base_url, self._key(), timeout=self.timeout, retries=self.retries)
            self._asker, self._loop = Asker(self, endpoint, self._opened_cache()), loop
        return self._asker

    def _opened_cache(self) -> AnswerCache:
        if self._cache is None:
            own = None if self._folder is None else self._folder / FILE
            self._cache = AnswerCache(own if self.cache is None else Path(self.cache).expanduser())
        return self._cache

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise RewardError(
                f"reward_funcs: {self.name}: api_key_env: {self.api_key_env} is not set where reward workers run"
            )
        if not (key.isascii() and key.isprintable() and " " not in key):  # or a client's error would quote it
            raise RewardError(
                f"reward_funcs: {self.name}: api_key_env: {self.api_key_env} holds spaces, line ends or signs that "
                "no key has; set it to the key alone"
            )
        return key


def _mean(verdicts: list[Verdict]) -> Verdict:
    values = {name: fmean(verdict.values[name] for verdict in verdicts) for name in verdicts[0].values}
    return Verdict(values, verdicts[0].reason)


def _label(number: int) -> str:
    """A, B, … Z, AA, AB …"""
    letters = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters


def _remade(kind: type[Judge], options: dict[str, Any]) -> Judge:
    return kind(**options)
