"""One rollout, and its group side by side."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from mrl.errors import StoreError
from mrl.logs.catalog import RunRow
from mrl.logs.rollout_query import RolloutQuery, whole
from mrl.logs.site import Site, attachment, pretty, site_of
from mrl.logs.text import content_text, shown
from mrl.logs.tokens import COLOURS, TOKENS, Colour, Tokenizers, stream, unrecorded
from mrl.store.media import read_image
from mrl.store.read import RunReader
from mrl.store.rows import jsonable

VIEWS = ("chat", "tokens", "json")
SIDE_BY_SIDE = 16
"""Rollouts of a group that are shown at first."""
MOST_TOKENS = 3 * TOKENS
"""Of all samples on a page; an attempt whose every turn is a sample of its own has many."""
LARGEST = 2**53
"""SQLite's numbers have an end, those in a path have none."""
TOKENIZERS = Tokenizers()


# --- one rollout ------------------------------------------------------------------------------------------------------


def rollout(request: Request) -> Response:
    """One rollout as chat, tokens or JSON."""
    site = site_of(request)
    row, key = site.row(request), request.path_params["key"]
    view = request.query_params.get("view", "chat")
    view = view if view in VIEWS else "chat"
    with site.reader(row) as reader:
        found = one_rollout(reader, row, key)
        group = reader.group(found["split"], found["step"], found["group"])
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
    missing = unrecorded(found["samples"])
    asked = request.query_params.get("colour")
    wanted = (one for one in COLOURS if one == asked or (asked not in COLOURS and one not in missing))
    colour: Colour = next(wanted, "source")
    start = whole(request.query_params, "at")
    tokenizer, why = TOKENIZERS.of(row.summary.folder)
    first = whole(request.query_params, "sample")
    numbers = _that_fit(found["samples"], first)
    streams = [stream(found["samples"][at], at, found, tokenizer, colour, start) for at in numbers]
    told = {"missing": missing, "simple": row.simple, "no_tokenizer": why}
    told |= {"samples": len(found["samples"]), "sample": first, "sample_after": numbers.stop}
    return {"streams": streams, "colour": colour, "start": start, "per_page": TOKENS, **told}


def _that_fit(samples: list[dict[str, Any]], first: int) -> range:
    """Which samples are shown: from `first` on as many as a page takes, and at least one."""
    end, tokens = first, 0
    while end < len(samples) and (end == first or tokens < MOST_TOKENS):
        tokens += min(len(samples[end]["prompt_ids"]) + len(samples[end]["completion_ids"]), TOKENS)
        end += 1
    return range(first, end)


def message(request: Request) -> HTMLResponse:
    """All of one message, whatever its length."""
    site = site_of(request)
    row = site.row(request)
    with site.reader(row) as reader:
        found = one_rollout(reader, row, request.path_params["key"])
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
    step, number = (min(path[name], LARGEST) for name in ("step", "group"))
    with site.reader(row) as reader:
        found = reader.group(path["split"], step, number)
        if not found:
            raise HTTPException(404, f"There is no group {path['group']} in step {path['step']}.")
        groups = reader.groups(path["split"], path["step"])
        some = found if request.query_params.get("all") == "1" else found[:SIDE_BY_SIDE]
        full = [reader.rollout(one["key"]) for one in some]
    return site.render(
        request, "group.html", run=row, tab="rollouts", rows=full, all=len(found), groups=groups, here=path
    )


def one_rollout(reader: RunReader, row: RunRow, key: int) -> dict[str, Any]:
    try:
        return reader.rollout(min(key, LARGEST))
    except StoreError as error:
        if "there is no rollout" not in str(error):
            raise
        raise HTTPException(404, f"{row.name} has no rollout {key}; the step may have been trained again.") from None


def routes(_: Site) -> list[Route]:
    """Those of this file."""
    return [
        Route("/run/{run}/rollout/{key:int}", rollout),
        Route("/run/{run}/rollout/{key:int}/message/{at:int}", message),
        Route("/run/{run}/image/{sha256}", image),
        Route("/run/{run}/group/{split}/{step:int}/{group:int}", group),
    ]
