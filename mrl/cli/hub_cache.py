"""Disk caches: what mrl and the Hugging Face Hub keep, and `mrl cache clear`.

    mrl cache clear              deletes mrl's own cache; Hub models stay
    mrl cache clear --model ID   deletes that model from the Hub cache, every revision of it

mrl's own cache is `~/.cache/mrl`, or `$MRL_HOME/cache`. It holds only what can be made again. Runs and datasets are
never touched. Only a folder that carries mrl's own CACHEDIR.TAG is ever cleared, so that a mistaken MRL_HOME costs
nothing; links are removed, never followed.
"""

from __future__ import annotations

import difflib
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mrl.errors import ConfigError, MRLError

TAG_FILE = "CACHEDIR.TAG"
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Cache of mrl: `mrl cache clear` deletes everything beside this.\n"
"""The first line is what backup programs look for (bford.info/cachedir), the second makes it ours."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One thing that can be deleted."""

    kind: Literal["mrl", "model", "dataset", "space", "kernel"]
    """`mrl` = mrl's own; the others are repositories of the Hub."""
    name: str
    path: Path
    bytes: int
    """On disk, shared files counted once."""
    last_used: float
    """Unix time in seconds; 0 when unknown."""


def cache_dir(*, create: bool = False) -> Path:
    """mrl's own cache folder. create: make it, with the tag without which it is never cleared."""
    home = os.environ.get("MRL_HOME")
    folder = Path(home).expanduser() / "cache" if home else Path.home() / ".cache" / "mrl"
    if create and not (folder / TAG_FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty and not a cache of mrl's: set MRL_HOME to another folder")
        (folder / TAG_FILE).write_text(TAG, encoding="utf-8")
    return folder


def list_cache() -> list[CacheEntry]:
    """mrl's own entries, then the Hub's, the largest first."""
    hub = [_hub_entry(repo) for repo in _hub_repos()]
    return sorted([*_own_entries(), *hub], key=lambda entry: (entry.kind != "mrl", -entry.bytes, entry.name))


def clear_cache(model: str | None = None, dry_run: bool = False) -> list[CacheEntry]:
    """Delete mrl's own cache, or with `model` that model from the Hub cache. Returns what was deleted.

    dry_run: delete nothing, return what would be. Raises ConfigError for a model that is not cached, a folder that is
    not mrl's cache, and a repository that is a link out of the Hub cache; MRLError when something cannot be deleted.
    """
    return _clear_own(dry_run) if model is None else _clear_model(model, dry_run)


# --- mrl's own ------------------------------------------------------------------------------------------------------


def _own_entries() -> list[CacheEntry]:
    folder = cache_dir()
    if not _is_ours(folder):
        return []
    runs = Path(os.environ.get("MRL_RUNS", "runs")).resolve()
    entries = []
    for path in sorted(folder.iterdir()):
        if path.name == TAG_FILE or (not path.is_symlink() and runs.is_relative_to(path.resolve())):
            continue
        stats = [file.lstat() for file in [path, *_walk(path)]]
        entries.append(
            CacheEntry(
                kind="mrl",
                name=path.name,
                path=path,
                bytes=sum(stat.st_size for stat in stats[1:]) or (0 if path.is_dir() else stats[0].st_size),
                last_used=max(max(stat.st_atime, stat.st_mtime) for stat in stats),
            )
        )
    return entries


def _clear_own(dry_run: bool) -> list[CacheEntry]:
    folder = cache_dir()
    if folder.is_dir() and any(folder.iterdir()) and not _is_ours(folder):
        raise ConfigError(
            f"{folder} has no {TAG_FILE} of mrl's, so it may hold something else and is left alone; "
            f"if MRL_HOME is right, delete it yourself"
        )
    entries = _own_entries()
    if not dry_run:
        for entry in entries:
            try:
                if entry.path.is_dir() and not entry.path.is_symlink():
                    shutil.rmtree(entry.path)
                else:
                    entry.path.unlink()
            except OSError as error:
                raise MRLError(f"{entry.path} could not be deleted: {error}") from error
    return entries


def _is_ours(folder: Path) -> bool:
    tag = folder / TAG_FILE
    return tag.is_file() and not tag.is_symlink() and tag.read_text(encoding="utf-8", errors="replace") == TAG


def _walk(path: Path) -> list[Path]:
    """Files and links below a folder; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return []
    return [Path(folder) / name for folder, _, names in os.walk(path) for name in names]


# --- the Hub's ------------------------------------------------------------------------------------------------------


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _hub_repos() -> list[Any]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return list(scan_cache_dir(_hub_cache()).repos)
    except CacheNotFound:
        return []


def _hub_entry(repo: Any) -> CacheEntry:
    return CacheEntry(repo.repo_type, repo.repo_id, Path(repo.repo_path), repo.size_on_disk, repo.last_accessed or 0.0)


def _clear_model(model: str, dry_run: bool) -> list[CacheEntry]:
    from huggingface_hub import scan_cache_dir

    models = {repo.repo_id: repo for repo in _hub_repos() if repo.repo_type == "model"}
    if model not in models:
        close = difflib.get_close_matches(model, models, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        known = ", ".join(sorted(models)) or "none"
        raise ConfigError(f"--model: {model!r} is not in the Hub cache {_hub_cache()}{hint} (cached: {known})")
    repo = models[model]
    entry = _hub_entry(repo)
    if entry.path.is_symlink() or not entry.path.resolve().is_relative_to(_hub_cache().resolve()):
        raise ConfigError(f"--model: {entry.path} is a link to {entry.path.resolve()}, outside the cache: left alone")
    if not dry_run:
        # delete_revisions looks for a commit in every repository, and a copied model shares its commits: show it one.
        only = replace(scan_cache_dir(_hub_cache()), repos=frozenset({repo}))
        only.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
        if not repo.revisions and entry.path.exists():  # an interrupted download: nothing to name, only the folder
            shutil.rmtree(entry.path, ignore_errors=True)
        if entry.path.exists():  # the library logs what it could not delete, and goes on
            raise MRLError(f"{entry.path} could not be deleted completely: look at its permissions")
    return [entry]
