"""The processor with OpenEnv's own server and clients: by address, as a container, from the Hub, as a client."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from mrl.evals import EvaluationRow, Message, OpenEnvRolloutProcessor, RolloutProcessorConfig
from tests.evals.chat_server import ChatServer

pytestmark = [pytest.mark.openenv, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def games() -> Any:
    """Imported where they are needed: with openenv that takes seconds."""
    return importlib.import_module("tests.rollouts.openenv.games")


@pytest.fixture
def server(games: Any) -> Iterator[Any]:
    server = games.Server().start()
    yield server
    server.stop()


class Provider:
    """Whose container is a server that runs already."""

    started: list[tuple[str, Any]]

    def __init__(self, url: str) -> None:
        self.url, self.started = url, []

    def start_container(self, image: str, **options: Any) -> str:
        self.started.append((image, options))
        return self.url

    def wait_for_ready(self, url: str, timeout_s: float = 0) -> None:
        assert url == self.url

    def stop_container(self) -> None:
        self.started.append(("stopped", {}))


async def played(**options: Any) -> list[EvaluationRow]:
    rows = [EvaluationRow(messages=[Message(role="user", content=f"Play {n}.")]) for n in range(3)]
    for number, row in enumerate(rows):
        row.input_metadata.dataset_info = {"seed": number}
    with ChatServer(lambda body: str(sum(one["role"] == "assistant" for one in body["messages"]))).running() as chat:
        made = OpenEnvRolloutProcessor(prompt_builder=lambda seen, step, history: seen.text, **options)
        config = RolloutProcessorConfig({"model": "m", "base_url": chat.url}, steps=12)
        try:
            return list(await asyncio.gather(*made(rows, config)))
        finally:
            await made.acleanup()


def ended(rows: list[EvaluationRow]) -> bool:
    return all(row.execution_metadata.extra["step_rewards"][-1] == 1.0 for row in rows)


async def test_a_server_by_its_address(server: Any, games: Any) -> None:
    assert ended(await played(env_base_url=server.url, action_parser=lambda text: {"text": text}))
    typed = await played(
        env_base_url=server.url,
        env_client_cls=games.GuessClient,
        action_parser=lambda text: games.GuessAction(text=text),
        default_headers={"X-Own": "1"},
    )
    assert ended(typed)


@pytest.mark.parametrize("kind", ["docker_image", "hub_repo_id"])
async def test_containers(server: Any, games: Any, kind: str) -> None:
    provider = Provider(server.url)
    rows = await played(
        **{kind: "owner/game"},
        env_client_cls=games.GuessClient,
        action_parser=lambda text: games.GuessAction(text=text),
        provider=provider,
        docker_port=8123,
        env_vars={"LEVEL": "2"},
    )
    assert ended(rows)
    (image, options), (last, _) = provider.started
    assert image == ("owner/game" if kind == "docker_image" else "registry.hf.space/owner-game:latest")
    assert (options["env_vars"], options["port"], last) == ({"LEVEL": "2"}, 8123, "stopped")


@pytest.mark.parametrize("sync", [True, False])
async def test_a_factory_of_clients(server: Any, games: Any, sync: bool) -> None:
    def client() -> Any:
        made = games.GuessClient(base_url=server.url)
        return made.sync() if sync else made

    assert ended(await played(env_factory=client, action_parser=lambda text: games.GuessAction(text=text)))
