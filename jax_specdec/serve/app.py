"""The routes of the server, and what holds for all of them: keys, bounds, errors.

A stranger who has no key gets as far as `gate.py` and a comparison of keys.

Starlette routes and answers (https://www.starlette.io); nothing of HTTP is written here.
"""

import asyncio
import contextlib
import functools
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jax_specdec.engine import Engine
from jax_specdec.engine import Request as EngineRequest
from jax_specdec.engine.errors import EngineFull, RequestError
from jax_specdec.export import metrics
from jax_specdec.serve import parse_request
from jax_specdec.serve.bodies import Bodies, parsed
from jax_specdec.serve.bounds import BODIES, Bounds
from jax_specdec.serve.connection import EVENTS
from jax_specdec.serve.errors import MAX_SHOWN, ApiError, shown, unfit
from jax_specdec.serve.fields import Chat
from jax_specdec.serve.gate import Gate, Traffic
from jax_specdec.serve.model import ServedModel
from jax_specdec.serve.openapi import description
from jax_specdec.serve.runs import PART, Run, in_parts
from jax_specdec.serve.tools import STRUCTURE_FIELDS, schema_errors

logger = logging.getLogger("jax_specdec.serve")

Reader = Callable[[Any, ServedModel, Bounds], parse_request.ParsedRequest]
SMALL = 1 << 16  # bytes of a body that is read beside others


class Service:
    """The server's answers, made by an engine.

    Attributes:
      bounds: what clients may take.
      traffic: numbers of requests and connections.
      draining: no request for tokens is taken any more.
      num_open: requests that are answered now, their bodies having come.
    """

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        *,
        bounds: Bounds,
        api_key: str = "",
        access_log: bool = False,
    ) -> None:
        """Answer by `engine` and `model`.

        Args:
          api_key: what clients must send as a bearer token below /v1; empty: nothing.
          access_log: log a line for each answer.
        """
        self._access_log = access_log
        self.bounds, self.traffic = bounds, Traffic()
        self.draining, self.num_open = False, 0
        self._engine, self._model = engine, model
        self._api_key = api_key.encode()
        body_bytes = bounds.body_bytes(model.max_length)
        self.bodies = Bodies(
            bytes_each=body_bytes, together=BODIES * body_bytes, seconds=bounds.client_timeout
        )
        self._large_bodies = asyncio.Lock()  # held by the one that is read
        self._turn = asyncio.Lock()
        self._described = description(
            keyed=bool(api_key), bounds=bounds, max_length=model.max_length
        )

    @property
    def app(self) -> Starlette:
        """The application, for a server of ASGI."""
        routes = [
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._one_model), methods=["GET"]),
            Route(
                "/v1/completions", self._tokens(parse_request.parse_completion), methods=["POST"]
            ),
            Route("/v1/chat/completions", self._tokens(parse_request.parse_chat), methods=["POST"]),
            Route("/health", self._in_turn(self._health), methods=["GET"]),
            Route("/livez", self._in_turn(self._live), methods=["GET"]),
            Route("/metrics", self._in_turn(self._metrics), methods=["GET"]),
            Route("/openapi.json", self._in_turn(self._description), methods=["GET"]),
        ]
        paths = [route.path for route in routes]
        handlers: Any = {
            ApiError: _answer,
            HTTPException: functools.partial(_answer_of_http, paths),
            Exception: _answer_any,
        }
        gate = Middleware(
            Gate,
            bounds=self.bounds,
            traffic=self.traffic,
            paths=frozenset(paths),
            log=self._access_log,
        )
        return Starlette(routes=routes, exception_handlers=handlers, middleware=[gate])

    def _in_turn(
        self, endpoint: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint for everybody, once in each round of the event loop."""

        async def in_turn(request: Request) -> Response:
            async with self._turn:
                await asyncio.sleep(0)
                return await endpoint(request)

        return in_turn

    def _guarded(
        self, endpoint: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint for those who know the key."""

        async def guarded(request: Request) -> Response:
            if self._api_key and not self._knows_key(request):
                raise ApiError(
                    401,
                    "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                )
            return await endpoint(request)

        return guarded

    def _knows_key(self, request: Request) -> bool:
        """Whether the server has a key, and the request too."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(token.strip().encode(), self._api_key)
        return bool(self._api_key) and same and scheme.lower() == "bearer"

    def _tokens(self, read: Reader) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of one format."""

        async def endpoint(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json" and not kind.endswith("+json"):
                raise ApiError(415, f"content-type is {kind[:80]!r} and must be application/json")
            coding = request.headers.get("content-encoding", "identity").strip().lower()
            if coding != "identity":
                raise ApiError(415, f"content-encoding is {coding[:80]!r}: send the body as it is")
            self._check_room()
            with contextlib.ExitStack() as open_:
                async with self.bodies.received(request) as body:
                    self._check_room()  # others may have come meanwhile
                    self.num_open += 1
                    open_.callback(self._close_one)
                    parsed_body = await self._read(body, read)
                    if (param := _structured_by(parsed_body)) is not None:
                        with schema_errors(parsed_body.body):
                            await self._check(request, parsed_body.requests[0], param)
                run = Run(self._engine, self._model, parsed_body, timeout=self.bounds.timeout)
                open_.enter_context(run)
                if parsed_body.body.stream:
                    request.scope.setdefault("state", {})[EVENTS] = True
                    return _Parts(run.events(), open_.pop_all(), "text/event-stream")
                answer = await _unless_gone(request, run.answer())
                response = await asyncio.to_thread(JSONResponse, answer)
                if len(response.body) < PART:
                    return response
                return _Parts(in_parts(bytes(response.body)), open_.pop_all(), "application/json")

        return self._guarded(endpoint)

    def _check_room(self) -> None:
        """Refuse a request where no more may be open."""
        if self.draining:
            raise ApiError(503, "the server ends: it takes no more requests", code="draining")
        if self.num_open >= self.bounds.max_open:
            raise ApiError(
                429,
                f"{self.num_open} requests are open, as many as may (--max-open): try again later",
                code="too_many_requests",
            )

    def _close_one(self) -> None:
        self.num_open -= 1

    async def _read(self, body: bytes, read: Reader) -> parse_request.ParsedRequest:
        """Read a body in a thread, as text to tokens may take a while."""

        def work() -> parse_request.ParsedRequest:
            return read(parsed(body), self._model, self.bounds)

        if len(body) <= SMALL:
            parsed_body = await asyncio.to_thread(work)
        else:
            async with self._large_bodies:  # its values take many times its bytes
                parsed_body = await asyncio.to_thread(work)
        effort = parsed_body.body.reasoning_effort if isinstance(parsed_body.body, Chat) else None
        if effort is not None:
            logger.info("reasoning_effort = %s has no effect here", shown(effort))
        return parsed_body

    async def _check(self, http_request: Request, request: EngineRequest, param: str) -> None:
        """Refuse a request that the engine would; its structure is compiled for that.

        That happens in a process of its own, and ends where the client leaves.

        Args:
          http_request: the request of HTTP.
          request: one of its choices; their structures are the same.
          param: the field that says what its text must be.

        Raises:
          ApiError: it cannot be served, or not now.
        """
        try:
            await _unless_gone(http_request, self._engine.check_async(request))
        except RequestError as error:
            raise unfit(param, str(error), code="unsupported_value") from error
        except EngineFull as error:
            raise ApiError(429, str(error), code="too_many_requests") from error

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model.listed]})

    async def _one_model(self, request: Request) -> Response:
        self._model.check_name(request.path_params["name"])
        return JSONResponse(self._model.listed)

    async def _health(self, request: Request) -> Response:
        health = self._engine.health()
        if not health.alive:
            status = "failed"
        elif self.draining:
            status = "draining"
        else:
            status = "ready" if health.ready else "loading"
        workers = [list(worker.phase) for worker in self._engine.status]
        # Problems have paths and tracebacks.
        has_key = self._knows_key(request) or not health.problems
        problems = list(health.problems) if has_key else ["the server's log says more"]
        answer = {"status": status, "problems": problems, "workers": workers}
        return JSONResponse(answer, 200 if status == "ready" else 503)

    async def _live(self, _: Request) -> Response:
        """Whether this process should go on: it may load, compile or drain."""
        alive = self._engine.health().alive
        return JSONResponse({"status": "alive" if alive else "failed"}, 200 if alive else 503)

    async def _metrics(self, _: Request) -> Response:
        engine = self._engine
        page = metrics.build_text(model=self._model.name)
        page += metrics.status_text(engine.status, engine.timings, engine.ended_without_slot)
        traffic, waiting = self.traffic, engine.num_waiting
        page += metrics.http_text(
            traffic.answers, traffic.ended, self.num_open, traffic.connections, waiting
        )
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    async def _description(self, _: Request) -> Response:
        return JSONResponse(self._described)


