"""One server for all tests of a process, as new for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mrl.rewards.judge import endpoint
from tests.rewards.judge.server import JudgeServer, serve


@pytest.fixture(scope="session")
def running_server() -> Iterator[JudgeServer]:
    state, end = serve()
    yield state
    end()


@pytest.fixture
def server(running_server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> JudgeServer:
    monkeypatch.setattr(endpoint, "FIRST_BACKOFF", 0.01)
    running_server.reset()
    return running_server
