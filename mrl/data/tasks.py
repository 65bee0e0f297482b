"""From rows to tasks: columns renamed, prompts and ids checked, every complaint naming its row and column."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from mrl.data.images import Picture, pictures_of_row, with_pictures
from mrl.errors import DataError
from mrl.types import Message, Prompt, Task

Row = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles chat templates know. Others pass, since templates are free; these are named in messages."""

NO_PROMPT: list[Message] = [{"role": "user", "content": ""}]
"""Of a task whose environment says what is asked."""

PROMPT_LIKE = ("instruction", "question", "problem", "messages", "input", "query", "text")
"""Columns that are suggested when there is no `prompt`, in this order."""


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Every column that occurs in any row, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def rename_columns(rows: list[Row], rename: Mapping[str, str], where: str) -> list[Row]:
    """Rows with columns {"old": "new"} renamed, all at once. Raises DataError for a missing old or a taken new name."""
    rename = {old: new for old, new in rename.items() if old != new}
    if not rename:
        return rows
    there = columns_of(rows)
    for old in rename:
        if old not in there:
            raise DataError(f"{where}: no column {old!r} to rename to {rename[old]!r}{_known(old, there)}")
    staying = [name for name in there if name not in rename]
    for old, new in rename.items():
        if new in staying or list(rename.values()).count(new) > 1:
            raise DataError(
                f"{where}: cannot rename column {old!r} to {new!r}: there is a column {new!r} already "
                f"(columns: {', '.join(there)}). Rename that one too, e.g. rename={{{new!r}: {'old_' + new!r}}}"
            )
    return [{rename.get(name, name): value for name, value in row.items()} for row in rows]


def rows_to_tasks(rows: list[Row], where: str, *, need_prompts: bool = True) -> list[Task]:
    """One Task per row; `where` names the dataset in errors. Raises DataError naming row (from 0) and column.

    need_prompts: if false, rows without a column `prompt` get NO_PROMPT: an environment says what is asked.
    """
    if not need_prompts and rows and "prompt" not in columns_of(rows):
        rows = [{**row, "prompt": NO_PROMPT} for row in rows]
    _require_prompts(rows, where)
    tasks: list[Task] = []
    first_row_of: dict[str, int] = {}
    copies: dict[str, int] = {}
    id_column = next((name for name in ("id", "task_id") if name in columns_of(rows)), None)
    for index, row in enumerate(rows):
        row, pictures = pictures_of_row(row, f"{where}: row {index}")
        column = f"{where}: row {index}, column 'prompt'"
        prompt = with_pictures(_prompt(row.get("prompt"), column), pictures, column)
        columns = {name: value for name, value in row.items() if name != "prompt"}
        if id_column is None:
            task_id = _content_id(prompt, columns)
            copies[task_id] = copies.get(task_id, 0) + 1
            if copies[task_id] > 1:
                task_id += f"-{copies[task_id]}"
        else:
            task_id = _given_id(row.get(id_column), f"{where}: row {index}, column {id_column!r}")
            if task_id in first_row_of:
                raise DataError(
                    f"{where}: rows {first_row_of[task_id]} and {index} have the same {id_column} {task_id!r}: "
                    f"ids must be unique. Correct them, or rename the column: rename={{{id_column!r}: 'source_id'}}"
                )
            first_row_of[task_id] = index
        tasks.append(Task(task_id, prompt, columns))
    return tasks


def require_columns(tasks: Sequence[Task], needed: Iterable[str], why: str) -> None:
    """Refuse tasks that lack a column, or have None in it.

    why: who needs it, for the message, e.g. "the code reward". Raises DataError naming row, task and column.
    """
    for name in needed:
        for index, task in enumerate(tasks):
            if task.columns.get(name) is None:
                there = list(dict.fromkeys(column for task in tasks for column in task.columns))
                if name not in there:
                    raise DataError(f"{why} needs a column {name!r}, which the dataset lacks{_known(name, there)}")
                state = "has None in it" if name in task.columns else "lacks it"
                raise DataError(f"{why} needs column {name!r}, but row {index} (task {task.id!r}) {state}")


def check_prompt_lengths(tasks: Sequence[Task], count_tokens: Callable[[Prompt], int], limit: int) -> None:
    """Refuse prompts longer than `limit` tokens.

    count_tokens: length of a prompt in tokens, chat template included. Raises DataError for the first that is too long,
    with the number of others.
    """
    too_long = [(index, length) for index, task in enumerate(tasks) if (length := count_tokens(task.prompt)) > limit]
    if too_long:
        index, length = too_long[0]
        longest = max(length for _, length in too_long)
        raise DataError(
            f"row {index}, column 'prompt' (task {tasks[index].id!r}): the prompt has {length} tokens and at most "
            f"{limit} fit; {len(too_long)} of {len(tasks)} rows are too long, the longest with {longest} tokens. "
            f"Raise max_model_len if the model takes more, or drop those rows"
        )


# --- prompts --------------------------------------------------------------------------------------------------------


def _require_prompts(rows: list[Row], where: str) -> None:
    if not rows:
        raise DataError(f"{where}: the dataset is empty")
    there = columns_of(rows)
    if "prompt" in there:
        return
    like = [name for name in PROMPT_LIKE if name in there] or difflib.get_close_matches("prompt", there, n=1)
    hint = f"; set prompt_column={like[0]!r}" if like else "; set prompt_column to the column that holds the prompts"
    raise DataError(f"{where}: there is no column 'prompt' (columns: {', '.join(there) or 'none'}){hint}")


def _prompt(value: Any, where: str) -> Prompt:
    if value is None:
        raise DataError(f"{where} is missing")
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where} is empty")
        return value
    if not isinstance(value, list | tuple):
        raise DataError(f"{where} is of type {type(value).__name__}: a prompt is text or a list of messages")
    if not value:
        raise DataError(f"{where} is an empty list of messages")
    for number, message in enumerate(value):
        _check_message(message, f"{where}, message {number}")
    if value[-1]["role"] == "assistant":
        raise DataError(
            f"{where} ends with an assistant message, which would be trained as if the policy had still to answer it. "
            f"Move the answer to a column of its own (reward functions receive it), or end with the user's message"
        )
    return cast(list[Message], list(value))


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise DataError(f"{where} is of type {type(message).__name__}: a message is a dict with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"{where}: 'role' is {role!r}: it must be text such as {', '.join(ROLES)}")
    content = message.get("content")
    if "content" not in message and not message.get("tool_calls"):
        raise DataError(f"{where}: there is no 'content'")
    if content is not None and not isinstance(content, str | list):
        raise DataError(f"{where}: 'content' is of type {type(content).__name__}: it must be text or a list of parts")


# --- ids ------------------------------------------------------------------------------------------------------------


def _given_id(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{where} is {value!r}: an id is text or an integer")
    return str(value)


def _content_id(prompt: Prompt, columns: Mapping[str, Any]) -> str:
    """12 hex digits of the row's content: its place in the dataset plays no part, so that shuffling changes no id."""
    text = json.dumps([prompt, dict(columns)], sort_keys=True, ensure_ascii=False, default=_plain)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def _plain(value: Any) -> str:
    """Something stable for what JSON cannot hold; a repr may contain a memory address, so objects give their type."""
    if isinstance(value, Picture):
        return value.identity
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    return type(value).__qualname__


def _known(name: str, there: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, there, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (columns: {', '.join(there) or 'none'})"
