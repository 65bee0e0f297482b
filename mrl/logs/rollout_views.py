"""Lists of rollouts, one rollout, its group side by side, and the attempts at a task over a run."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from mrl.errors import StoreError
from mrl.logs.catalog import RunRow
from mrl.logs.rollout_query import PAGE, RolloutQuery, written
from mrl.logs.site import Site, attachment, pretty, site_of
from mrl.logs.text import content_text, shown
from mrl.logs.tokens import COLOURS, TOKENS, Tokenizers, stream
from mrl.store.filters import Filter
from mrl.store.media import read_image
from mrl.store.read import COUNT_LIMIT, Page, RunReader
from mrl.store.rows import jsonable, step_id_of
from mrl.store.search import search

VIEWS = ("chat", "tokens", "json")
SIDE_BY_SIDE = 16
"""Rollouts of a group that are shown at first."""
ATTEMPTS = 400
"""Of a task, on one page."""
SEARCH_SECONDS = 0.4
TOKENIZERS = Tokenizers()


# --- lists ------------------------------------------------------------------------------------------------------------


def rollouts(request: Request) -> HTMLResponse:
    """A page of the rollouts that a filter lets through."""
    site = site_of(request)
    row, query = site.row(request), RolloutQuery.of(request.query_params)
    searched = None
    with site.reader(row) as reader:
        try:
            if query.text:
                page, searched = _search(request, reader, query)
                count = None
            else:
                page, count = _page(reader, query), reader.count(query.where)
        except StoreError as error:
            if not str(error).startswith("policy_version"):
                raise
            query.problems.append(str(error))
            page, count = Page(), 0
        texts = {key: _preview(text) for key, text in reader.texts([row["key"] for row in page.rows]).items()}
        total = reader.count(Filter(query.where.split))
    first, last = (page.rows[0], page.rows[-1]) if page.rows else (None, None)
    earlier = query.after is not None if query.before is None else page.next is not None
    later = page.next is not None if query.before is None else True
    return site.render(
        request, "rollouts.html", run=row, tab="rollouts", query=query, rows=page.rows, texts=texts, count=count,
        most=COUNT_LIMIT, total=total, searched=searched, found=_count(request, "found"),
        before=written(_place(first)) if first and earlier and not query.text else None,
        after=written(_place(last)) if last and later and not query.text else None,
        on=written(page.next) if query.text else None,
    )  # fmt: skip


def _page(reader: RunReader, query: RolloutQuery) -> Page:
    if query.before is None:
        return reader.page(query.where, limit=PAGE, after=query.after, newest_first=not query.up, order=query.order)
    page = reader.page(query.where, limit=PAGE, after=query.before, newest_first=query.up, order=query.order)
    page.rows.reverse()
    if page.next is None:  # the beginning: a whole page
        return reader.page(query.where, limit=PAGE, newest_first=not query.up, order=query.order)
    return page


def _search(request: Request, reader: RunReader, query: RolloutQuery) -> tuple[Page, int]:
    found = search(
        reader,
        query.text,
        query.where,
        limit=PAGE,
        after=query.after,
        newest_first=not query.up,
        order=query.order,
        seconds=SEARCH_SECONDS,
    )
    before = _count(request, "searched")
    return Page(found.rows, found.next), found.searched + before


def _count(request: Request, name: str) -> int:
    value = request.query_params.get(name, "0")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else 0


def _place(row: dict[str, Any]) -> tuple[int, int]:
    return step_id_of(row["split"], row["step"]), row["key"]


def _preview(blob: bytes) -> str:
    """How a completion begins."""
    import zlib

    texts = json.loads(zlib.decompress(blob).decode("utf-8", "surrogatepass"))
    messages = texts.get("messages") or []
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    said = content_text(last.get("content"))
    return said or (json.dumps(last.get("tool_calls")) if last.get("tool_calls") else str(texts.get("completion", "")))


# --- one rollout ------------------------------------------------------------------------------------------------------


def rollout(request: Request) -> Response:
    """One rollout as chat, tokens or JSON."""
    site = site_of(request)
    row, key = site.row(request), request.path_params["key"]
    view = request.query_params.get("view", "chat")
    view = view if view in VIEWS else "chat"
    with site.reader(row) as reader:
        found = _one(reader, row, key)
        group = _group(reader, found)
        columns = (reader.tasks_called(found["task_id"]) or [{"columns": {}}])[-1]["columns"]
    if request.query_params.get("raw") == "1":
        return Response(
            json.dumps(jsonable(found, finite=True), ensure_ascii=True),
            media_type="application/json",
            headers=attachment(f"{row.name}-rollout-{key}.json"),
        )
    context: dict[str, Any] = {"view": view, "group": group, "colours": COLOURS, "columns": columns, "colour": ""}
    context["given"] = RolloutQuery.of(request.query_params).given
    at = next((i for i, other in enumerate(group) if other["key"] == key), 0)
    context |= {"before": group[at - 1] if at > 0 else None, "after": group[at + 1] if at + 1 < len(group) else None}
    if view == "tokens":
        context |= _tokens(request, row, found)
    elif view == "json":
        context["text"] = pretty(jsonable(found, finite=True))
    return site.render(request, "rollout.html", run=row, tab="rollouts", rollout=found, **context)


def _tokens(request: Request, row: RunRow, found: dict[str, Any]) -> dict[str, Any]:
    colour = request.query_params.get("colour", "logprob")
    colour = colour if colour in COLOURS else "logprob"
    at = request.query_params.get("at", "0")
    start = int(at) if at.isdigit() and len(at) < 10 else 0
    tokenizer, why = TOKENIZERS.of(row.summary.folder)
    streams = [
        stream(sample, number, found, tokenizer, colour, start) for number, sample in enumerate(found["samples"])
    ]
    return {"streams": streams, "colour": colour, "no_tokenizer": why, "start": start, "per_page": TOKENS}


def message(request: Request) -> HTMLResponse:
    """All of one message, whatever its length."""
    site = site_of(request)
    row = site.row(request)
    with site.reader(row) as reader:
        found = _one(reader, row, request.path_params["key"])
    at = request.path_params["at"]
    if at >= len(found["messages"]):
        raise HTTPException(404, "There is no such message.")
    one = found["messages"][at]
    text = content_text(one.get("content") if isinstance(one, dict) else one)
    return HTMLResponse(f'<div class="prose full">{shown(text)}</div>')


def image(request: Request) -> Response:
    """An image that a rollout saw; what is no image that browsers draw is not sent as one."""
    site = site_of(request)
    row, sha256 = site.row(request), request.path_params["sha256"]
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise HTTPException(404, "That is no image's hash.")
    data = read_image(row.summary.folder, sha256)
    kinds = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
    kind = next((kind for start, kind in kinds.items() if data.startswith(start)), "application/octet-stream")
    return Response(data, media_type=kind, headers={"cache-control": "private, max-age=86400"})


def group(request: Request) -> HTMLResponse:
    """The rollouts of a group next to each other."""
    site = site_of(request)
    row, path = site.row(request), request.path_params
    if path["split"] not in ("train", "eval"):
        raise HTTPException(404, "Rollouts are of `train` or `eval`.")
    where = Filter(path["split"], step=path["step"])
    with site.reader(row) as reader:
        found = [one for one in _of_step(reader, where) if one["group"] == path["group"]]
        if not found:
            raise HTTPException(404, f"There is no group {path['group']} in step {path['step']}.")
        groups = reader.groups(path["split"], path["step"])
        some = found if request.query_params.get("all") == "1" else found[:SIDE_BY_SIDE]
        full = [reader.rollout(one["key"]) for one in some]
    return site.render(
        request, "group.html", run=row, tab="rollouts", rows=full, all=len(found), groups=groups, here=path
    )


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
        texts = {key: _preview(text) for key, text in reader.texts([one["key"] for one in rows[:ATTEMPTS]]).items()}
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


def tasks(request: Request) -> HTMLResponse:
    """A page of a run's tasks."""
    site = site_of(request)
    row, after = site.row(request), request.query_params.get("after", "")
    with site.reader(row) as reader:
        found = reader.tasks(limit=PAGE + 1, after=after)
    more = found[PAGE - 1]["id"] if len(found) > PAGE else None
    return site.render(request, "tasks.html", run=row, tab="tasks", tasks=found[:PAGE], more=more, after=after)


