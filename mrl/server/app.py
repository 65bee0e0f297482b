"""The routes: `POST /generate/` as TRL's first vLLM server answered it, and `GET /health/`."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from mrl.errors import DataError, MRLError
from mrl.rollouts.base import PolicyClient, SourceSetup
from mrl.rollouts.function.sampling import GenerateBody, RefusedRequest, Sampler, SeedOf, explained
from mrl.server.serving import is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI


def create_app(policy: PolicyClient, setup: SourceSetup, seed_of: SeedOf, *, token: str | None = None) -> FastAPI:
    """An app that samples with `policy`, on the event loop that serves it.

    seed_of: where a request brings no seed. token: what requests have to bring, as `Authorization: Bearer TOKEN`;
    without one they have to be for this machine by name, which those of a web page are not that somebody looks at here.
    """
    from fastapi import Depends, FastAPI, HTTPException, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse

    sampler = Sampler(policy, setup, seed_of)

    async def authorized(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            raise HTTPException(401, "the header `Authorization: Bearer TOKEN` is missing or wrong")
        if token is None and not _is_for_this_machine(request.headers.get("host", "")):
            raise HTTPException(403, "without a token, requests are for 127.0.0.1 or localhost; see serve_token_env")

    async def generate(body: GenerateBody, request: Request) -> JSONResponse:
        try:
            return JSONResponse(await _while_connected(sampler.answer(body), request))
        except (RefusedRequest, DataError) as error:
            raise HTTPException(400, str(error)) from error
        except MRLError as error:
            raise HTTPException(503, f"{type(error).__name__}: {error}") from error

    async def health() -> dict[str, Any]:
        return {"status": "ok", "policy_version": policy.version}

    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": explained(list(error.errors()))}, 422)

    # The annotations are names of this function: FastAPI looks them up in the module.
    generate.__annotations__ |= {"body": GenerateBody, "request": Request}
    authorized.__annotations__["request"] = Request
    app = FastAPI(title="mrl", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(authorized)])
    app.add_api_route("/generate/", generate, methods=["POST"], response_model=None)
    app.add_api_route("/health/", health, methods=["GET"], response_model=None)
    app.add_exception_handler(RequestValidationError, invalid)  # type: ignore[arg-type]
    return app


def _is_for_this_machine(host: str) -> bool:
    """The header `Host`: a page whose name is made to mean 127.0.0.1 says that name."""
    name = re.sub(r":\d*$", "", host).strip("[]")
    return name == "0.0.0.0" or is_loopback(name)


async def _while_connected(work: Coroutine[Any, Any, dict[str, Any]], request: Any) -> dict[str, Any]:
    """What `work` returns. Nobody waits for it once the client has gone: then it is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RefusedRequest("the client has gone")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
