"""Rollouts, tasks and numbers as database rows, and back."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from mrl.data.images import Picture
from mrl.errors import StoreError
from mrl.store.arrays import DEFLATE_LEVEL, decode_samples, encode_samples
from mrl.types import Media, Rollout, Sample, Task

ROLLOUT_COLUMNS = (
    *("key", "step_id", "task_key", "group_index", "id", "attempt", "status", "error", "reward", "advantage"),
    *("tokens", "finish_reason", "rewards", "policy_version"),
)
CONTENT_KEYS = ("step_rewards", "metrics", "extra", "seconds", "limit")
LAST_MESSAGE = "last message"
"""Where the completion is when it is the text of the last message: it is not stored twice."""

DEEPEST = 200
"""Levels of lists and dicts that are kept."""


def split_of(step_id: int) -> str:
    """`train` or `eval`, of a row in `steps`."""
    return "eval" if step_id % 2 else "train"


def step_id_of(split: str, step: int) -> int:
    """Key of a row in `steps`."""
    return 2 * step + (split == "eval")


# --- writing ----------------------------------------------------------------------------------------------------------


def task_row(task: Task) -> tuple[str, bytes, bytes]:
    """Id, digest and content."""
    content = to_json({"prompt": task.prompt, "columns": task.columns})
    return text(task.id), hashlib.blake2b(content, digest_size=12).digest(), zlib.compress(content, DEFLATE_LEVEL)


def rollout_row(rollout: Rollout, key: int, step_id: int, task_key: int, group: int) -> tuple[Any, ...]:
    """Values of ROLLOUT_COLUMNS."""
    return (
        *(key, step_id, task_key, group, text(rollout.id), int(rollout.attempt), rollout.status),
        None if rollout.error is None else text(rollout.error),
        number(rollout.reward),
        number(rollout.advantage),
        rollout.num_tokens,
        rollout.samples[-1].finish_reason if rollout.samples else None,
        text(to_json(rollout.rewards).decode("utf-8", "surrogatepass")),
        max((version for sample in rollout.samples for version in _versions(sample)), default=None),
    )


def content_row(rollout: Rollout, key: int, task: Task) -> tuple[int, bytes, bytes]:
    """Key, texts and samples."""
    texts: dict[str, Any] = {"messages": rollout.messages}
    if not _same(rollout.prompt, task.prompt):
        texts["prompt"] = rollout.prompt
    where = _place_of(rollout.completion, rollout.messages)
    texts |= {"completion": rollout.completion} if where is None else {"completion_at": where}
    texts |= {name: value for name in CONTENT_KEYS if (value := getattr(rollout, name))}
    return key, zlib.compress(to_json(texts), DEFLATE_LEVEL), encode_samples(rollout.samples)


def number(value: Any) -> float | str | None:
    """A value for a REAL column: not-a-number by its name, since SQLite would store NULL for it.

    Raises TypeError or ValueError for what is no number.
    """
    if value is None:
        return None
    value = float(value)
    return "nan" if math.isnan(value) else value


def text(value: str) -> str:
    """A value for a TEXT column: half surrogate pairs, which are no Unicode text, become escapes."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def to_json(value: Any) -> bytes:
    """Python's JSON, with NaN and infinities; what JSON does not know becomes its number or its text."""
    try:
        encoded = _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError):  # keys that are no strings, circles
        encoded = json.dumps(jsonable(value), ensure_ascii=False)
    return encoded.encode("utf-8", "surrogatepass")


def jsonable(value: Any, finite: bool = False, inside: frozenset[int] = frozenset()) -> Any:
    """Plain JSON. `finite`: what is not finite becomes its name, for readers other than Python."""
    if isinstance(value, float):
        return str(value) if finite and not math.isfinite(value) else value
    if value is None or isinstance(value, (str, int, bool)):
        return value
    if not isinstance(value, (Mapping, list, tuple)):
        return _plain(value)
    if id(value) in inside or len(inside) > DEEPEST:
        return "…"
    inside |= {id(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner, finite, inside) for key, inner in value.items()}
    return [jsonable(inner, finite, inside) for inner in value]