def neighbours(request: Request) -> JSONResponse:
    """Keys of a rollout's neighbours in a list, for the keys that go to the next one."""
    site = site_of(request)
    row, query = site.row(request), RolloutQuery.of(request.query_params)
    keys = []
    with site.reader(row) as reader:
        place = _place(_one(reader, row, request.path_params["key"]))
        for last_first in (query.up, not query.up):
            where: Any = {"after": place, "limit": 1, "newest_first": last_first, "order": query.order}
            rows = (
                search(reader, query.text, query.where, **where).rows
                if query.text
                else reader.page(query.where, **where).rows
            )
            keys.append(rows[0]["key"] if rows else None)
    return JSONResponse({"before": keys[0], "after": keys[1]})


def _one(reader: RunReader, row: RunRow, key: int) -> dict[str, Any]:
    try:
        return reader.rollout(min(key, 2**62))
    except StoreError as error:
        if "there is no rollout" not in str(error):
            raise
        raise HTTPException(404, f"{row.name} has no rollout {key}; the step may have been trained again.") from None


def _group(reader: RunReader, found: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        one for one in _of_step(reader, Filter(found["split"], step=found["step"])) if one["group"] == found["group"]
    ]


def _of_step(reader: RunReader, where: Filter) -> list[dict[str, Any]]:
    return reader.page(where, limit=100_000).rows


def routes(_: Site) -> list[Route]:
    """Those of this file."""
    return [
        Route("/run/{run}/rollouts", rollouts),
        Route("/run/{run}/rollout/{key:int}", rollout),
        Route("/run/{run}/rollout/{key:int}/message/{at:int}", message),
        Route("/run/{run}/rollout/{key:int}/neighbours.json", neighbours),
        Route("/run/{run}/image/{sha256}", image),
        Route("/run/{run}/group/{split}/{step:int}/{group:int}", group),
        Route("/run/{run}/tasks", tasks),
        Route("/run/{run}/task", task),
    ]
