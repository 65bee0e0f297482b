"""Weights over the network: whole or refused."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mrl.errors import SyncError
from mrl.weights.network import WeightServer, fetch
from mrl.workers.rollout import RolloutWorker


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WeightServer]:
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 20_000)
    (folder / "config.json").write_text("{}")
    (folder / "owner.lock").write_text("")
    server = WeightServer()
    server.publish(folder, 7)
    yield server
    server.close()


def test_many_readers_get_every_byte(server: WeightServer, tmp_path: Path) -> None:
    folders = [tmp_path / f"reader-{i}" for i in range(4)]
    folders[0].mkdir()
    (folders[0] / "adapter_model.safetensors").write_text("of the version before")
    threads = [threading.Thread(target=fetch, args=(server.addresses, server.token, 7, f)) for f in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        for path in folder.iterdir():
            assert path.read_bytes() == (tmp_path / "published" / path.name).read_bytes()


def test_others_and_other_versions_get_nothing(server: WeightServer, tmp_path: Path) -> None:
    for token, version in (("0" * 32, 7), (server.token, 6)):
        with pytest.raises(SyncError, match=f"before version {version} was whole"):
            fetch(server.addresses, token, version, tmp_path / "reader")
    assert not (tmp_path / "reader").exists()
    with socket.create_connection(("127.0.0.1", int(server.addresses[0].rpartition(":")[2]))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(40))
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    fetch(server.addresses, server.token, 7, tmp_path / "reader")  # it goes on serving


def test_a_publisher_that_is_not_there_or_breaks_off(server: WeightServer, tmp_path: Path) -> None:
    server.close()
    with pytest.raises(SyncError, match=r"cannot be reached from .*use weight_sync_method: volume"):
        fetch(server.addresses, server.token, 7, tmp_path / "reader")
    half = socket.create_server(("127.0.0.1", 0))

    def serve_half() -> None:
        connection, _ = half.accept()
        with connection:
            connection.recv(100)
            sizes = b'[["model.safetensors", 1000]]'
            connection.sendall(len(sizes).to_bytes(8, "big") + sizes + bytes(500))

    thread = threading.Thread(target=serve_half)
    thread.start()
    with pytest.raises(SyncError, match="ended the connection"):
        fetch([f"127.0.0.1:{half.getsockname()[1]}"], server.token, 7, tmp_path / "reader")
    thread.join()
    half.close()


async def test_workers_on_another_machine_hold_the_actors_weights(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actor and workers on two machines, but for the name: what the worker reads came over the connection."""
    from mrl.actor.worker import ActorWorker
    from mrl.backends.inline import InlineHandle
    from mrl.sync import SYNC_METHODS
    from mrl.types import TokenSequence

    monkeypatch.setattr("mrl.workers.rollout.machine_id", lambda: "another-machine")
    settings = {"model": tiny_model, "device": "cpu", "max_model_len": 64}
    actor = ActorWorker(settings, {"learning_rate": 0.01}, 5)
    actor.initialize()
    worker = RolloutWorker("transformers", settings)
    sync = SYNC_METHODS.get("direct")(tmp_path / "weights", shares_modules=False)
    handles = InlineHandle(actor, "actor", 60), InlineHandle(worker, "rollout-0", 60)
    for version in range(3):
        with torch.no_grad():
            for parameter in actor.model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        await sync.sync(handles[0], [handles[1]], version)
        ids = torch.tensor([[65, 66, 67, 68, 69]])
        expected = torch.log_softmax(actor.model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[1:, 0]
        assert worker.engine is not None
        found = await worker.engine.logprobs([TokenSequence((65, 66), (67, 68, 69))])
        torch.testing.assert_close(torch.tensor(found[0]), expected.detach(), atol=1e-5, rtol=0)
    assert worker.folder is not None
    assert (worker.folder / "fetched" / "model.safetensors").exists()
    kept = worker.folder
    worker.close()
    actor.close()
    sync.close()
    assert not kept.exists()
