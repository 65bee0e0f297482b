"""The table of runs, one run's curves, events and configuration, and runs side by side."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route

from mrl.logs.catalog import RunRow, flat_options_of, options_of
from mrl.logs.curves import all_metrics, charts, points
from mrl.logs.rollout_query import whole
from mrl.logs.site import Site, site_of
from mrl.store.read import RunReader

LAST_STEPS = 10
"""A single step says little: runs are compared by the mean of so many."""
MOST_COMPARED = 12
EVENTS = 200
"""Events on a page."""
SORTS: dict[str, Callable[[RunRow], Any]] = {
    "name": lambda row: row.name,
    "status": lambda row: row.summary.status,
    "model": lambda row: row.model,
    "algorithm": lambda row: row.algorithm,
    "steps": lambda row: row.summary.steps,
    "last": lambda row: row.summary.reward,
    "best": lambda row: row.best_reward,
    "cost": lambda row: row.dollars,
    "duration": lambda row: row.seconds,
    "created": lambda row: row.summary.created,
}
MARKED = ("warning", "error", "restart", "checkpoint")
"""Kinds of events that are marked in curves."""


# --- runs -------------------------------------------------------------------------------------------------------------


def runs(request: Request) -> HTMLResponse:
    """Every run in a table."""
    site, params = site_of(request), request.query_params
    rows = site.catalog.rows()
    statuses = sorted({row.summary.status for row in rows})
    wanted, status = params.get("q", "").strip().casefold(), params.get("status", "")
    found = [
        row
        for row in rows
        if wanted in f"{row.name} {row.model} {row.algorithm}".casefold() and status in ("", row.summary.status)
    ]
    sort = params.get("sort", "created")
    sort, up = (sort if sort in SORTS else "created"), params.get("up") == "1"
    with_value = [row for row in found if SORTS[sort](row) is not None]
    with_value.sort(key=SORTS[sort], reverse=not up)
    found = [*with_value, *(row for row in found if SORTS[sort](row) is None)]
    context: dict[str, Any] = {
        "rows": found,
        "all": len(rows),
        "costs": any(row.dollars is not None for row in rows),
        "statuses": statuses,
        "status": status,
        "sort": sort,
        "up": up,
    }
    return site.render(request, "runs.html", q=params.get("q", ""), root=site.catalog.root, **context)


# --- one run ----------------------------------------------------------------------------------------------------------


def run(request: Request) -> HTMLResponse:
    """A run's curves, and what it does now."""
    site = site_of(request)
    row = site.row(request)
    with site.reader(row) as reader:
        if row.measured is not None:
            return site.render(request, "run_measured.html", run=row, tab="curves", metrics=reader.metrics(0, "eval"))
        names = all_metrics(reader)
        last = reader.metrics(row.summary.steps)
        events = reader.events()
    drawn = [
        {
            "title": chart.panel.title,
            "unit": chart.panel.unit,
            "stacked": chart.panel.stacked,
            "log": chart.panel.log,
            "spread": chart.panel.spread,
            "series": [
                {"run": row.name, "metric": name, "label": name.removeprefix("eval:")} for name in chart.metrics
            ],
        }
        for chart in charts(names)
    ]
    trouble = [event for event in events if event["kind"] in ("warning", "error", "restart")]
    return site.render(
        request, "run.html", run=row, tab="curves", charts=drawn, names=names, last=last, trouble=trouble[-5:][::-1],
        troubles=len(trouble), curves=_curves(names), x=_known(request, "x", names), y=_known(request, "y", names),
    )  # fmt: skip


def head(request: Request) -> HTMLResponse:
    """The line that says how a run is doing, for pages that follow it."""
    site = site_of(request)
    return site.render(request, "run_head.html", run=site.row(request))


def series(request: Request) -> JSONResponse:
    """Points of `metric=`s after the step `since=`, and what pages that follow a run want to know."""
    site = site_of(request)
    row = site.row(request)
    after = whole(request.query_params, "since", -1)
    with site.reader(row) as reader:
        found = points(reader, request.query_params.getlist("metric"), after)
        marks = [
            {"step": event.get("step", 0), "kind": event["kind"], "message": event["message"][:300]}
            for kind in MARKED
            for event in reader.events(kind)[-100:]
            if "step" in event
        ]
        curves = _curves(all_metrics(reader))
    live = row.summary.status in ("running", "unknown")
    about = {"steps": row.summary.steps, "resumes": row.summary.resumes, "live": live, "events": marks}
    about["curves"] = curves
    return JSONResponse({"series": found, **about}, headers={"cache-control": "no-store"})


