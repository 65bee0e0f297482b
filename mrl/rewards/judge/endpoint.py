"""An OpenAI-compatible endpoint: a request is sent until it is answered, or clear that it will not be."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

LONGEST_BACKOFF = 30.0
LONGEST_WAIT = 300.0
"""Seconds that a Retry-After may ask for; a longer one is an outage."""
FIRST_BACKOFF = 1.0
_AGAIN = (408, 409, 425, 429)
_HOPELESS = ("insufficient_quota", "billing_not_active")
"""Codes of a 429 that no waiting mends."""
_SHOWN = 300


class NoAnswer(Exception):
    """The endpoint did not answer, or refused. retries: tries beyond the first."""

    def __init__(self, message: str, *, retries: int = 0, status: int | None = None) -> None:
        super().__init__(message)
        self.retries, self.status = retries, status

    @property
    def refused(self) -> bool:
        """Whether it is the request that was found wrong."""
        return self.status in (400, 404, 415, 422, 501)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said."""

    text: str
    cut: bool
    """It ended at a limit of tokens."""
    prompt_tokens: int
    completion_tokens: int
    retries: int = 0


class Endpoint:
    """Speaks to one server, from one event loop."""

    def __init__(self, url: str, key: str | None, *, timeout: float, retries: int) -> None:
        """url: up to `/v1`. key: sent as a bearer token; it is in no message. timeout: seconds for one try."""
        self.url, self._key, self._timeout, self._retries = url, key, timeout, retries
        self._client = httpx.AsyncClient(
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=None,  # `timeout` is for the whole answer, not for its next byte
            limits=httpx.Limits(max_connections=None),  # who asks has a limit
        )
        self._jitter = random.Random()  # not the process's, whose draws belong to reward functions
        self._down = False
        """Nothing was answered since a request was given up: further ones are tried once, so that an outage is over
        quickly."""

    async def ask(self, body: dict[str, Any]) -> Answer:
        """Send a chat completion. Raises NoAnswer."""
        retries = 0
        while True:
            try:
                answer = await self._try(body, retries)
            except _Trouble as trouble:
                wait = self._wait(retries, trouble.retry_after)
                if not trouble.passing or self._down or retries >= self._retries or wait > LONGEST_WAIT:
                    self._down = self._down or trouble.passing
                    tries = f" ({retries + 1} tries)" if retries else ""
                    message = f"{self.url} {trouble}{tries}"
                    raise NoAnswer(message, retries=retries, status=trouble.status) from None
                retries += 1
                await asyncio.sleep(wait)
            else:
                self._down = False
                return answer

    async def close(self) -> None:
        """End its connections."""
        await self._client.aclose()

    async def _try(self, body: dict[str, Any], retries: int) -> Answer:
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.post(f"{self.url}/chat/completions", content=json.dumps(body))
        except TimeoutError:
            raise _Trouble(f"did not answer within {self._timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _Trouble(f"could not be reached ({type(error).__name__}: {error})".replace(": )", ")")) from None
        status = response.status_code
        if status != 200:
            said, code = _error_of(response)
            said = self._without_key(said)[:_SHOWN]
            passing = (status in _AGAIN or status >= 500) and status != 501 and code not in _HOPELESS
            raise _Trouble(f"answered {status}: {said}", passing, status, _retry_after(response))
        try:
            return _read(response.json(), retries)
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError):
            said = self._without_key(response.text)[:_SHOWN]
            raise _Trouble(f"answered what is no chat completion: {said!r}") from None

    def _wait(self, retries: int, retry_after: float | None) -> float:
        backoff = min(FIRST_BACKOFF * 2**retries, LONGEST_BACKOFF) * (1 + self._jitter.random() / 4)
        return max(backoff, retry_after or 0.0)

    def _without_key(self, text: str) -> str:
        """Servers may quote the key that they refuse; messages are recorded."""
        return text.replace(self._key, "…") if self._key else text


class _Trouble(Exception):
    """Of one try. passing: another one may go better."""

    def __init__(
        self, message: str, passing: bool = True, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.passing, self.status, self.retry_after = passing, status, retry_after


def _read(answered: dict[str, Any], retries: int) -> Answer:
    choice = answered["choices"][0]
    usage = answered.get("usage") or {}
    return Answer(
        text=(choice["message"].get("content") or "").encode(errors="replace").decode(),  # without lone surrogates
        cut=choice.get("finish_reason") == "length",
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        retries=retries,
    )


def _count(tokens: Any) -> int:
    """Raises ValueError for what no answer takes: it is added up, and bounds what a judge may cost."""
    number = int(tokens or 0)
    if not 0 <= number < 2**40:
        raise ValueError(f"{number} tokens")
    return number


def _error_of(response: httpx.Response) -> tuple[str, str | None]:
    """What the server says went wrong, and its code for it."""
    try:
        body = response.json()
        error = body.get("error", body)
        said = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        code = error.get("code") if isinstance(error, dict) else None
    except (ValueError, AttributeError, RecursionError):
        said, code = response.text, None
    return " ".join(str(said or response.reason_phrase).split()) or "no reason", code


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds, from either form of the header."""
    value = response.headers.get("retry-after", "").strip()
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max((when - datetime.now(UTC)).total_seconds(), 0.0) if when.tzinfo else None