def _plain(value: Any) -> Any:
    if isinstance(value, Picture):
        return value.record()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"<{len(value)} bytes>"
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", None) == 1:
        plain = item()
        if isinstance(plain, (str, int, float, bool)):
            return plain
    return str(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=_plain)
"""`json.dumps` makes one for every call that has options."""


def _versions(sample: Sample) -> list[int]:
    versions = sample.policy_version
    return versions if isinstance(versions, list) else [int(versions)]


def _same(first: Any, second: Any) -> bool:
    return first is second or to_json(first) == to_json(second)


def _place_of(completion: Any, messages: list[Any]) -> str | int | None:
    """LAST_MESSAGE, or how many of the last messages it is, or None when it is found in neither way."""
    if not completion or not messages:
        return None
    if isinstance(completion, str):
        last = messages[-1]
        return LAST_MESSAGE if isinstance(last, Mapping) and last.get("content") == completion else None
    return len(completion) if _same(completion, messages[-len(completion) :]) else None


# --- reading ----------------------------------------------------------------------------------------------------------


def read_task(task_id: str, content: bytes) -> dict[str, Any]:
    """What went into `task_row`: id, prompt, columns."""
    return {"id": task_id, **_inflate(content)}


def read_summary(row: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout without its contents, from ROLLOUT_COLUMNS and the task's id."""
    return {
        "key": row["key"],
        "split": split_of(row["step_id"]),
        "step": row["step_id"] // 2,
        "group": row["group_index"],
        "id": row["id"],
        "task_id": row["task_id"],
        "attempt": row["attempt"],
        "status": row["status"],
        "error": row["error"],
        "reward": read_number(row["reward"]),
        "rewards": json.loads(row["rewards"]),
        "advantage": read_number(row["advantage"]),
        "tokens": row["tokens"],
        "finish_reason": row["finish_reason"],
        "policy_version": row.get("policy_version"),
    }


def read_rollout(row: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout in full: its summary and every field of `mrl.types.Rollout`, samples as dicts."""
    texts = _inflate(row["texts"])
    messages, where = texts["messages"], texts.get("completion_at")
    if where is None:
        completion = texts["completion"]
    else:
        completion = messages[-1]["content"] if where == LAST_MESSAGE else messages[-where:]
    return read_summary(row) | {
        "prompt": texts["prompt"] if "prompt" in texts else _inflate(row["task_content"])["prompt"],
        "messages": messages,
        "completion": completion,
        "samples": decode_samples(row["samples"]),
        "step_rewards": texts.get("step_rewards", []),
        "limit": texts.get("limit", ""),
        **{name: texts.get(name, {}) for name in CONTENT_KEYS[1:-1]},
    }


def no_image(sha256: str) -> bytes:
    """For records without images. Raises StoreError."""
    raise StoreError(f"the image {sha256} is needed, and only its hash is at hand")


def to_rollout(row: Mapping[str, Any], image: Callable[[str], bytes] = no_image) -> Rollout:
    """The object behind a row of `read_rollout`, for a replay. image: gives the file of a hash."""
    fields = {name: row[name] for name in Rollout.__dataclass_fields__ if name != "samples"}
    samples = []
    for sample in row["samples"]:
        media = tuple(
            Media(image(one["sha256"]), start=one["start"], length=one["length"]) for one in sample.get("media", ())
        )
        samples.append(Sample(**{**sample, "media": media}))
    return Rollout(**fields, samples=samples)


def read_number(value: float | str | None) -> Any:
    """What went into `number`."""
    return math.nan if value == "nan" else value


def _inflate(blob: bytes) -> Any:
    return json.loads(zlib.decompress(blob).decode("utf-8", "surrogatepass"))
