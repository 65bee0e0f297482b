"""`POST /generate/` over real connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from mrl.errors import ConfigError, WorkerDied
from mrl.loop.policy_server import Gate, ServedPolicy
from mrl.rollouts.function.sampling import Seeds
from mrl.server.app import create_app
from mrl.server.serving import Serving, is_loopback
from tests.rollouts import scripted
from tests.rollouts.letters import LENGTH, Letters

VARIABLE = "MRL_TEST_TOKEN"


@asynccontextmanager
async def served(policy: Any, token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    serving = Serving("127.0.0.1:0", VARIABLE)
    await serving.start(create_app(policy, scripted.setup(stop=("run's",)), Seeds(1), token=token))
    try:
        async with httpx.AsyncClient(base_url=serving.url, timeout=20) as client:
            yield client
    finally:
        await serving.stop()


async def test_the_answer_is_that_of_trls_first_server() -> None:
    policy = Letters(turns_at=2)
    async with served(policy) as client:
        asked = {"prompts": ["one", "two"], "n": 3, "temperature": 0.7, "max_tokens": LENGTH}
        said = (await client.post("/generate/", json=asked)).raise_for_status().json()
        health = (await client.get("/health/")).json()
    tokenizer = scripted.setup().tokenizer
    assert said["prompt_ids"] == [tokenizer("one")["input_ids"], tokenizer("two")["input_ids"]]
    assert [len(ids) for ids in said["completion_ids"]] == [LENGTH] * 6
    assert said["logprobs"] == [[-0.25] * LENGTH] * 6
    assert said["policy_versions"][1] == [3, 4, 4, 4]
    assert said["policy_versions"][5] == [4] * LENGTH
    assert len({tuple(ids) for ids in said["completion_ids"]}) == 6
    assert health == {"status": "ok", "policy_version": 4}
    sampling = policy.requests[0].sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (0.7, LENGTH, ("run's",))


async def test_fields_of_the_request() -> None:
    policy = Letters()
    asked = {
        "prompts": [[5, 6, 7, 8]],
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "truncate_prompt_tokens": 2,
        "images": None,
        "generation_kwargs": {"stop": "x", "seed": 3},
    }
    async with served(policy) as client:
        first, again = [(await client.post("/generate/", json=asked)).raise_for_status().json() for _ in range(2)]
    assert first == again  # its own seed
    assert first["prompt_ids"] == [[7, 8]]
    sampling = policy.requests[0].sampling
    assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.stop) == (0.9, 0, 0.1, ("x",))
    assert sampling.max_tokens == 16  # TRL's default


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"prompts": "text"}, 422, "prompts"),
        ({"n": 0}, 422, "n: "),
        ({"temperature": -1}, 422, "temperature: "),
        ({"repetition_penalty": 1.1}, 422, "repetition_penalty: logprobs of penalised samples"),
        ({"guided_decoding_regex": "a*"}, 422, "guided_decoding_regex: "),
        ({"images": ["…"]}, 422, "images: "),
        ({"logprobs": 5}, 422, "logprobs: "),
        ({"generation_kwargs": {"frequency_penalty": 1}}, 422, "frequency_penalty is not taken"),
        ({"generation_kwargs": {"stop": [""]}}, 422, "stop is text"),
        ({"best_of": 3}, 422, "best_of: "),
        ({"prompts": [[999_999]]}, 400, "there is no token 999999"),
        ({"prompts": [""]}, 400, "one has no tokens"),
        ({"n": 1_000_000}, 400, "100,000 completions"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(changes: dict[str, Any], status: int, said: str) -> None:
    policy = Letters()
    async with served(policy) as client:
        answer = await client.post("/generate/", json={"prompts": ["one"]} | changes)
        malformed = await client.post("/generate/", content="{", headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert said in answer.json()["detail"]
    assert malformed.status_code == 422
    assert not policy.requests


async def test_workers_that_are_gone() -> None:
    class Gone(Letters):
        async def generate(self, request: Any) -> Any:
            raise WorkerDied("all are gone")

    async with served(Gone()) as client:
        answer = await client.post("/generate/", json={"prompts": ["one"]})
    assert (answer.status_code, answer.json()["detail"]) == (503, "WorkerDied: all are gone")


async def test_with_a_token_every_request_brings_it() -> None:
    async with served(Letters(), token="secret") as client:
        asked = {"prompts": ["one"]}
        answers = [
            (await client.post("/generate/", json=asked, headers=headers)).status_code
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer secret"})
        ]
        health = await client.get("/health/")
    assert answers == [401, 401, 200]
    assert health.status_code == 401


@pytest.mark.parametrize("host", ["evil.example:8000", "127.0.0.1.evil.example", "[", ""])
async def test_without_a_token_web_pages_do_not_ask(host: str) -> None:
    """A page of evil.example, which its owner lets mean 127.0.0.1, may send what it likes, but for this header."""
    async with served(Letters()) as client:
        answers = [
            (await client.post("/generate/", json={"prompts": ["one"]}, headers={"Host": name})).status_code
            for name in (host, "localhost:8000", "[::1]:8000")
        ]
        blind = [
            (await client.post("/generate/", content='{"prompts": ["one"]}', headers=headers)).status_code
            for headers in ({}, {"Content-Type": "text/plain"})  # which a page may send anywhere
        ]
    assert answers == [403, 200, 200]
    assert blind == [422, 422]


async def test_nobody_samples_for_a_client_that_has_gone() -> None:
    policy = Letters(seconds=30)
    async with served(policy) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/generate/", json={"prompts": ["one"], "n": 2}, timeout=0.3)
        while policy.cancelled < 2:
            await asyncio.sleep(0.01)


async def test_requests_under_way_do_not_keep_it_from_ending() -> None:
    policy = Letters(seconds=600)
    async with served(policy) as client:
        asking = asyncio.ensure_future(client.post("/generate/", json={"prompts": ["one"]}))
        while not policy.requests:
            await asyncio.sleep(0.01)
    with pytest.raises(httpx.HTTPError):
        (await asking).raise_for_status()


async def test_other_programs_ask_at_0_0_0_0_too() -> None:
    """As TRL's documentation writes it: from this machine it is this machine."""
    serving = Serving("127.0.0.1:0", VARIABLE)
    await serving.start(create_app(Letters(), scripted.setup(), Seeds(1)))
    try:
        async with httpx.AsyncClient() as client:
            port = serving.url.rpartition(":")[2]
            assert (await client.post(f"http://0.0.0.0:{port}/generate/", json={"prompts": ["x"]})).status_code == 200
    finally:
        await serving.stop()


