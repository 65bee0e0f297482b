"""Two evaluations task by task: what was fixed and what broke, and one task with both models' answers side by side."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from mrl.logs.evaluations import CHANGES, Evaluation, differences, evaluations_of, fill, paired
from mrl.logs.rollout_lists import previews
from mrl.logs.rollout_query import whole
from mrl.logs.site import Site, csv_file, site_of
from mrl.store.read import RunReader

PAGE = 50
ATTEMPTS = 8
"""Of a task and model, side by side."""


def difference(request: Request) -> Response:
    """A page of the tasks, the largest changes first."""
    site = site_of(request)
    a, b, everything = _two(site, request)
    found = differences(a, b)
    if request.query_params.get("format") == "csv":
        return csv_file(
            ["task", "a", "b", "difference", "change"],
            ([row.task, row.a, row.b, row.by, row.change] for row in found),
            f"{a.id}-{b.id}",
        )
    change, at = request.query_params.get("change", ""), whole(request.query_params, "at")
    counts = {change: sum(row.change == change for row in found) for change in CHANGES}
    wanted = [row for row in found if change in ("", row.change)]
    at = at if at < len(wanted) else 0
    rows = wanted[at : at + PAGE]
    listed = sorted(everything, key=lambda one: (one.run, one.step))
    return site.render(
        request, "diff.html", a=a, b=b, rows=rows, counts=counts, change=change, listed=listed, paired=paired(found),
        total=len(found), wanted=len(wanted), at=at, per_page=PAGE,
        said_a=_said(site, a, [row.keys_a for row in rows]), said_b=_said(site, b, [row.keys_b for row in rows]),
    )  # fmt: skip


def task(request: Request) -> HTMLResponse:
    """A task: what it asked, and both models' answers."""
    site = site_of(request)
    a, b, _ = _two(site, request)
    change, task_id = request.query_params.get("change", ""), request.query_params.get("task", "")
    wanted = [row for row in differences(a, b) if change in ("", row.change)]
    at = next((at for at, row in enumerate(wanted) if row.task == task_id), None)
    if at is None:
        raise HTTPException(404, f"Neither {a.id} nor {b.id} has a task {task_id!r} of this kind.")
    row = wanted[at]
    answers = [
        {"name": name, "of": one, "value": value, "attempts": _in_full(site, one, keys[:ATTEMPTS]), "all": len(keys)}
        for name, one, value, keys in (("A", a, row.a, row.keys_a), ("B", b, row.b, row.keys_b))
    ]
    return site.render(
        request, "diff_task.html", a=a, b=b, row=row, change=change, answers=answers, at=at, total=len(wanted),
        before=wanted[at - 1] if at else None, after=wanted[at + 1] if at + 1 < len(wanted) else None,
        prompts=_prompts(answers),
    )  # fmt: skip


def _two(site: Site, request: Request) -> tuple[Evaluation, Evaluation, list[Evaluation]]:
    """Those that the link names, with their attempts, and all that there are."""
    everything = {one.id: one for one in evaluations_of(site.catalog.rows())}
    ids = [request.query_params.get(name, "") for name in ("a", "b")]
    for given in ids:
        if given not in everything:
            raise HTTPException(404, f"This page shows no evaluation {given!r}; pick two in the table of evaluations.")
    a, b = (everything[given] for given in ids)
    fill(site.catalog, [a, b])
    return a, b, list(everything.values())


def _said(site: Site, one: Evaluation, keys: list[list[int]]) -> list[str]:
    """What the first attempt at each of these tasks said last; "" where there is none."""
    firsts = [some[0] if some else None for some in keys]
    with _reader(site, one) as reader:
        texts = previews(reader, [{"key": key} for key in firsts if key is not None])
    return ["" if key is None else texts.get(key, "") for key in firsts]


def _in_full(site: Site, one: Evaluation, keys: list[int]) -> list[dict[str, Any]]:
    with _reader(site, one) as reader:
        return [reader.rollout(key) for key in keys]


def _reader(site: Site, one: Evaluation) -> RunReader:
    folder = site.catalog.folder(one.run)
    if folder is None:
        raise HTTPException(404, f"This page shows no run called {one.run!r}.")
    return RunReader(folder)


def _prompts(answers: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """What was asked, once where both were asked the same."""
    asked = [(one["name"], one["attempts"][0]["prompt"]) for one in answers if one["attempts"]]
    if len(asked) == 2 and asked[0][1] == asked[1][1]:
        return [("", asked[0][1])]
    return asked if len(asked) == 2 else [("", prompt) for _, prompt in asked]


def routes(_: Site) -> list[Route]:
    """Those of this file."""
    return [Route("/evals/diff", difference), Route("/evals/diff/task", task)]
