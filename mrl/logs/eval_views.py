"""Evaluations: a table with intervals, a pivot table, two models row by row, and files of all that."""

from __future__ import annotations

import csv
import io
import json
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from mrl.logs.evaluations import (
    CHANGES,
    MOST,
    VALUES,
    Evaluation,
    columns_of,
    differences,
    evaluations_of,
    fill,
    paired,
    pivot,
)
from mrl.logs.site import Site, attachment, number, site_of
from mrl.logs.text import plain

ROWS = 500
"""Of a pivot table or of differences, on a page."""
CHOSEN = 8
"""Evaluations that are chosen where nobody chose."""


def evaluations(request: Request) -> HTMLResponse:
    """Every evaluation of every run, or of the run in the path."""
    site = site_of(request)
    row = site.row(request) if "run" in request.path_params else None
    everything = evaluations_of(site.catalog, [row] if row else site.catalog.rows())
    scored = sorted(everything, key=lambda one: one.time, reverse=True)[:MOST]
    fill(site.catalog, scored)
    chosen = _chosen(request, scored)
    by, value = request.query_params.get("by", ""), request.query_params.get("value", "reward")
    value = value if value in VALUES else "reward"
    useful, tasks = columns_of(site.catalog, chosen)
    by = by if by in useful or by == "task" else (useful[0] if useful else "task")
    rows, table = pivot(chosen, by, value, tasks)
    low, high = _range(scored)
    return site.render(
        request, "run_evals.html" if row else "evals.html", run=row, tab="evals", evaluations=scored,
        unscored=len(everything) - len(scored), chosen=[one.id for one in chosen], columns=chosen, useful=useful, by=by,
        value=value, values=VALUES, rows=rows[:ROWS], more=len(rows) - ROWS, table=table, shade=_shade,
        interval=lambda found: interval(found, low, high),
        path=f"/run/{quote(row.name, safe='')}/evals" if row else "/evals",
    )  # fmt: skip


def difference(request: Request) -> Response:
    """Two evaluations, task by task."""
    site = site_of(request)
    everything = {one.id: one for one in evaluations_of(site.catalog, site.catalog.rows())}
    ids = [request.query_params.get(name, "") for name in ("a", "b")]
    for given in ids:
        if given not in everything:
            raise HTTPException(404, f"This page shows no evaluation {given!r}; pick two in the table of evaluations.")
    a, b = (everything[given] for given in ids)
    fill(site.catalog, [a, b])
    found = differences(a, b)
    if request.query_params.get("format") == "csv":
        return _csv(
            ["task", "a", "b", "difference", "change"],
            ([row.task, row.a, row.b, row.by, row.change] for row in found),
            f"{a.id}-{b.id}",
        )
    counts = {change: sum(row.change == change for row in found) for change in CHANGES}
    change = request.query_params.get("change", "")
    shown = [row for row in found if change in ("", row.change)]
    listed = sorted(everything.values(), key=lambda one: (one.run, one.step))
    return site.render(
        request, "diff.html", a=a, b=b, rows=shown[:ROWS], more=len(shown) - ROWS, counts=counts, change=change,
        paired=paired(found), listed=listed, total=len(found), signed=_signed,
    )  # fmt: skip


def export(request: Request) -> Response:
    """The chosen evaluations as JSON lines, CSV or a picture."""
    site = site_of(request)
    chosen = _chosen(request, evaluations_of(site.catalog, site.catalog.rows()))
    fill(site.catalog, chosen)
    match request.query_params.get("format", "jsonl"):
        case "png":
            return Response(picture(chosen), media_type="image/png", headers=attachment("evaluations.png"))
        case "csv":
            names = ["run", "step", "task", "attempt", "reward", "tokens", "error"]
            return _csv(names, (row.values() for row in _rows(chosen)), "evaluations")
        case "jsonl":
            text = "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in _rows(chosen))
            return Response(text, media_type="application/jsonl", headers=attachment("evaluations.jsonl"))
    raise HTTPException(404, "format: use jsonl, csv or png.")


