"""What the `datasets` library reads: files, folders, the Hub, and its own objects. Its errors become DataErrors."""

from __future__ import annotations

import contextlib
import difflib
import gzip
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mrl.data.images import Picture
from mrl.data.tasks import Row
from mrl.errors import DataError

BUILDERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
"""File extension (before .gz) to the builder of `datasets` that reads it."""

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
UNKNOWN = {
    "split": r'Unknown split "(.*)"\. Should be one of \[(.*)\]',
    "config": r"BuilderConfig '(.*)' not found\. Available: \[(.*)\]",
}
"""What `datasets` says to a name it does not know."""
PROBE_SECONDS = 10.0
"""How long the Hub may take to answer before it counts as unreachable. Its client would retry for half a minute."""


class FirstRows(NamedTuple):
    """The first rows of a source."""

    rows: Iterable[Row]
    total: int | None
    """How many rows the source has; None = a stream, which nobody counts."""


def is_dataset(source: Any) -> bool:
    """Whether it is one of the `datasets` library's objects; does not import it, for then it cannot be one."""
    datasets = sys.modules.get("datasets")
    kinds = ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict")
    return datasets is not None and isinstance(source, tuple(getattr(datasets, kind) for kind in kinds))


def has_splits(source: Any) -> bool:
    """Whether it is a DatasetDict or the like."""
    return is_dataset(source) and isinstance(source, dict)


def require_whole(split: str, where: str) -> None:
    """Refuse a split of what has none. Taking everything instead would evaluate on the training tasks."""
    if split != "train":
        raise DataError(
            f"{where} has no splits: 'train' is all of it, and there is no {split!r}. Give other tasks as a dataset of "
            f"their own (held-out ones as eval_dataset); max_samples takes the first rows"
        )


def dataset_rows(source: Any, split: str, limit: int | None, where: str) -> FirstRows:
    """The first `limit` rows of a Dataset, IterableDataset or DatasetDict as plain Python. Raises DataError."""
    import datasets

    if has_splits(source):
        if split not in source:
            raise DataError(f"{where} has no split {split!r} (splits: {', '.join(map(str, source)) or 'none'})")
        source = source[split]
    else:
        require_whole(split, where)
    if isinstance(source, datasets.IterableDataset):
        if limit is None:
            raise DataError(f"{where} is a stream, which may never end: set max_samples")
        source = source.take(limit)
        if source.features is not None and _leave_images(source.features):
            source = source.decode(False)
        return FirstRows((_without_none(row) for row in source), None)
    total = len(source)
    if limit is not None:
        source = source.select(range(min(limit, total)))
    source = source.with_format(None)  # a copy
    _leave_images(source.features)
    return FirstRows([_without_none(row) for row in source], total)


def looks_like_path(name: str) -> bool:
    """Whether a name that does not exist was meant as a path rather than as a Hub id."""
    return _extension(Path(name)) in BUILDERS or not HUB_ID.fullmatch(name) or name.startswith(".")


def no_such_path(path: Path) -> DataError:
    """An error with the nearest names in the deepest folder that does exist."""
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
    close = difflib.get_close_matches(path.name, [p.name for p in folder.iterdir()], n=3)
    hint = f"; did you mean {' or '.join(repr(str(folder / name)) for name in close)}?" if close else ""
    missing = f"; the folder {path.parent} does not exist either" if folder != path.parent else ""
    return DataError(f"dataset {str(path)!r}: there is no such file or folder{hint or missing}")


def read_path(path: Path, config: str | None, split: str, limit: int | None) -> FirstRows:
    """The first `limit` rows of a local file or folder. Raises DataError, with the line of a broken JSONL file."""
    import datasets

    where = f"dataset {str(path)!r}"
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            with _as_data_error(where, path):
                loaded = datasets.load_from_disk(str(path))
            return dataset_rows(loaded, split, limit, where)
        return _load(where, path, limit, path=str(path), name=config, split=split)
    if config is not None:
        raise DataError(f"{where}: a file has no config, but dataset_config is {config!r}: remove it")
    builder = BUILDERS.get(_extension(path))
    if builder is None:
        raise DataError(f"{where}: cannot read {path.suffix or 'a file without extension'}: take {', '.join(BUILDERS)}")
    if path.stat().st_size == 0:
        raise DataError(f"{where}: the file is empty")
    require_whole(split, where)
    options: dict[str, Any] = {"sep": "\t"} if _extension(path) == ".tsv" else {}
    return _load(where, path, limit, path=builder, data_files=str(path), split="train", **options)


