"""The routes of the server, and what holds for all of them: keys, bounds, errors.

Starlette routes and answers (https://www.starlette.io); nothing of HTTP is written here.
"""

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jax_specdec.engine import Engine
from jax_specdec.export import metrics
from jax_specdec.serve import parse_request
from jax_specdec.serve.errors import ApiError
from jax_specdec.serve.model import ServedModel
from jax_specdec.serve.openapi import description
from jax_specdec.serve.runs import Run

logger = logging.getLogger("jax_specdec.serve")

Reader = Callable[[Any, ServedModel], parse_request.ParsedRequest]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What one client may take from the others.

    Attributes:
      max_body: bytes of a body.
      max_open: requests that are answered at once.
      timeout: seconds of one request; None for no limit.
    """

    max_body: int = 1 << 24
    max_open: int = 1024
    timeout: float | None = 600.0


class Service:
    """The server's answers, made by an engine.

    Attributes:
      draining: no request is taken any more.
    """

    def __init__(
        self, engine: Engine, model: ServedModel, *, bounds: Bounds, api_key: str = ""
    ) -> None:
        """Answer by `engine` and `model`.

        Args:
          api_key: what clients must send as a bearer token below /v1; empty: nothing.
        """
        self.draining = False
        self._engine, self._model, self._bounds = engine, model, bounds
        self._api_key = api_key.encode()
        self._open = 0

    @property
    def app(self) -> Starlette:
        """The application, for a server of ASGI."""
        routes = [
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._one_model), methods=["GET"]),
            Route("/v1/completions", self._tokens(parse_request.completion), methods=["POST"]),
            Route("/v1/chat/completions", self._tokens(parse_request.chat), methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/openapi.json", self._description, methods=["GET"]),
        ]
        handlers: Any = {ApiError: _answer, HTTPException: _answer_of_http, Exception: _answer_any}
        return Starlette(routes=routes, exception_handlers=handlers)

    def _guarded(
        self, endpoint: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint for those who know the key."""

        async def guarded(request: Request) -> Response:
            if self._api_key:
                given = request.headers.get("authorization", "")
                scheme, _, token = given.partition(" ")
                known = hmac.compare_digest(token.strip().encode(), self._api_key)
                if scheme.lower() != "bearer" or not known:
                    raise ApiError(
                        401,
                        "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                        code="invalid_api_key",
                    )
            return await endpoint(request)

        return guarded

    def _tokens(self, read: Reader) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of one format."""

        async def endpoint(request: Request) -> Response:
            if self._open >= self._bounds.max_open:
                raise ApiError(
                    429,
                    f"{self._open} requests are open, as many as may (--max-open): try again later",
                    code="too_many_requests",
                )
            with contextlib.ExitStack() as open_:
                self._open += 1
                open_.callback(self._close_one)
                body = await self._body(request)
                # Text to tokens may take a while, for a long prompt.
                wanted = await asyncio.to_thread(lambda: read(_json(body), self._model))
                run = Run(self._engine, self._model, wanted, timeout=self._bounds.timeout)
                open_.enter_context(run)
                if wanted.stream:
                    return _Events(run, open_.pop_all())
                return JSONResponse(await _unless_gone(request, run.answer()))

        return self._guarded(endpoint)

    def _close_one(self) -> None:
        self._open -= 1

    async def _body(self, request: Request) -> bytes:
        """A body that is neither too large nor too slow."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, f"content-type is {kind!r} and must be application/json")
        most, parts, size = self._bounds.max_body, [], 0
        try:
            async with asyncio.timeout(self._bounds.timeout):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise ApiError(
                            413,
                            f"the body has more than {most} bytes (--max-body)",
                            code="too_large",
                        )
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, "the body did not come in time (--timeout)") from None
        except ClientDisconnect:
            raise ApiError(408, "the client has left", code="client_left") from None
        return b"".join(parts)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model.listed]})

    async def _one_model(self, request: Request) -> Response:
        self._model.check_name(request.path_params["name"])
        return JSONResponse(self._model.listed)

    async def _health(self, _: Request) -> Response:
        health = self._engine.health()
        if not health.alive:
            status = "failed"
        elif self.draining:
            status = "draining"
        else:
            status = "ready" if health.ready else "loading"
        workers = [list(one.phase) for one in self._engine.status]
        answer = {"status": status, "problems": list(health.problems), "workers": workers}
        return JSONResponse(answer, 200 if status == "ready" else 503)

    async def _metrics(self, _: Request) -> Response:
        engine = self._engine
        page = metrics.status_text(engine.status, engine.timings)
        page += metrics.queue_text(engine.num_waiting)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    async def _description(self, _: Request) -> Response:
        return JSONResponse(description(keyed=bool(self._api_key)))


class _Events(StreamingResponse):
    """An answer in chunks."""

    def __init__(self, run: Run, open_: contextlib.ExitStack) -> None:
        """Send what `run` brings, and close `open_` at the end, whether it was begun or not."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(run.events(), media_type="text/event-stream", headers=headers)
        self._open = open_

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._open, contextlib.suppress(ClientDisconnect):
            await super().__call__(scope, receive, send)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


async def _unless_gone(request: Request, answer: Awaitable[Any]) -> Any:
    """The answer, given up where the client leaves.

    Raises:
      ApiError: the client has left; nobody reads it.
    """
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(408, "the client has left", code="client_left")
        return work.result()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer(_: Request, error: ApiError) -> Response:
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.body, error.status, headers)


async def _answer_of_http(request: Request, error: HTTPException) -> Response:
    said = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(said.body, error.status_code, error.headers)


async def _answer_any(_: Request, error: Exception) -> Response:
    logger.exception("an error of the server", exc_info=error)
    return JSONResponse(ApiError(500, f"an error of the server: {error}").body, 500)
