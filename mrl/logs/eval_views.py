"""Evaluations: a table with intervals, a pivot table, and files of all that."""

from __future__ import annotations

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
    MOST,
    VALUES,
    Evaluation,
    columns_of,
    comparable,
    evaluations_of,
    fill,
    pair_of,
    pivot,
)
from mrl.logs.site import Site, attachment, csv_file, number, site_of
from mrl.logs.text import plain

ROWS = 500
"""Of a pivot table or of differences, on a page."""
CHOSEN = 8
"""Evaluations that are chosen where nobody chose."""


def evaluations(request: Request) -> HTMLResponse:
    """Every evaluation of every run, or of the run in the path."""
    site = site_of(request)
    row = site.row(request) if "run" in request.path_params else None
    everything = evaluations_of([row] if row else site.catalog.rows())
    scored = _newest(site, everything)
    a, b = pair_of(scored) or (None, None)
    chosen = _named(request, scored) or _comparable(scored, b)
    by, value = request.query_params.get("by", ""), request.query_params.get("value", "reward")
    value = value if value in VALUES else "reward"
    useful, tasks = columns_of(site.catalog, chosen)
    by = by if by in useful or by == "task" else (useful[0] if useful else "task")
    rows, table = pivot(chosen, by, value, tasks)
    low, high = _range(scored)
    return site.render(
        request, "run_evals.html" if row else "evals.html", run=row, tab="evals", evaluations=scored,
        unscored=len(everything) - len(scored), chosen=[one.id for one in chosen], columns=chosen, useful=useful, by=by,
        value=value, values=VALUES, rows=rows[:ROWS], more=len(rows) - ROWS, table=table, shade=_shade, a=a, b=b,
        interval=lambda found: interval(found, low, high),
        path=f"/run/{quote(row.name, safe='')}/evals" if row else "/evals",
    )  # fmt: skip


def export(request: Request) -> Response:
    """The chosen evaluations as JSON lines, CSV or a picture."""
    site = site_of(request)
    everything = evaluations_of(site.catalog.rows())
    if chosen := _named(request, everything):
        fill(site.catalog, chosen)
    else:
        scored = _newest(site, everything)
        chosen = _comparable(scored, (pair_of(scored) or (None, None))[1])
    match request.query_params.get("format", "jsonl"):
        case "png":
            return Response(picture(chosen[:MOST]), media_type="image/png", headers=attachment("evaluations.png"))
        case "csv":
            names = ["run", "step", "model", "of", "task", "attempt", "reward", "tokens", "error"]
            return csv_file(names, (row.values() for row in _rows(chosen)), "evaluations")
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
    axes.set_yticks(range(len(chosen)), [_name_in_picture(one) for one in chosen])
    axes.invert_yaxis()
    axes.set_xlabel("mean reward, 95 % interval over tasks")
    axes.grid(axis="x", alpha=0.3)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=130)
    return written.getvalue()


def _name_in_picture(one: Evaluation) -> str:
    return plain(f"{one.model}, {one.of}").replace("$", r"\$")


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


def _newest(site: Site, everything: list[Evaluation]) -> list[Evaluation]:
    """With their attempts."""
    scored = sorted(everything, key=lambda one: one.time, reverse=True)[:MOST]
    fill(site.catalog, scored)
    return scored


def _named(request: Request, everything: list[Evaluation]) -> list[Evaluation]:
    named = set(request.query_params.getlist("e"))
    return sorted((one for one in everything if one.id in named), key=lambda one: (one.run, one.step))


def _comparable(scored: list[Evaluation], b: Evaluation | None) -> list[Evaluation]:
    """Where nobody chose: what has tasks in common with `b`; of one run its latest, of several the latest of each."""
    found = [] if b is None else comparable(b, scored)
    if len({one.run for one in found}) > 1:
        found = list({one.run: one for one in reversed(found)}.values())[::-1]
    return sorted(found[:CHOSEN], key=lambda one: (one.run, one.step))


def _range(scored: list[Evaluation]) -> tuple[float, float]:
    found = [value for one in scored if (of := one.reward) for value in (of.mean, of.low, of.high) if value is not None]
    low, high = min(found, default=0.0), max(found, default=1.0)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _shade(value: float, value_of: str) -> str:
    """Of five, for shares and rewards between 0 and 1; other values get none."""
    return f"h{round(value * 5)}" if value_of != "tokens" and 0 <= value <= 1 else ""


def _said(found: Any) -> str:
    return number(found.mean) if found.low is None else f"{found.mean:.3f}, {found.low:.3f} to {found.high:.3f}"


def _rows(chosen: list[Evaluation]) -> list[dict[str, Any]]:
    return [
        {
            "run": one.run,
            "step": one.step,
            "model": one.model,
            "of": one.of,
            "task": attempt.task,
            "attempt": attempt.attempt,
            "reward": attempt.reward,
            "tokens": attempt.tokens,
            "error": attempt.error,
        }
        for one in chosen
        for attempt in one.attempts
    ]


def routes(_: Site) -> list[Route]:
    """Those of this file."""
    return [
        Route("/evals", evaluations),
        Route("/evals/export", export),
        Route("/run/{run}/evals", evaluations),
    ]