def _curves(names: list[str]) -> int:
    """A page that follows a run is made again when there are more of them."""
    return sum(len(chart.metrics) for chart in charts(names))


def events(request: Request) -> HTMLResponse:
    """Everything that a run noted."""
    site = site_of(request)
    row, kind = site.row(request), request.query_params.get("kind", "")
    before = whole(request.query_params, "before")
    with site.reader(row) as reader:
        everything = reader.events()
    kinds = sorted({event["kind"] for event in everything})
    found = [event for event in everything if kind in ("", event["kind"])][::-1]
    if before:
        found = [event for event in found if event["id"] < before]
    more = found[EVENTS - 1]["id"] if len(found) > EVENTS else None
    return site.render(
        request, "events.html", run=row, tab="events", events=found[:EVENTS], kinds=kinds, kind=kind, more=more
    )


def config(request: Request) -> HTMLResponse:
    """Every option of a run, and what it began with."""
    site = site_of(request)
    row = site.row(request)
    sections = {
        name: value if isinstance(value, dict) else {name: value}
        for name, value in options_of(row.summary.folder).items()
    }
    starts = []
    if row.summary.status != "unreadable":
        with site.reader(row) as reader:
            starts = reader.events("start")
    return site.render(request, "config.html", run=row, tab="config", sections=sections, starts=starts)


# --- side by side -----------------------------------------------------------------------------------------------------

COMPARED = (
    *(
        "reward/mean",
        "eval:eval/mean",
        "reward/pass_rate",
        "rollout/completion_length_mean",
        "train/entropy",
        "train/kl",
    ),
    *("train/grad_norm", "time/step"),
)


def compare(request: Request) -> HTMLResponse:
    """Curves of several runs in one chart each; options that differ."""
    site = site_of(request)
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    folders = site.catalog.runs()
    unknown = [name for name in names if name not in folders]
    if unknown:
        raise HTTPException(404, f"This page shows no run called {unknown[0]!r}.")
    dropped, names = names[MOST_COMPARED:], names[:MOST_COMPARED]
    rows = [site.catalog.row(name, folders[name]) for name in names]
    rows = [row for row in rows if row.summary.status != "unreadable"]
    metrics, last = [], []
    for row in rows:
        with site.reader(row) as reader:
            metrics.append(all_metrics(reader))
            last.append(_last(reader))
    there = sorted({name for found in metrics for name in found})
    asked = [name for name in request.query_params.getlist("metric") if name in there]
    drawn = [
        {
            "title": name.removeprefix("eval:"),
            "unit": "",
            "stacked": False,
            "log": False,
            "spread": False,
            "series": [
                {"run": row.name, "metric": name, "label": row.name}
                for row, found in zip(rows, metrics, strict=True)
                if name in found
            ],
        }
        for name in asked or [name for name in COMPARED if name in there]
    ]
    options = [flat_options_of(row.summary.folder) for row in rows]
    listed = [{"name": name, "chosen": name in names} for name in reversed(folders)]
    context: dict[str, Any] = {
        "charts": drawn,
        "differing": _differing(options),
        "measured": _measured(last),
        "listed": listed,
    }
    return site.render(request, "compare.html", runs=rows, names=there, asked=asked, dropped=dropped, **context)


def _differing(options: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    names = sorted({name for found in options for name in found})
    rows = [(name, [found.get(name) for found in options]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]


def _measured(last: list[dict[str, float]]) -> list[tuple[str, list[float | None]]]:
    names = sorted({name for found in last for name in found})
    return [(name, [found.get(name) for found in last]) for name in names]


def _last(reader: RunReader) -> dict[str, float]:
    found = {name: fmean(v for _, v in series[-LAST_STEPS:]) for name, series in reader.all_series().items()}
    return found | {name: series[-1][1] for name, series in reader.all_series("eval").items()}


def _known(request: Request, name: str, names: list[str]) -> str:
    value = request.query_params.get(name, "")
    return value if value in names else ""


def routes(_: Site) -> list[Route]:
    """Those of this file."""
    return [
        Route("/", runs),
        Route("/compare", compare),
        Route("/run/{run}", run),
        Route("/run/{run}/head", head),
        Route("/run/{run}/series.json", series),
        Route("/run/{run}/events", events),
        Route("/run/{run}/config", config),
    ]