# --- addresses ------------------------------------------------------------------------------------------------------


def test_an_address_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"serve: 127.0.0.1:{port} is taken .* serve: 127.0.0.1:0"):
            Serving(f"127.0.0.1:{port}", VARIABLE)


def test_two_at_once_cannot_have_one_port() -> None:
    first = Serving("127.0.0.1:0", VARIABLE)
    with pytest.raises(ConfigError, match="is taken"):
        Serving(first.url.removeprefix("http://"), VARIABLE)
    asyncio.run(first.stop())
    asyncio.run(Serving(first.url.removeprefix("http://"), VARIABLE).stop())


@pytest.mark.parametrize("address", ["8000", "127.0.0.1", "127.0.0.1:x", ":8000", "127.0.0.1:70000"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="not of the form host:port"):
        Serving(address, VARIABLE)


def test_an_address_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "secret")
    with pytest.raises(ConfigError, match=r"serve: 192\.0\.2\.1:1 cannot be served"):
        Serving("192.0.2.1:1", VARIABLE)


def _serving_off_loopback(monkeypatch: pytest.MonkeyPatch, token: str | None) -> Serving:
    monkeypatch.delenv(VARIABLE, raising=False)
    if token is not None:
        monkeypatch.setenv(VARIABLE, token)
    return Serving("0.0.0.0:0", VARIABLE)


@pytest.mark.parametrize("token", [None, ""])
def test_off_loopback_a_token_is_needed(monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    with pytest.raises(ConfigError, match="environment variable MRL_TEST_TOKEN"):
        _serving_off_loopback(monkeypatch, token)


def test_off_loopback_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = _serving_off_loopback(monkeypatch, "secret")
    assert serving.token == "secret"
    serving.socket.close()


def test_what_is_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org")] == [False] * 4


# --- while the actor trains -----------------------------------------------------------------------------------------


async def test_requests_wait_while_weights_are_not_to_be_touched() -> None:
    gate, policy = Gate(), Letters(seconds=0.05)
    async with served(ServedPolicy(policy, gate)) as client:

        async def ask() -> int:
            return (await client.post("/generate/", json={"prompts": ["one"]})).status_code

        first = asyncio.ensure_future(ask())
        while not policy.requests:
            await asyncio.sleep(0.01)
        async with gate.held(), gate.held():  # begins when the first is through
            assert not gate.passing
            second = asyncio.ensure_future(ask())
            await asyncio.sleep(0.1)
            assert len(policy.requests) == 1
        assert [await first, await second] == [200, 200]
