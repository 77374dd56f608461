"""The application: every route of the table behind one door that checks, decodes, calls and answers.

`wiring` serves what `make` builds; so do tests. Whatever goes wrong becomes problem+json in one place (`refused`), with
the same codes everywhere. It must not know what any route does.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import parse_qsl

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as Mounted
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.controller.agents import NotLeading
from penstock.controller.jobs import KeyReused, NotFound
from penstock.domain.admission import BadInput
from penstock.ports.objects import ObjectsError
from penstock.ports.store import Conflict, QuotaFull, Refused, StaleLeader, StoreError, UnknownOutcome
from penstock.server import (
    adoption,
    agents,
    arrivals,
    checkpoints,
    cleaning,
    cost,
    events,
    fleets,
    inventory,
    jobs,
    logs,
    openapi,
    settings,
    solving,
)
from penstock.server.auth import authenticate
from penstock.server.bytes import ROUTES as BYTES_ROUTES
from penstock.server.decoding import Reading
from penstock.server.routing import PATH_PARAMETERS, Call, Events, Raw, Refusal, Reply, Route, Sent
from penstock.server.service import Service
from penstock.wire.problems import Problem, problem

logger = logging.getLogger(__name__)

BODY_PAUSE_S: Final = 30.0  #: a client that sends nothing this long, in the middle of a body, is given up
HEARTBEAT_S: Final = 10.0  #: a comment in silent streams, so that proxies keep them open and dead clients are noticed
RETRY_S: Final = 1.0  #: when the store is away: it is asked again about this often
RECONNECT: Final = b"retry: 1000\n\n"

_encode = msgspec.json.Encoder().encode
_NOSNIFF: Final = {"x-content-type-options": "nosniff"}


def all_routes() -> tuple[Route, ...]:
    return (
        *jobs.ROUTES,
        *settings.ROUTES,
        *fleets.ROUTES,
        *adoption.ROUTES,
        *events.ROUTES,
        *BYTES_ROUTES,
        *logs.ROUTES,
        *agents.ROUTES,
        *arrivals.ROUTES,
        *checkpoints.ROUTES,
        *cleaning.ROUTES,
        *cost.ROUTES,
        *inventory.ROUTES,
        *solving.ROUTES,
    )


def make(service: Service) -> Starlette:
    table = all_routes()
    service.description = openapi.page(table, service.settings.version)
    by_path: dict[str, list[Route]] = {}
    for route in table:
        by_path.setdefault(route.path, []).append(route)
    # Fixed words come before names, and names before rests of a path: the router takes the first that fits.
    ordered = sorted(by_path, key=lambda path: path.replace("{", "\x7f").replace(":path", "\x7f\x7f"))
    app = Starlette(
        routes=[Mounted(path, Door(service, by_path[path])) for path in ordered], lifespan=_lifespan(service)
    )
    app.router.redirect_slashes = False
    app.router.default = _nowhere
    return app


def _lifespan(service: Service):  # type: ignore[no-untyped-def]  # Starlette's type for it is not public
    @asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        yield
        service.stopping.set()
        await service.close_parts()

    return life


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    said = problem("not_found", f"there is no path {scope['path'][:200]!r} here", advice="see /v1/openapi.json")
    await problem_response(said)(scope, receive, send)


class Door:
    """All methods of one path, as an ASGI application."""

    def __init__(self, service: Service, routes: Sequence[Route]) -> None:
        self._service = service
        self._methods = {route.method: _Entry(service, route) for route in routes}
        self._allow = ", ".join(sorted(self._methods))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answer: ASGIApp = await self._answer(request)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets an answer and the log the fault
            answer = refused(error, request)
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        method = request.method
        entry = self._methods.get("GET" if method == "HEAD" else method)
        if entry is None:
            said = problem("method_not_allowed", f"{request.url.path[:200]} has no {method[:20]}; it has {self._allow}")
            return problem_response(said, {"allow": self._allow})
        response = await entry.answer(request)
        if method == "HEAD":
            return Response(status_code=response.status_code, headers=dict(response.headers))
        return response


class _Entry:
    """One route, with what can be made ready before the first request."""

    def __init__(self, service: Service, route: Route) -> None:
        self._service = service
        self._route = route
        self._query = {parameter.name: parameter for parameter in route.query}
        self._required = [parameter.name for parameter in route.query if parameter.required]
        self._path = PATH_PARAMETERS | {parameter.name: parameter for parameter in route.path_rules}
        self._reading: Reading[object] | None = None if route.takes in (None, bytes) else Reading(route.takes)

    async def answer(self, request: Request) -> Response:
        route, service = self._route, self._service
        headers = request.headers
        principal, host = authenticate(service.tokens, service.key, route, headers.get("authorization"))
        params: Mapping[str, str] = request.path_params
        for name, value in params.items():
            self._path[name].check("path", value)
        for parameter in route.headers:
            if (sent := headers.get(parameter.name)) is not None:
                parameter.check("header", sent)
        query = self._checked_query(request.scope["query_string"])
        call = Call(principal, host, params, query, headers, request)
        if route.takes is not None:
            call.body = await self._body(request)
        return respond(service, route, await route.handler(service, call))

    def _checked_query(self, raw: bytes) -> Mapping[str, str]:
        if not raw and not self._required:
            return {}
        query: dict[str, str] = {}
        for name, value in parse_qsl(raw.decode("latin-1"), keep_blank_values=True, max_num_fields=None):
            parameter = self._query.get(name)
            if parameter is None:
                known = ", ".join(self._query) or "none"
                raise Refusal("bad_input", f"query {name[:60]!r}: is not a parameter here; there are: {known}")
            if name in query:
                raise Refusal("bad_input", f"query {name}: is given twice", field=name)
            parameter.check("query", value)
            query[name] = value
        for name in self._required:
            if name not in query:
                raise Refusal("bad_input", f"query {name}: is missing", field=name)
        return query

    async def _body(self, request: Request) -> object:
        route = self._route
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal("unsupported_media_type", "content-encoding: send the body as it is")
        body = await read_body(request, route.body_max)
        if self._reading is None:
            return body
        if not body and route.body_optional:
            return self._reading.decode(b"{}")
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            raise Refusal("unsupported_media_type", f"content-type: {media[:60]!r} is not application/json")
        return self._reading.decode(body)


async def read_body(request: Request, most: int) -> bytes:
    """The whole body, unless it is longer than `most` or stops coming."""
    length = request.headers.get("content-length")
    if length is not None and length.isdigit() and int(length) > most:
        raise _too_large(most)
    pieces: list[bytes] = []
    size = 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_PAUSE_S):
                piece = await anext(stream, None)
        except TimeoutError:
            detail = f"body: nothing came for {BODY_PAUSE_S:g} s after {size} bytes"
            raise Refusal("bad_input", detail, advice="send it again") from None
        if piece is None:
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if piece:
            size += len(piece)
            if size > most:
                raise _too_large(most)
            pieces.append(piece)


def _too_large(most: int) -> Refusal:
    return Refusal("too_large", f"body: is longer than {most} bytes", advice="send less at a time")


# --- good answers ---
def respond(service: Service, route: Route, reply: Reply) -> Response:
    if reply is None:
        return Response(status_code=204)
    if isinstance(reply, Events):
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(frames(service, reply), media_type="text/event-stream", headers=headers)
    if isinstance(reply, Raw):
        headers = {**_NOSNIFF, **reply.headers}
        if isinstance(reply.body, bytes):
            return Response(reply.body, route.status, headers, reply.media_type)
        return StreamingResponse(reply.body, route.status, headers, reply.media_type)
    return Response(_encode(reply), route.status, media_type="application/json")


async def frames(service: Service, reply: Events) -> AsyncIterator[bytes]:
    """The events as text, with comments while nothing happens, until they end or the server stops."""
    source = reply.events
    stopping = asyncio.ensure_future(service.stopping.wait())
    coming: asyncio.Task[Sent | None] | None = None
    try:
        yield RECONNECT
        while True:
            coming = coming or asyncio.ensure_future(_following(source))
            await asyncio.wait((coming, stopping), timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                sent = coming.result()
                coming = None
                if sent is None:
                    return
                yield frame(sent)
            elif stopping.done():
                return
            else:
                yield b": still here\n\n"
    except Exception as error:  # noqa: BLE001 - the status has been sent: the stream itself must say what is wrong
        yield frame(Sent("", "problem", problem_text(_said(error, "stream"))))
    finally:
        stopping.cancel()
        if coming is not None:
            coming.cancel()
            await asyncio.wait((coming,))
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


async def _following(source: AsyncIterator[Sent]) -> Sent | None:
    return await anext(source, None)


def frame(sent: Sent) -> bytes:
    head = f"id: {sent.id}\nevent: {sent.event}\n" if sent.id else f"event: {sent.event}\n"
    return head.encode() + b"data: " + sent.data + b"\n\n"


# --- refusals ---
def refused(error: Exception, request: Request) -> Response:
    said = _said(error, f"{request.method} {request.scope['path']}")
    headers: dict[str, str] = {}
    if said.status == 401:
        headers["www-authenticate"] = "Bearer"
    if said.status == 413:
        # The rest of the body is not wanted; without this it would be read to its end.
        headers["connection"] = "close"
    return problem_response(said, headers)


def problem_response(said: Problem, headers: Mapping[str, str] | None = None) -> Response:
    sent = {**_NOSNIFF, **(headers or {})}
    if said.retry_after_s is not None:
        sent["retry-after"] = str(max(1, math.ceil(said.retry_after_s)))
    return Response(problem_text(said), said.status, sent, "application/problem+json")


def problem_text(said: Problem) -> bytes:
    """A problem as JSON, with its status and code even where they are the struct's defaults."""
    fields = msgspec.structs.asdict(said)
    return _encode({name: value for name, value in fields.items() if value is not None})


def _said(error: Exception, doing: str) -> Problem:
    """What an error means to the caller. What is not expected here is a fault of ours: logged, not shown."""
    match error:
        case Refusal():
            return error.problem
        case BadInput():
            return problem("bad_input", _line(error), field=error.field)
        case NotFound():
            return problem("not_found", _line(error))
        case KeyReused():
            return problem("conflict", _line(error), field="idempotency_key", job=error.job)
        case NotLeading() | StaleLeader():
            return problem("not_leading", "another server leads", advice="ask again", retry_after_s=RETRY_S)
        case Conflict() | Refused() | QuotaFull():
            return problem("conflict", _line(error), advice="read it again and repeat")
        case UnknownOutcome():
            advice = "look whether it happened, or repeat it with the same idempotency key"
            return problem("unavailable", _line(error), advice=advice, retry_after_s=RETRY_S)
        case StoreError() | ObjectsError():
            logger.warning("%s: %s: %s", doing, type(error).__name__, error)
            return problem("unavailable", "the server's storage does not answer", retry_after_s=RETRY_S)
        case _:
            logger.error("%s failed", doing, exc_info=error)
            return problem("fault", "the server failed; its log has the reason", advice="report it with the time")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
