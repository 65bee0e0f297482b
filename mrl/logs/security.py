"""Who may look: this machine alone, or whoever brings the token; and what the browser may do with a page."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Any
from urllib.parse import parse_qsl, urlencode

from mrl.server.serving import is_loopback

COOKIE = "mrl_logs"
"""The beginning of the cookie's name."""
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
METHODS = ("GET", "HEAD")


class Guard:
    """ASGI middleware in front of every route.

    token: what the first visit has to bring as `?token=`; then a cookie holds a value made from it. Without one, only
    requests that name this machine are answered: a foreign page whose name is made to mean 127.0.0.1 says that name.
    """

    def __init__(self, app: Any, token: str | None) -> None:
        self.app, self.token = app, token
        self.cookie = "" if token is None else hashlib.sha256(f"mrl logs {token}".encode()).hexdigest()
        self.name = f"{COOKIE}_{self.cookie[:8]}"  # a cookie is for every port of a host, also another page's

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            return None
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["method"] not in METHODS:
            return await _answer(send, 405, "This page only shows: GET and HEAD are all it knows.")
        if _is_embedded_elsewhere(headers):
            return await _answer(send, 403, "Another page asked for this: open it in a tab of its own.")
        if self.token is None:
            if not is_for_this_machine(headers.get("host", "")):
                return await _answer(
                    send, 403, "Without a token this page is for 127.0.0.1 and localhost: use that address."
                )
            return await self.app(scope, receive, _with_headers(send))
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = dict(query).get("token")
        if given is None and self._knows(headers):
            return await self.app(scope, receive, _with_headers(send))
        if not hmac.compare_digest((given or "").encode(), self.token.encode()):
            return await _answer(send, 401, "Open the link that `mrl logs` printed: it has the token.")
        # The link without its token: it stays in no history and in no copied address.
        rest = urlencode([pair for pair in query if pair[0] != "token"])
        path = re.sub(r"^[/\\]+", "/", scope.get("raw_path", b"/").decode("latin-1").split("?")[0])
        cookie = f"{self.name}={self.cookie}; Path=/; HttpOnly; SameSite=Lax; Max-Age=2592000"
        extra = [(b"location", f"{path}{'?' if rest else ''}{rest}".encode()), (b"set-cookie", cookie.encode())]
        return await _answer(send, 303, "", extra)

    def _knows(self, headers: dict[str, str]) -> bool:
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(bearer.encode(), (self.token or "").encode()):
            return True
        for part in headers.get("cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == self.name and hmac.compare_digest(value.encode(), self.cookie.encode()):
                return True
        return False


def _with_headers(send: Any) -> Any:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *HEADERS]
        await send(message)

    return sending


def _is_embedded_elsewhere(headers: dict[str, str]) -> bool:
    """Whether a page from elsewhere wants this as a part of itself, as far as the browser tells. It could not read the
    answer, but learn from how long it takes, and keep this process busy. A link that is followed is all right."""
    foreign = headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
    return foreign and headers.get("sec-fetch-mode") != "navigate"


def new_token() -> str:
    """One that nobody guesses."""
    return secrets.token_urlsafe(24)


def is_for_this_machine(host: str) -> bool:
    """The header `Host`."""
    return is_loopback(re.sub(r":\d*$", "", host).strip("[]"))


async def _answer(send: Any, status: int, text: str, extra: Any = ()) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *HEADERS, *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
