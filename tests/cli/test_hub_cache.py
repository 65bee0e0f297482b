"""Against real folders: a Hub cache as huggingface_hub lays it out, and mrl's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mrl.cli.hub_cache import TAG_FILE, cache_dir, clear_cache, list_cache
from mrl.errors import ConfigError


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setenv("MRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MRL_RUNS", str(tmp_path / "runs"))
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


def test_lists_own_and_hub_entries(hub: Path) -> None:
    assert list_cache() == []
    add_repo(hub, "org/small")
    add_repo(hub, "org/large", revisions=("b" * 40, "c" * 40))
    add_repo(hub, "org/rows", kind="datasets")
    (cache_dir(create=True) / "weights").mkdir()
    (cache_dir() / "weights" / "v1.safetensors").write_bytes(b"y" * 10)
    found = [(entry.kind, entry.name, entry.bytes) for entry in list_cache()]
    assert found == [
        ("mrl", "weights", 10),
        ("model", "org/large", 2000),
        ("dataset", "org/rows", 1000),
        ("model", "org/small", 1000),
    ]
    assert all(entry.last_used > 1e9 for entry in list_cache())


def test_clear_takes_only_mrls_own(hub: Path, tmp_path: Path) -> None:
    repo = add_repo(hub, "org/model")
    own = cache_dir(create=True)
    (own / "weights").mkdir()
    (own / "weights" / "v1").write_bytes(b"y" * 10)
    (own / "loose").write_bytes(b"z" * 5)
    would = clear_cache(dry_run=True)
    assert [entry.name for entry in would] == ["loose", "weights"]
    assert (own / "weights" / "v1").exists()
    assert clear_cache() == would
    assert [path.name for path in own.iterdir()] == [TAG_FILE]
    assert repo.exists()
    assert clear_cache() == []


def test_clear_model_takes_every_revision_of_that_model_only(hub: Path) -> None:
    repo = add_repo(hub, "org/model", revisions=("b" * 40, "c" * 40))
    other = add_repo(hub, "org/model-2")
    rows = add_repo(hub, "org/model", kind="datasets")
    assert [entry.bytes for entry in clear_cache("org/model", dry_run=True)] == [2000]
    assert repo.exists()
    assert [entry.name for entry in clear_cache("org/model")] == ["org/model"]
    assert not repo.exists()
    assert other.exists()
    assert rows.exists()


def test_a_copy_with_the_same_commits_stays(hub: Path) -> None:
    names = [f"org/copy-{i}" for i in range(6)]
    repos = [add_repo(hub, name) for name in names]
    for number, name in enumerate(names):
        clear_cache(name)
        assert [repo.exists() for repo in repos] == [False] * (number + 1) + [True] * (5 - number)


def test_an_interrupted_download_can_be_cleared(hub: Path) -> None:
    repo = add_repo(hub, "org/half", revisions=("b" * 40,))
    (repo / "refs" / "main").unlink()
    (repo / "snapshots" / ("b" * 40) / "model.safetensors").unlink()
    (repo / "snapshots" / ("b" * 40)).rmdir()
    (repo / "blobs" / "part.incomplete").write_bytes(b"x")
    clear_cache("org/half")
    assert not repo.exists()


def test_unknown_models_name_the_cached_ones(hub: Path) -> None:
    with pytest.raises(ConfigError, match=r"'org/model' is not in the Hub cache .*\(cached: none\)"):
        clear_cache("org/model")
    add_repo(hub, "org/model")
    with pytest.raises(ConfigError, match=r"did you mean 'org/model'\? \(cached: org/model\)"):
        clear_cache("org/modle")


def test_links_are_never_followed(hub: Path, tmp_path: Path) -> None:
    outside = add_repo(tmp_path / "elsewhere", "org/linked")
    hub.mkdir()
    (hub / outside.name).symlink_to(outside)
    with pytest.raises(ConfigError, match="outside the cache: left alone"):
        clear_cache("org/linked")
    assert (outside / "refs" / "main").exists()

    repo = add_repo(hub, "org/model")
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    (repo / "snapshots" / ("a" * 40) / "extra").symlink_to(precious)
    clear_cache("org/model")
    assert not repo.exists()
    assert precious.read_text() == "mine"

    (cache_dir(create=True) / "link").symlink_to(tmp_path / "elsewhere")
    assert [entry.name for entry in clear_cache()] == ["link"]
    assert (outside / "refs" / "main").exists()


def test_a_folder_that_is_not_mrls_cache_is_left_alone(hub: Path) -> None:
    folder = cache_dir()
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("mine")
    assert list_cache() == []
    for call in (clear_cache, lambda: cache_dir(create=True)):
        with pytest.raises(ConfigError, match="MRL_HOME"):
            call()
    assert (folder / "thesis.tex").exists()


def test_runs_inside_the_cache_are_left_alone(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = cache_dir(create=True) / "mine" / "runs"
    runs.mkdir(parents=True)
    monkeypatch.setenv("MRL_RUNS", str(runs))
    assert clear_cache() == []
    assert runs.exists()


def test_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MRL_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "mrl"
