"""Against real folders: a Hub cache as huggingface_hub lays it out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mrl.cli.cache import cache, cached, clear
from mrl.errors import ConfigError


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def add_repo(hub: Path, name: str, kind: str = "models", revisions: tuple[str, ...] = ("a" * 40,)) -> Path:
    """blobs/, snapshots/<revision>/ with links into blobs/, refs/main: as `snapshot_download` leaves them."""
    repo = hub / f"{kind}--{name.replace('/', '--')}"
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revisions[0])
    for number, revision in enumerate(revisions):
        blob = repo / "blobs" / f"{number:064x}"
        blob.write_bytes(b"x" * 1000)
        snapshot = repo / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to(os.path.relpath(blob, snapshot))
    return repo


def test_lists_the_largest_first(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cached() == []
    assert cache(["list"]) == 0
    assert "nothing is cached" in capsys.readouterr().out
    add_repo(hub, "org/small")
    add_repo(hub, "org/large", revisions=("b" * 40, "c" * 40))
    add_repo(hub, "org/rows", kind="datasets")
    assert cache(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(entry["kind"], entry["name"], entry["bytes"]) for entry in found] == [
        ("model", "org/large", 2000),
        ("dataset", "org/rows", 1000),
        ("model", "org/small", 1000),
    ]
    assert all(entry["last_used"] > 1e9 for entry in found)
    assert cache(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["model", "dataset", "model"]


def test_clear_says_what_it_removes(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repo = add_repo(hub, "org/model")
    assert cache(["clear", "--model", "org/model", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("would remove model")
    assert repo.exists()
    assert cache(["clear", "--model", "org/model"]) == 0
    assert capsys.readouterr().out.startswith("removed model")
    assert not repo.exists()


def test_clear_model_takes_every_revision_of_that_model_only(hub: Path) -> None:
    repo = add_repo(hub, "org/model", revisions=("b" * 40, "c" * 40))
    other = add_repo(hub, "org/model-2")
    rows = add_repo(hub, "org/model", kind="datasets")
    assert clear("org/model", dry_run=True).size_on_disk == 2000
    assert repo.exists()
    assert clear("org/model").repo_id == "org/model"
    assert not repo.exists()
    assert other.exists()
    assert rows.exists()


def test_a_copy_with_the_same_commits_stays(hub: Path) -> None:
    names = [f"org/copy-{i}" for i in range(6)]
    repos = [add_repo(hub, name) for name in names]
    for number, name in enumerate(names):
        clear(name)
        assert [repo.exists() for repo in repos] == [False] * (number + 1) + [True] * (5 - number)


def test_an_interrupted_download_can_be_cleared(hub: Path) -> None:
    repo = add_repo(hub, "org/half", revisions=("b" * 40,))
    (repo / "refs" / "main").unlink()
    (repo / "snapshots" / ("b" * 40) / "model.safetensors").unlink()
    (repo / "snapshots" / ("b" * 40)).rmdir()
    (repo / "blobs" / "part.incomplete").write_bytes(b"x")
    clear("org/half")
    assert not repo.exists()


def test_unknown_models_name_the_cached_ones(hub: Path) -> None:
    with pytest.raises(ConfigError, match=r"'org/model' is not in the Hub cache .*\(cached: none\)"):
        clear("org/model")
    add_repo(hub, "org/model")
    with pytest.raises(ConfigError, match=r"did you mean 'org/model'\? \(cached: org/model\)"):
        clear("org/modle")


def test_links_are_never_followed(hub: Path, tmp_path: Path) -> None:
    outside = add_repo(tmp_path / "elsewhere", "org/linked")
    hub.mkdir()
    (hub / outside.name).symlink_to(outside)
    with pytest.raises(ConfigError, match="outside the cache: left alone"):
        clear("org/linked")
    assert (outside / "refs" / "main").exists()

    repo = add_repo(hub, "org/model")
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    (repo / "snapshots" / ("a" * 40) / "extra").symlink_to(precious)
    clear("org/model")
    assert not repo.exists()
    assert precious.read_text() == "mine"
