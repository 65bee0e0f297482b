"""Who may look, and what a page may do."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from mrl.errors import ConfigError
from mrl.logs.serve import TOKEN, take_address
from tests.logs.conftest import client_of

SECRET = "a-token-that-nobody-guesses"


def test_every_answer_has_the_policy(client: TestClient) -> None:
    for path in ("/", "/run/first", "/run/none", "/static/page.js", "/run/first/series.json", "/nowhere"):
        found = client.get(path).headers
        policy = found["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert found["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "127.0.0.1"])
def test_hosts_that_are_this_machine(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["attacker.example", "attacker.example:8000", "127.0.0.1.attacker.example", "", "0.0.0.0"]
)
def test_another_name_for_this_machine_is_refused(client: TestClient, host: str) -> None:
    """A web page elsewhere can make its own name mean 127.0.0.1."""
    assert client.get("/", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(client: TestClient, method: str) -> None:
    assert client.request(method, "/run/first").status_code == 405


def test_other_pages_cannot_embed_it(client: TestClient) -> None:
    """Not as an image, a frame or a script, nor from another port of this machine; a link to it is followed."""
    for site in ("cross-site", "same-site"):
        for mode in ("no-cors", "cors", "websocket"):
            found = client.get("/run/first", headers={"sec-fetch-site": site, "sec-fetch-mode": mode})
            assert found.status_code == 403
            assert "first" not in found.text
        assert client.get("/", headers={"sec-fetch-site": site, "sec-fetch-mode": "navigate"}).status_code == 200
    assert client.get("/", headers={"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}).status_code == 200


ODD = ("99999999999999999999999", "²", "-1", "\x00\ud800")


@pytest.mark.parametrize("odd", ODD)
def test_odd_values_are_refused_or_left_out(client: TestClient, odd: str) -> None:
    value = quote(odd, safe="", errors="surrogatepass")
    for path in (
        "series.json?since={}",
        "events?before={}",
        "rollout/9?view=tokens&at={}",
        "tasks?after={}",
        "task?id={}",
    ):
        assert client.get(f"/run/first/{path.format(value)}").status_code in (200, 404)
    for name in ("step", "min", "version", "after", "before", "text", "task", "order", "split"):
        assert client.get(f"/run/first/rollouts?{name}={value}").status_code == 200
    for name in ("listed", "searched", "on", "more", "looked", "counting", "total"):
        assert client.get(f"/run/first/rollouts?text=a&{name}={value}").status_code == 200
    for path in ("group/train/{}/0", "group/train/1/{}", "rollout/{}", "rollout/9/message/{}", "image/{}"):
        assert client.get(f"/run/first/{path.format(value)}").status_code == 404
    for path in ("/evals?e={}&by={}", "/evals/diff?a=first@4&b=first@8&at={}", "/evals/diff?a={}", "/compare?run={}"):
        assert client.get(path.format(value, value)).status_code in (200, 404)


def test_a_token_becomes_a_cookie(runs: Path) -> None:
    client = client_of(runs, token=SECRET)
    client.base_url = client.base_url.copy_with(host="box.example")
    for path in ("/", "/static/page.js", "/?token=wrong", "/?token=", "/run/first?token=" + SECRET[:-1]):
        assert client.get(path, follow_redirects=False).status_code == 401
    first = client.get(f"/run/first?y=train/kl&token={SECRET}", follow_redirects=False)
    assert (first.status_code, first.headers["location"]) == (303, "/run/first?y=train%2Fkl")
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite" in cookie
    assert SECRET not in cookie
    assert client.get("/run/first").status_code == 200
    again = client.get(f"/?token={SECRET}", follow_redirects=False)
    assert again.headers["location"] == "/"  # the token stays in no history
    client.cookies.clear()
    assert client.get("/").status_code == 401
    assert client.get("/", headers={"authorization": f"Bearer {SECRET}"}).status_code == 200
    assert client.get("/", headers={"cookie": f"{cookie.partition('=')[0]}=wrong"}).status_code == 401
    assert client.get("/", headers={"cookie": f"mrl_logs={SECRET}"}).status_code == 401


def test_the_redirect_stays_here(runs: Path) -> None:
    client = client_of(runs, token=SECRET)
    for path in ("//attacker.example/", "/\\attacker.example/"):
        client.cookies.clear()
        found = client.get(f"http://127.0.0.1:8000{path}?token={SECRET}", follow_redirects=False)
        assert re.fullmatch(r"/[^/\\].*", found.headers["location"])


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/run/../../etc"),
        *("/run/first/image/" + "a" * 64, "/run/first/image/..%2f..%2frun.db", "/run/%2e%2e/rollouts"),
    ],
)
def test_no_other_files(client: TestClient, path: str) -> None:
    found = client.get(path)
    assert found.status_code in (404, 503)
    assert "def create_app" not in found.text


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    here = take_address("127.0.0.1", 0)
    assert here.token is None
    port = here.socket.getsockname()[1]
    assert here.link == f"http://127.0.0.1:{port}/"
    with pytest.raises(ConfigError, match=f"--port: {port} is taken by another program"):
        take_address("127.0.0.1", port)
    beside = take_address("127.0.0.1", port, any_port=True)
    assert beside.socket.getsockname()[1] != port
    everywhere = take_address("0.0.0.0", 0)
    assert everywhere.token is not None
    assert len(everywhere.token) >= 30
    assert everywhere.link.endswith(f"?token={everywhere.token}")
    assert socket.gethostname() in everywhere.link
    monkeypatch.setenv(TOKEN, SECRET)
    own, shared = take_address("0.0.0.0", 0), take_address("127.0.0.1", 0)
    assert own.token == shared.token == SECRET  # also here: others may use this machine
    for address in (here, beside, everywhere, own, shared):
        address.socket.close()
    with pytest.raises(ConfigError, match="--host: 'no-such-host' is no address"):
        take_address("no-such-host", 0)
    with pytest.raises(ConfigError, match="--port: 70000"):
        take_address("127.0.0.1", 70000)
