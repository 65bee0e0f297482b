"""`mrl cache`: the models and datasets of the Hub that are kept on disk, as huggingface_hub finds them.

mrl cache list               the largest first
mrl cache clear --model ID   deletes that model, every revision of it
"""

from __future__ import annotations

import difflib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from mrl.cli.flags import argument, parse
from mrl.cli.last_resort import says_everything
from mrl.errors import ConfigError, MRLError
from mrl.system.units import size

USAGE = """usage: mrl cache list [--json]
       mrl cache clear --model NAME [--dry-run] [--json]

`clear` removes that model from the Hub cache, every revision of it. Runs are never touched."""


def cache(argv: list[str]) -> int:
    """List or clear what the Hub keeps on disk. Raises MRLError for what the user can mend."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    action, *rest = argv
    if action not in ("list", "clear"):
        raise ConfigError(f"mrl cache: {action!r} is neither list nor clear")
    extra = {"json": argument("Print the entries as JSON.", default="off", kind=bool)}
    if action == "clear":
        extra |= {
            "model": argument("Remove this model from the Hub cache.", required=True),
            "dry_run": argument("Only say what would be removed.", default="off", kind=bool),
        }
    given = parse(f"mrl cache {action}", cache.__doc__ or "", rest, options=[], extra=extra)
    dry_run = given.get("dry_run", False)
    repos = cached() if action == "list" else [clear(given["model"], dry_run=dry_run)]
    if given.get("json"):
        print(json.dumps([_plain(repo) for repo in repos], indent=2, ensure_ascii=not says_everything()))
        return 0
    verb = {"list": "", "clear": "would remove " if dry_run else "removed "}[action]
    for repo in repos:
        print(f"{verb}{repo.repo_type:8} {size(repo.size_on_disk):>10}  {repo.repo_id}")
    if not repos:
        print("nothing is cached")
    return 0


def cached() -> list[Any]:
    """The repositories of the Hub that are kept, the largest first: huggingface_hub's `CachedRepoInfo`."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir(_folder()).repos
    except CacheNotFound:
        return []
    return sorted(repos, key=lambda repo: (-repo.size_on_disk, repo.repo_id))


def clear(model: str, *, dry_run: bool = False) -> Any:
    """Delete that model. Returns what it was.

    dry_run: delete nothing. Raises ConfigError for a model that is not cached, and for one that is a link out of the
    cache; MRLError when something cannot be deleted.
    """
    from huggingface_hub import scan_cache_dir

    models = {repo.repo_id: repo for repo in cached() if repo.repo_type == "model"}
    if model not in models:
        close = difflib.get_close_matches(model, models, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        known = ", ".join(sorted(models)) or "none"
        raise ConfigError(f"--model: {model!r} is not in the Hub cache {_folder()}{hint} (cached: {known})")
    repo = models[model]
    path = Path(repo.repo_path)
    if path.is_symlink() or not path.resolve().is_relative_to(_folder().resolve()):
        raise ConfigError(f"--model: {path} is a link to {path.resolve()}, outside the cache: left alone")
    if not dry_run:
        # delete_revisions looks for a commit in every repository, and a copied model shares its commits: show it one.
        only = replace(scan_cache_dir(_folder()), repos=frozenset({repo}))
        only.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
        if not repo.revisions and path.exists():  # an interrupted download: nothing to name, only the folder
            shutil.rmtree(path, ignore_errors=True)
        if path.exists():  # the library logs what it could not delete, and goes on
            raise MRLError(f"{path} could not be deleted completely: look at its permissions")
    return repo


def _folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _plain(repo: Any) -> dict[str, Any]:
    return {
        "kind": repo.repo_type,
        "name": repo.repo_id,
        "path": str(repo.repo_path),
        "bytes": repo.size_on_disk,
        "last_used": repo.last_accessed or 0.0,
    }
