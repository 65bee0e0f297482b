"""A run as one HTML file: curves to zoom into, evaluations, rollouts, events and options, and nothing to fetch."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mrl.errors import ConfigError
from mrl.logs.catalog import Catalog, options_of
from mrl.logs.curves import all_metrics, charts, points, spread_of
from mrl.logs.eval_views import interval
from mrl.logs.evaluations import evaluations_of, fill
from mrl.logs.site import STATIC, environment
from mrl.loop.report import before_and_after
from mrl.store.filters import Filter
from mrl.store.read import RunReader, Split

EVALUATIONS = 60
EVENTS = 300


def write_report(run: Path, output: Path, rollouts: int) -> int:
    """Write it; its size in bytes. rollouts: how many of each kind. Raises ConfigError or StoreError."""
    if output.exists():
        raise ConfigError(f"--output: {output} exists; choose another file or remove it")
    html = report(run, rollouts).encode("utf-8", "backslashreplace")
    partial = output.with_name(f"{output.name}.partial")
    try:
        partial.write_bytes(html)
        os.replace(partial, output)
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written ({error.strerror}); choose another file") from None
    finally:
        partial.unlink(missing_ok=True)
    return len(html)


def report(run: Path, rollouts: int) -> str:
    """The file's text. Raises StoreError."""
    catalog = Catalog([run], run.parent)
    (name,) = catalog.runs()
    row = catalog.row(name, run)
    with RunReader(run) as reader:
        found = charts(all_metrics(reader)) if row.measured is None else []  # one evaluation is no curve
        wanted = [metric for chart in found for metric in chart.metrics]
        spreads = [std for metric in wanted if (std := spread_of(metric))]
        events = reader.events()
        marks = [{name: event.get(name) for name in ("step", "kind", "message")} for event in events if "step" in event]
        data = {name: {"series": points(reader, [*wanted, *spreads]), "events": marks, "resumes": 0, "live": False}}
        shown = _rollouts(reader, row.split, rollouts)
    evaluations = evaluations_of([row])[-EVALUATIONS:]
    fill(catalog, evaluations)
    specs = [
        {
            **{key: getattr(chart.panel, key) for key in ("title", "unit", "stacked", "log", "spread")},
            "series": [{"run": name, "metric": one, "label": one.removeprefix("eval:")} for one in chart.metrics],
        }
        for chart in found
    ]
    scripts = [_read(name) for name in ("theme.js", "vendor/uPlot.iife.min.js", "points.js", "charts.js")]
    styles = _read("vendor/uPlot.min.css") + _read("page.css")
    pairs = before_and_after(run, rollouts) if rollouts else []
    context: dict[str, Any] = {"run": row, "charts": specs, "evaluations": evaluations, "pairs": pairs, "shown": shown}
    context |= {"events": events[-EVENTS:], "sections": options_of(run), "data": Markup(_embedded(data))}
    context |= {"styles": Markup(styles), "scripts": _scripts(scripts), "policy": _policy(scripts)}
    template = environment().get_template("report.html")
    return template.render(interval=lambda value: interval(value, 0.0, 1.0), **context)


def _rollouts(reader: RunReader, split: Split, count: int) -> list[tuple[str, list[dict[str, Any]]]]:
    last = reader.last_step(split)
    if not count or last is None:
        return []
    of_last, failed = Filter(split, step=last), Filter(split, status="failed")
    which = f" of step {last}" if split == "train" else ""
    keys = {
        f"Highest rewards{which}": reader.page(of_last, limit=count, newest_first=True, order="reward").rows,
        f"Lowest rewards{which}": reader.page(of_last, limit=count, order="reward").rows,
        "The last that could not be scored": reader.page(failed, limit=count, newest_first=True).rows,
    }
    return [(title, [reader.rollout(row["key"]) for row in rows]) for title, rows in keys.items() if rows]


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _embedded(data: Any) -> str:
    """JSON that ends no element: `<` is an escape."""
    return json.dumps(data, ensure_ascii=True).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _scripts(scripts: list[str]) -> list[Markup]:
    assert not any("</script" in script.lower() for script in scripts)
    return [Markup(script) for script in scripts]


def _policy(scripts: list[str]) -> str:
    """Only these scripts may run, whatever else the file holds."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