def picture(chosen: list[Evaluation]) -> bytes:
    """Scores with their intervals, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.7 + 0.34 * max(len(chosen), 1)), layout="constrained")
    axes = figure.add_subplot()
    for at, one in enumerate(chosen):
        found = one.reward
        if found is not None:
            low, high = (found.mean if end is None else end for end in (found.low, found.high))
            axes.plot([low, high], [at, at], color="#0072b2", linewidth=2)
            axes.plot([found.mean], [at], "o", color="#0072b2", markersize=5)
    axes.set_yticks(range(len(chosen)), [plain(one.id).replace("$", r"\$") for one in chosen])
    axes.invert_yaxis()
    axes.set_xlabel("mean reward, 95 % interval over tasks")
    axes.grid(axis="x", alpha=0.3)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=130)
    return written.getvalue()


def interval(found: Any, low: float, high: float) -> Markup:
    """A mean and its interval on the scale of the table, as SVG."""
    if found is None:
        return Markup("")
    span = (high - low) or 1.0
    start, mean, end = (
        4 + 152 * (min(max(value, low), high) - low) / span
        for value in (
            found.mean if found.low is None else found.low,
            found.mean,
            found.mean if found.high is None else found.high,
        )
    )
    return Markup(
        '<svg class="interval" viewBox="0 0 160 14" role="img" aria-label="{}"><line class="axis" x1="4" x2="156" '
        'y1="7" y2="7"/><line x1="{}" x2="{}" y1="7" y2="7"/><circle cx="{}" cy="7" r="3.5"/></svg>'
    ).format(_said(found), round(start, 1), round(end, 1), round(mean, 1))


def _chosen(request: Request, everything: list[Evaluation]) -> list[Evaluation]:
    """Those named in the link; otherwise of one run its latest, of several runs the latest of each."""
    named = request.query_params.getlist("e")
    chosen = [one for one in everything if one.id in named]
    if not chosen:
        runs = {one.run for one in everything}
        newest = sorted(everything, key=lambda one: one.time, reverse=True)
        if len(runs) > 1:
            seen: dict[str, Evaluation] = {}
            for one in newest:
                seen.setdefault(one.run, one)
            newest = list(seen.values())
        chosen = newest[:CHOSEN]
    return sorted(chosen, key=lambda one: (one.run, one.step))


def _range(scored: list[Evaluation]) -> tuple[float, float]:
    found = [value for one in scored if (of := one.reward) for value in (of.mean, of.low, of.high) if value is not None]
    low, high = min(found, default=0.0), max(found, default=1.0)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _shade(value: float, value_of: str) -> str:
    """Of five, for shares and rewards between 0 and 1; other values get none."""
    return f"h{round(value * 5)}" if value_of != "tokens" and 0 <= value <= 1 else ""


def _signed(value: float | None) -> str:
    return "–" if value is None else f"+{number(value, 3)}" if value > 0 else number(value, 3)


def _said(found: Any) -> str:
    return number(found.mean) if found.low is None else f"{found.mean:.3f}, {found.low:.3f} to {found.high:.3f}"


def _rows(chosen: list[Evaluation]) -> list[dict[str, Any]]:
    return [
        {
            "run": one.run,
            "step": one.step,
            "task": attempt.task,
            "attempt": attempt.attempt,
            "reward": attempt.reward,
            "tokens": attempt.tokens,
            "error": attempt.error,
        }
        for one in chosen
        for attempt in one.attempts
    ]


def _csv(names: list[str], rows: Any, name: str) -> Response:
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerow(names)
    for row in rows:
        writer.writerow([_harmless(value) for value in row])
    data = written.getvalue().encode("utf-8", "backslashreplace")
    return Response(data, media_type="text/csv; charset=utf-8", headers=attachment(f"{name}.csv"))


def _harmless(value: Any) -> Any:
    """Spreadsheets run a cell that begins like a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def routes(_: Site) -> list[Route]:
    """Those of this file."""
    return [
        Route("/evals", evaluations),
        Route("/evals/diff", difference),
        Route("/evals/export", export),
        Route("/run/{run}/evals", evaluations),
    ]
