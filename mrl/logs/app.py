"""The app: routes, errors, files, and the guard in front of them."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from mrl.errors import MRLError
from mrl.logs import diff_views, eval_views, rollout_lists, rollout_views, run_views
from mrl.logs.catalog import Catalog
from mrl.logs.security import Guard
from mrl.logs.site import STATIC, Site, site_of


def create_app(catalog: Catalog, *, token: str | None = None) -> Starlette:
    """The logs page of these runs. token: what visitors have to bring; None = requests have to name this machine."""
    site = Site(catalog)
    app = Starlette(
        routes=[
            *run_views.routes(site),
            *rollout_lists.routes(site),
            *rollout_views.routes(site),
            *eval_views.routes(site),
            *diff_views.routes(site),
            Mount("/static", _Files(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, token=token), Middleware(GZipMiddleware, minimum_size=2000, compresslevel=3)],
        exception_handlers={HTTPException: _http_error, MRLError: _unreadable},
    )
    app.state.site = site
    return app


class _Files(StaticFiles):
    """Their addresses change with their content, so they may be kept."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "public, max-age=31536000, immutable"
        return response


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = "There is nothing at this address." if error.detail == "Not Found" else error.detail
    answer = site_of(request).render(request, "error.html", error.status_code, title="Not found", detail=detail)
    answer.headers.update(error.headers or {})
    return answer


def _unreadable(request: Request, error: Exception) -> Response:
    return site_of(request).render(request, "error.html", 503, title="This cannot be read", detail=str(error))
