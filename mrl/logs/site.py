"""What every view has: the catalog, the templates, and how numbers and times are written."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from mrl.logs.catalog import Catalog, RunRow
from mrl.logs.text import blocks, content_text, cut, one_line, plain, said, shown
from mrl.store.read import RunReader
from mrl.store.schema import DATABASE
from mrl.system.units import plural, size

_EVENT = ("id", "time", "kind", "message", "step")
STATIC = Path(__file__).parent / "static"


class Site:
    """One logs page."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.templates = environment()

    def render(self, request: Request, template: str, code: int = 200, **context: Any) -> HTMLResponse:
        """A page, or with `HX-Request` what its template gives for a part of it."""
        part = request.headers.get("hx-request") == "true" and "hx-boosted" not in request.headers
        html = self.templates.get_template(template).render(request=request, part=part, **context)
        headers = {"cache-control": "no-store", "vary": "HX-Request"}
        return HTMLResponse(html.encode("utf-8", "backslashreplace"), code, headers)

    def row(self, request: Request) -> RunRow:
        """Of the run in the path. Raises HTTPException 404."""
        name = request.path_params["run"]
        folder = self.catalog.folder(name)
        if folder is None:
            raise HTTPException(404, f"This page shows no run called {name!r}.")
        return self.catalog.row(name, folder)

    @contextmanager
    def reader(self, row: RunRow) -> Iterator[RunReader]:
        """Raises StoreError, or HTTPException 404 where nothing is recorded yet."""
        if not (row.summary.folder / DATABASE).exists():
            detail = f"{row.name} has not recorded anything yet: it is loading, or it never began."
            raise HTTPException(404, detail, {"refresh": "2"})  # --live gives the link before the run has a folder
        with RunReader(row.summary.folder) as reader:
            yield reader


def site_of(request: Request) -> Site:
    """The one that answers."""
    site: Site = request.app.state.site
    return site


def environment() -> Environment:
    """Jinja's, with everything escaped and nothing undefined."""
    made = Environment(
        loader=PackageLoader("mrl.logs"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "num": number,
        "signed": signed,
        "pct": percent,
        "dollars": dollars,
        "dur": lasting,
        "when": moment,
        "ago": ago,
        "size": size,
        "shown": lambda value: shown(str(value)),
        "plain": lambda value: plain(str(value)),
        "line": one_line,
        "cut": lambda value: cut(content_text(value)),
        "content": content_text,
        "quoted": lambda value: quote(str(value), safe=""),
        "pretty": pretty,
        "spark": spark,
        "blocks": lambda value: blocks(content_text(value)),
        "said": said,
        "details": lambda event: {name: value for name, value in event.items() if name not in _EVENT},
        "plainly": plainly,
    }
    made.globals |= {"link": link, "plural": plural, "static": static_url}
    return made


def link(path: str, **query: Any) -> str:
    """A path with a query, without what is None or empty."""
    kept = {name: value for name, value in query.items() if value not in (None, "", [])}
    return f"{path}?{urlencode(kept, doseq=True, errors='backslashreplace')}" if kept else path


def attachment(name: str) -> dict[str, str]:
    """Headers of a file to be saved, under a name that no system minds."""
    safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.@") else "_" for letter in name)
    return {"content-disposition": f'attachment; filename="{safe}"'}


def csv_file(names: list[str], rows: Iterable[Iterable[Any]], name: str) -> Response:
    """Rows to be saved, harmless in a spreadsheet."""
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerow(names)
    for row in rows:
        writer.writerow([_harmless(value) for value in row])
    data = written.getvalue().encode("utf-8", "backslashreplace")
    return Response(data, media_type="text/csv; charset=utf-8", headers=attachment(f"{name}.csv"))


def _harmless(value: Any) -> Any:
    """Spreadsheets run a cell that begins like a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r", "\n") else value


def static_url(name: str) -> str:
    """Changes when the file does, so that browsers may keep it."""
    return f"/static/{name}?v={_digest(name)}"


def _digest(name: str) -> str:
    file = STATIC / name
    key = (name, file.stat().st_mtime_ns)
    if key not in _DIGESTS:
        _DIGESTS[key] = hashlib.sha256(file.read_bytes()).hexdigest()[:10]
    return _DIGESTS[key]


_DIGESTS: dict[tuple[str, int], str] = {}

# --- how values are written -------------------------------------------------------------------------------------------


def number(value: Any, digits: int = 4) -> str:
    """`0.1234`, `–` for None, `nan`, `1,024`."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return plain(str(value))
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def signed(value: float | None) -> str:
    """A difference: `+0.25`, `-0.25`, `–` for None."""
    return "–" if value is None else f"+{number(value, 3)}" if value > 0 else number(value, 3)


def percent(value: Any) -> str:
    """`12.3 %`."""
    return "–" if value is None else f"{value * 100:.1f} %"


def dollars(value: float | None) -> str:
    """`$0.0042`, `$1.20`, `$1,200`."""
    return "–" if value is None else f"${value:,.2f}" if value >= 0.1 or not value else f"${value:.2g}"


def lasting(seconds: float | None) -> str:
    """`38 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def moment(seconds: float | None) -> str:
    """Local date and time."""
    return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def ago(seconds: float | None) -> str:
    """`3 min ago`."""
    return "–" if seconds is None else f"{lasting(max(time.time() - seconds, 0))} ago"


def pretty(value: Any) -> str:
    """Readable JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def plainly(value: Any) -> str:
    """A text as it is, anything else as JSON in one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def spark(points: list[tuple[int, float]], width: int = 120, height: int = 24) -> Markup:
    """A small line, as SVG: at most 60 points, the mean of what lies between."""
    if len(points) < 2:
        return Markup("")
    stride = max(1, math.ceil(len(points) / 60))
    means = [_mean([value for _, value in points[at : at + stride]]) for at in range(0, len(points), stride)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    step = (width - 2) / max(len(means) - 1, 1)
    line = " ".join(
        f"{1 + i * step:.1f},{height - 2 - (v - low) / span * (height - 4):.1f}" for i, v in enumerate(means)
    )
    return Markup('<svg class="spark" viewBox="0 0 {} {}" aria-hidden="true"><polyline points="{}"/></svg>').format(
        width, height, line
    )


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else 0.0
