"""A run's rows for other programs: JSON lines or parquet, a chunk in memory at a time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, get_args

from mrl.errors import ConfigError
from mrl.store.filters import Filter
from mrl.store.read import RunReader
from mrl.store.rows import jsonable
from mrl.types import Group

RowKind = Literal["rollouts", "metrics", "events"]
Format = Literal["parquet", "jsonl"]
ROWS = get_args(RowKind)
ROW_GROUP = 512
"""Rows of a parquet file that are in memory together."""
STDOUT = "-"


def export(run: Path, output: str, form: Format, rows: RowKind = "rollouts") -> int:
    """Write the run's rows of training and evaluation to a new file, or JSON lines to stdout for `-`; how many.

    The file appears when it is whole. Raises ConfigError when it exists or cannot be written, StoreError when the run
    cannot be read.
    """
    with RunReader(run) as reader:
        found = _rows(reader, rows)
        if output == STDOUT:
            if form != "jsonl":
                raise ConfigError("output: only --format jsonl can go to stdout; name a file")
            return sum(sys.stdout.write(_line(row)) > 0 for row in found)
        path = Path(output).expanduser()
        if path.exists():
            raise ConfigError(f"output: {path} exists; choose another file or remove it")
        partial = path.with_name(f"{path.name}.partial")
        try:
            write = _write_parquet if form == "parquet" else _write_jsonl
            count = write(partial, found, rows)
            os.replace(partial, path)
        except OSError as error:
            raise _cannot_write(path, error) from None
        finally:
            partial.unlink(missing_ok=True)
    return count


def write_rollouts(path: str | Path, groups: Iterable[Group]) -> None:
    """Write every rollout as a JSON line. Raises ConfigError when the file cannot be written."""
    try:
        with Path(path).open("w", encoding="utf-8", errors="backslashreplace") as file:
            for group in groups:
                file.writelines(_line(asdict(rollout)) for rollout in group.rollouts)
    except OSError as error:
        raise _cannot_write(Path(path), error) from None


def _rows(reader: RunReader, rows: RowKind) -> Iterator[dict[str, Any]]:
    if rows == "events":
        return iter(reader.events())
    if rows == "metrics":
        return ({"split": split, **row} for split in ("train", "eval") for row in reader.metric_rows(split))
    return chain(reader.rollouts(Filter("train")), reader.rollouts(Filter("eval")))


def _line(row: dict[str, Any]) -> str:
    return json.dumps(jsonable(row, finite=True), ensure_ascii=False) + "\n"


def _write_jsonl(path: Path, found: Iterator[dict[str, Any]], _: RowKind) -> int:
    count = 0
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in found:
            file.write(_line(row))
            count += 1
    return count


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"output: {path} cannot be written ({error.strerror or error}); choose another file")


# --- parquet ----------------------------------------------------------------------------------------------------------

JSON_COLUMNS = ("prompt", "completion", "rewards", "metrics", "extra", "seconds")
"""Their keys differ from run to run and from row to row, so they are JSON text."""


def _write_parquet(path: Path, found: Iterator[dict[str, Any]], rows: RowKind) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    shape = {"rollouts": _rollout_for_parquet, "metrics": _long_metrics, "events": _event_for_parquet}[rows]
    shaped = (out for row in found for out in shape(row))
    count = 0
    with pq.ParquetWriter(path, _schema(rows), compression="zstd") as writer:
        while chunk := list(islice(shaped, ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(chunk, schema=writer.schema))
            count += len(chunk)
    return count


def _schema(rows: RowKind) -> Any:
    import pyarrow as pa

    if rows == "metrics":
        columns = {"split": pa.string(), "step": pa.int64(), "time": pa.float64()}
        return pa.schema({**columns, "name": pa.string(), "value": pa.float64()})
    if rows == "events":
        columns = {"id": pa.int64(), "time": pa.float64(), "step": pa.int64()}
        return pa.schema({**columns, **dict.fromkeys(("kind", "message", "details"), pa.string())})
    ids = pa.list_(pa.int64())
    image = pa.struct({"sha256": pa.string(), **dict.fromkeys(("bytes", "start", "length"), pa.int64())})
    sample = pa.struct(
        {
            "prompt_ids": ids,
            "completion_ids": ids,
            "mask": ids,
            "logprobs": pa.list_(pa.float64()),
            "policy_version": ids,
            "finish_reason": pa.string(),
            "media": pa.list_(image),
        }
    )
    message = pa.struct({"role": pa.string(), "content": pa.string(), "extra": pa.string()})
    return pa.schema(
        {
            "split": pa.string(),
            **dict.fromkeys(("step", "group"), pa.int64()),
            **dict.fromkeys(("id", "task_id"), pa.string()),
            "attempt": pa.int64(),
            **dict.fromkeys(("status", "error"), pa.string()),
            **dict.fromkeys(("reward", "advantage"), pa.float64()),
            "tokens": pa.int64(),
            "finish_reason": pa.string(),
            "messages": pa.list_(message),
            "samples": pa.list_(sample),
            "step_rewards": pa.list_(pa.float64()),
            **dict.fromkeys(JSON_COLUMNS, pa.string()),
        }
    )


def _rollout_for_parquet(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    shaped = {name: value for name, value in row.items() if name != "key"}
    shaped["messages"] = [_message_for_parquet(message) for message in row["messages"]]
    shaped["samples"] = [sample | {"policy_version": _as_list(sample["policy_version"])} for sample in row["samples"]]
    for name in JSON_COLUMNS:
        plain = row[name] if isinstance(row[name], str) else json.dumps(jsonable(row[name], finite=True))
        shaped[name] = _utf8(plain)
    yield {name: _utf8(value) if isinstance(value, str) else value for name, value in shaped.items()}


def _message_for_parquet(message: Any) -> dict[str, Any]:
    """Role and text as columns; everything else of a message (tool calls, images) as JSON in `extra`."""
    rest = dict(message) if isinstance(message, dict) else {"message": message}
    shaped = {name: _utf8(rest.pop(name)) for name in ("role", "content") if isinstance(rest.get(name), str)}
    return shaped | {"extra": json.dumps(jsonable(rest, finite=True)) if rest else None}


def _long_metrics(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row per metric: their names differ from step to step."""
    ids = {name: row[name] for name in ("split", "step", "time")}
    for name, value in row.items():
        if name not in ids and isinstance(value, float):
            yield {**ids, "name": name, "value": value}


def _event_for_parquet(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    known = {name: row.get(name) for name in ("id", "time", "step", "kind", "message")}
    details = {name: value for name, value in row.items() if name not in known}
    yield {**known, "details": json.dumps(jsonable(details, finite=True))}


def _as_list(value: int | list[int]) -> list[int]:
    """A single version, for a whole sample, is a list of one."""
    return value if isinstance(value, list) else [value]


def _utf8(value: str) -> str:
    return value.encode("utf-8", "backslashreplace").decode("utf-8")