def read_hub(name: str, config: str | None, split: str, limit: int | None, hint: str = "") -> FirstRows:
    """The first `limit` rows of a Hub dataset, downloaded or from the cache. Raises DataError: unreachable, unknown,
    gated, no split.

    hint: a sentence for when it cannot be found.
    """
    import datasets

    where = f"dataset {name!r}"
    local = f"{hint}For local data give the path of a file or folder (nothing is there at {name!r})"
    online = datasets.config.HF_HUB_OFFLINE or reachable(datasets.config.HF_ENDPOINT)
    with _as_data_error(where), contextlib.nullcontext() if online else _offline(datasets.config):
        try:
            loaded = datasets.load_dataset(name, config, split=split)
        except ConnectionError as error:
            raise DataError(
                f"{where}: cannot reach {datasets.config.HF_ENDPOINT}, and it is not in the cache "
                f"({datasets.config.HF_DATASETS_CACHE}). {local}"
            ) from error
        except datasets.exceptions.DatasetNotFoundError as error:
            raise DataError(f"{where}: {_one_line(error)} {local}; a private one needs `hf auth login`") from error
    return dataset_rows(loaded, "train", limit, where)


def _load(where: str, file: Path, limit: int | None, **arguments: Any) -> FirstRows:
    """`datasets.load_dataset` into a folder that goes away: local files leave nothing behind and are never stale."""
    import datasets

    with tempfile.TemporaryDirectory(prefix="mrl-data-") as cache, _as_data_error(where, file), _without_logs(datasets):
        return dataset_rows(datasets.load_dataset(cache_dir=cache, **arguments), "train", limit, where)


@contextlib.contextmanager
def _as_data_error(where: str, file: Path | None = None) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except (Exception, StopIteration) as error:
        bad_line = _broken_line(file) if file is not None and file.is_file() else None
        if bad_line:
            raise DataError(f"{where}: {bad_line}") from error
        if "corresponds to no data" in str(error):
            raise DataError(f"{where}: the dataset is empty") from error
        for kind, pattern in UNKNOWN.items():
            if found := re.search(pattern, str(error), re.DOTALL):
                raise DataError(f"{where}: there is no {kind} {found[1]!r} ({kind}s: {found[2]})") from error
        cause = error.__cause__ or error
        raise DataError(f"{where}: cannot be read: {type(cause).__name__}: {_one_line(cause)}") from error


def _broken_line(file: Path) -> str | None:
    """Which line of a JSON or JSONL file is broken, and how."""
    kind = _extension(file)
    if BUILDERS.get(kind) != "json":
        return None
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
            if kind == ".json" and stream.read(1) == b"[":
                stream.seek(0)
                json.load(stream)
                return None
            stream.seek(0)
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.rstrip())
                except UnicodeDecodeError as error:
                    return f"line {number} is not UTF-8 text: {error}"
                except json.JSONDecodeError as error:
                    return f"line {number}, column {error.colno} is not JSON: {error.msg}"
                if not isinstance(row, dict):
                    return f"line {number} is not a JSON object ({type(row).__name__}): each line is one row"
    except json.JSONDecodeError as error:
        return f"line {error.lineno}, column {error.colno} is not JSON: {error.msg}"
    except (OSError, EOFError, UnicodeDecodeError) as error:
        return f"cannot be read: {type(error).__name__}: {error}"
    return None


def _without_none(row: Row) -> Row:
    """Drop the None entries of nested dicts; a column that is None, and a message's `content`, stay."""
    return {name: _prune(value) for name, value in row.items()}


def _leave_images(features: Any) -> bool:
    """Have images come as files instead of pixels, which are read when they are needed; whether there are any."""
    import datasets

    if isinstance(features, datasets.Image):
        features.decode = False
        return True
    inner: Iterable[Any] = (
        features.values() if isinstance(features, dict) else features if isinstance(features, list) else ()
    )
    if hasattr(features, "feature"):
        inner = (features.feature,)
    found = [_leave_images(feature) for feature in inner]  # all of them, also after the first
    return any(found)


def _prune(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"bytes", "path"} and any(isinstance(part, bytes | str) for part in value.values()):
            return Picture(value)
        keep_content = "role" in value
        return {k: _prune(v) for k, v in value.items() if v is not None or (keep_content and k == "content")}
    if isinstance(value, list):
        return [_prune(item) for item in value]
    return value


def _extension(path: Path) -> str:
    return (Path(path.stem).suffix if path.suffix == ".gz" else path.suffix).lower()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:300] + " …"


def reachable(endpoint: str) -> bool:
    """Whether a server answers there, whatever it answers. Asked once, for some seconds."""
    import httpx

    try:
        httpx.head(endpoint, timeout=PROBE_SECONDS)
    except httpx.HTTPError:
        return False
    return True


@contextlib.contextmanager
def _offline(settings: Any) -> Iterator[None]:
    """Let `datasets` look into its cache only. It reads the environment variable at its import: too late here."""
    before, settings.HF_HUB_OFFLINE = settings.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _without_logs(datasets: Any) -> Iterator[None]:
    """No progress bar and no error log for small local files: the DataError says it all."""
    bars, level = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()
