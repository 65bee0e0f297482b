"""Lists of rollouts and of tasks, and the attempts at a task over a run."""

from __future__ import annotations

import json
import zlib
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route

from mrl.errors import StoreError
from mrl.logs.rollout_query import PAGE, RolloutQuery, written
from mrl.logs.rollout_search import MOST, search_on
from mrl.logs.rollout_views import one_rollout
from mrl.logs.site import Site, site_of
from mrl.logs.text import content_text
from mrl.store.filters import Filter
from mrl.store.read import COUNT_LIMIT, Page, RunReader
from mrl.store.rows import step_id_of
from mrl.store.search import search

ATTEMPTS = 400
"""Of a task, on one page."""
NEIGHBOUR_SECONDS = 2.0
"""How long the next match of a search is looked for."""


# --- rollouts ---------------------------------------------------------------------------------------------------------


def rollouts(request: Request) -> HTMLResponse:
    """A page of the rollouts that a filter lets through."""
    site = site_of(request)
    row = site.row(request)
    query = RolloutQuery.of(request.query_params, row.split)
    rows: list[dict[str, Any]] = []
    context: dict[str, Any] = {"count": 0, "search": None, "before": None, "after": None}
    with site.reader(row) as reader:
        try:
            context["count"] = reader.count(query.where)
            if query.text:
                rows, context["search"] = search_on(reader, query, request.query_params)
            else:
                page = _page(reader, query)
                rows = page.rows
                context["before"], context["after"] = _around(query, page)
        except StoreError as error:
            if not str(error).startswith("policy_version"):
                raise
            query.problems.append(str(error))
        texts = previews(reader, rows)
        total = reader.count(Filter(query.where.split))
    return site.render(
        request, "rollouts.html", run=row, tab="rollouts", query=query, rows=rows, texts=texts, most=COUNT_LIMIT,
        most_matches=MOST, total=total, **context,
    )  # fmt: skip


def _page(reader: RunReader, query: RolloutQuery) -> Page:
    if query.before is None:
        return reader.page(query.where, limit=PAGE, after=query.after, newest_first=not query.up, order=query.order)
    page = reader.page(query.where, limit=PAGE, after=query.before, newest_first=query.up, order=query.order)
    page.rows.reverse()
    if page.next is None:  # the beginning: a whole page
        return reader.page(query.where, limit=PAGE, newest_first=not query.up, order=query.order)
    return page


def _around(query: RolloutQuery, page: Page) -> tuple[str | None, str | None]:
    """Where the pages before and behind this one are, None where there is none."""
    if not page.rows:
        return None, None
    earlier = query.after is not None if query.before is None else page.next is not None
    later = page.next is not None if query.before is None else True
    return written(_place(page.rows[0])) if earlier else None, written(_place(page.rows[-1])) if later else None


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return step_id_of(row["split"], row["step"]), row["key"]


def previews(reader: RunReader, rows: list[dict[str, Any]]) -> dict[int, str]:
    """What each of these rollouts said last, by key."""
    return {key: _said_last(packed) for key, packed in reader.texts([row["key"] for row in rows]).items()}


def _said_last(packed: bytes) -> str:
    texts = json.loads(zlib.decompress(packed).decode("utf-8", "surrogatepass"))
    messages = texts.get("messages") or []
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    said = content_text(last.get("content"))
    return said or (json.dumps(last.get("tool_calls")) if last.get("tool_calls") else str(texts.get("completion", "")))


def neighbours(request: Request) -> JSONResponse:
    """Keys of a rollout's neighbours in a list, for the keys that go to the next one."""
    site = site_of(request)
    row = site.row(request)
    query = RolloutQuery.of(request.query_params, row.split)
    keys = []
    with site.reader(row) as reader:
        place = _place(one_rollout(reader, row, request.path_params["key"]))
        for last_first in (query.up, not query.up):
            where: Any = {"after": place, "limit": 1, "newest_first": last_first, "order": query.order}
            if query.text:
                rows = search(reader, query.text, query.where, seconds=NEIGHBOUR_SECONDS, **where).rows
            else:
                rows = reader.page(query.where, **where).rows
            keys.append(rows[0]["key"] if rows else None)
    return JSONResponse({"before": keys[0], "after": keys[1]})


# --- tasks ------------------------------------------------------------------------------------------------------------


def tasks(request: Request) -> HTMLResponse:
    """A page of a run's tasks."""
    site = site_of(request)
    row, after = site.row(request), request.query_params.get("after", "")
    with site.reader(row) as reader:
        found = reader.tasks(limit=PAGE + 1, after=after)
    more = found[PAGE - 1]["id"] if len(found) > PAGE else None
    return site.render(request, "tasks.html", run=row, tab="tasks", tasks=found[:PAGE], more=more, after=after)


def task(request: Request) -> HTMLResponse:
    """The attempts at a task over a run."""
    site = site_of(request)
    row, task_id = site.row(request), request.query_params.get("id", "")
    with site.reader(row) as reader:
        tasks = reader.tasks_called(task_id)
        if not tasks:
            raise HTTPException(404, f"{row.name} has no task {task_id!r}.")
        attempts = {
            split: reader.page(Filter(split, task_id=task_id), limit=ATTEMPTS, newest_first=True)
            for split in ("train", "eval")
        }
        counts = {split: reader.count(Filter(split, task_id=task_id)) for split in attempts}  # type: ignore[arg-type]
        rows = [one for page in attempts.values() for one in page.rows]
        texts = previews(reader, rows[:ATTEMPTS])
    dots = [
        {"x": one["step"], "y": one["reward"], "eval": one["split"] == "eval", "key": one["key"]}
        for one in rows
        if one["reward"] is not None and abs(one["reward"]) < float("inf")
    ]
    rows.sort(key=lambda one: (-one["step"], one["split"], one["attempt"]))
    return site.render(
        request, "task.html", run=row, tab="tasks", task=tasks[-1], versions=len(tasks), rows=rows, texts=texts,
        counts=counts, dots=dots, shown=ATTEMPTS,
    )  # fmt: skip


def routes(_: Site) -> list[Route]:
    """Those of this file."""
    return [
        Route("/run/{run}/rollouts", rollouts),
        Route("/run/{run}/rollout/{key:int}/neighbours.json", neighbours),
        Route("/run/{run}/tasks", tasks),
        Route("/run/{run}/task", task),
    ]