class _Parts(StreamingResponse):
    """An answer in parts."""

    def __init__(
        self, parts: AsyncIterator[bytes], open_: contextlib.ExitStack, media_type: str
    ) -> None:
        """Send the parts, and close `open_` at the end, whether they were begun or not."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(parts, media_type=media_type, headers=headers)
        self._open = open_

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._open, contextlib.suppress(ClientDisconnect):
            await super().__call__(scope, receive, send)


def _structured_by(parsed: parse_request.ParsedRequest) -> str | None:
    """The field that says what an answer's text must be; None where none does."""
    if parsed.requests[0].params.structured is None:
        return None
    return next(name for name in STRUCTURE_FIELDS if getattr(parsed.body, name, None))


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


async def _answer_of_http(paths: Sequence[str], request: Request, error: HTTPException) -> Response:
    detail = error.detail
    if error.status_code == 404:
        detail += f"; there are {', '.join(paths)}"
    elif error.status_code == 405:
        detail += f"; allowed is {(error.headers or {}).get('Allow', 'another method')}"
    api_error = ApiError(
        error.status_code, f"{request.method} {request.url.path[:MAX_SHOWN]}: {detail}"
    )
    return JSONResponse(api_error.body, error.status_code, error.headers)


async def _answer_any(_: Request, error: Exception) -> Response:
    logger.exception("an error of the server", exc_info=error)
    return JSONResponse(ApiError(500, "an error of the server: its log says more").body, 500)
