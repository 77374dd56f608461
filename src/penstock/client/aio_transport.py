"""Sends the same calls as `client.transport`, by the same rules, from an event loop: over httpx2.

Only the async client uses it: importing httpx2 takes longer than most commands. Retries, deadlines, streams and errors
are those of the sync transport, and the tests run against both. Proxy settings of the environment are not read, and no
redirect is followed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import httpx2

from penstock.client.calls import Request, Stream
from penstock.client.errors import PROBLEM_TYPE, ApiError, from_answer
from penstock.client.patience import Patience, may_retry
from penstock.client.sse import END_EVENT, PROBLEM_EVENT, Message, Parser
from penstock.client.transport import body_headers, check_until, fixed_headers, hopeless, unreachable
from penstock.domain import limits

T = TypeVar("T")
BROKEN = (httpx2.TransportError, OSError)


class AsyncTransport:
    """Connections to one server, for one event loop."""

    def __init__(self, url: str, token: str | None, *, patience_s: float, timeout_s: float | None = None) -> None:
        self.url = url
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._http = httpx2.AsyncClient(
            headers=fixed_headers(token),
            trust_env=False,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=limits.CLIENT_CONNECTIONS_AT_REST),
        )

    async def close(self) -> None:
        """Close the connections; the transport cannot be used any more."""
        await self._http.aclose()

    async def send(self, request: Request[T]) -> T:
        """The answer to one call, tried again while that is safe and the call's time is not over."""
        budget = Patience(self._patience_s, self._timeout_s or request.timeout_s)
        while True:
            try:
                return request.read(await self._try(request, budget.attempt_s))
            except ApiError as error:
                again = request.repeatable and may_retry(error)
                rest = budget.rest(error.problem.retry_after_s) if again else None
                if rest is None:
                    raise
            except BROKEN as error:
                rest = budget.rest() if request.repeatable and not _hopeless(error) else None
                if rest is None:
                    raise unreachable(self.url, error) from error
            await asyncio.sleep(rest)

    async def _try(self, request: Request[T], attempt_s: float) -> bytes:
        async with asyncio.timeout(attempt_s):
            response = await self._http.request(
                request.method,
                self.url + request.path,
                content=request.body,
                headers=body_headers(request),
                timeout=httpx2.Timeout(None, connect=limits.CLIENT_CONNECT_S),
            )
        _check(response)
        return response.content

    async def follow(
        self, stream: Stream[T], *, complete: Callable[[], Awaitable[bool]], until: float | None = None
    ) -> AsyncGenerator[T]:
        """The messages of a live stream, over as many connections as it takes; ends as the sync one does."""
        patience_s = max(self._patience_s, limits.CLIENT_STREAM_PATIENCE_S) if stream.live else self._patience_s
        budget = Patience(patience_s)
        last_id: str | None = None
        while True:
            retry_after_s: float | None = None
            broken: Exception = httpx2.RemoteProtocolError("the stream ended before its subject did")
            news = False
            try:
                async with aclosing(self._messages(stream.path, last_id, until)) as messages:
                    async for message in messages:
                        if message.event == END_EVENT:
                            return
                        if message.event == PROBLEM_EVENT:
                            raise from_answer(500, PROBLEM_TYPE, message.data)
                        news = True
                        budget.renew()
                        last_id = message.id if message.id is not None else last_id
                        yield stream.read(message.data)
                if await complete() and not news:
                    return
            except ApiError as error:
                if not may_retry(error):
                    raise
                broken, retry_after_s = error, error.problem.retry_after_s
            except BROKEN as error:
                if _hopeless(error):
                    raise unreachable(self.url, error) from error
                broken = error
            check_until(until, stream.path)
            rest = budget.rest(retry_after_s)
            if rest is None:
                if isinstance(broken, ApiError):
                    raise broken
                raise unreachable(self.url, broken) from broken
            await asyncio.sleep(rest if until is None else max(0.0, min(rest, until - time.monotonic())))

    async def _messages(self, path: str, last_id: str | None, until: float | None) -> AsyncGenerator[Message]:
        """One connection's worth of a stream."""
        parser = Parser()
        headers = {"Accept": "text/event-stream"} | ({} if last_id is None else {"Last-Event-ID": last_id})
        silence_s = limits.CLIENT_STREAM_SILENCE_S
        if until is not None:
            silence_s = max(0.001, min(silence_s, until - time.monotonic()))
        timeout = httpx2.Timeout(silence_s, connect=limits.CLIENT_CONNECT_S)
        async with self._http.stream("GET", self.url + path, headers=headers, timeout=timeout) as response:
            if not response.is_success:
                await response.aread()
                _check(response)
            async for chunk in response.aiter_raw():
                for message in parser.feed(chunk):
                    yield message
                check_until(until, path)


def _check(response: httpx2.Response) -> None:
    if not response.is_success:
        raise from_answer(
            response.status_code,
            response.headers.get("content-type", ""),
            response.content,
            response.headers.get("retry-after"),
        )


def _hopeless(error: BaseException) -> bool:
    """What httpx2 says about a connection hides the reason some levels down."""
    found: BaseException | None = error
    while found is not None:
        if hopeless(found):
            return True
        found = found.__cause__ or found.__context__
    return False
