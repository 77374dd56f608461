"""Sends calls over plain `http.client` connections that are kept open, tries again where that is safe, follows streams.

The sync `Client` and every one-shot `tpu` command use it: it loads in a few milliseconds, which httpx2 does not. It may
be used from several threads: each call takes a connection of its own from those at rest. A call is tried again after a
connection error or a 503 only if it is repeatable; a stream that breaks off is resumed from its last id. It follows no
redirect (the token would travel with it) and reads no proxy setting.
"""

from __future__ import annotations

import http.client
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import BinaryIO, TypeVar
from urllib.parse import urlsplit

from penstock import __version__
from penstock.client.calls import Request, Stream
from penstock.client.errors import PROBLEM_TYPE, ApiError, Unreachable, from_answer
from penstock.client.patience import Patience, may_retry
from penstock.client.sse import END_EVENT, PROBLEM_EVENT, Message, Parser
from penstock.domain import limits
from penstock.wire.problems import problem

T = TypeVar("T")
A = TypeVar("A")
CHUNK_BYTES = 1 << 16
ERROR_BYTES_MAX = 1 << 20  #: a problem is a few hundred bytes; whatever else comes is cut here
#: What a failed connection raises, before or after the request was sent.
BROKEN = (OSError, http.client.HTTPException)


def unreachable(url: str, error: object) -> Unreachable:
    """The one line for a server that gave no answer."""
    said = str(error) or type(error).__name__
    return Unreachable(
        problem("unavailable", f"no answer from {url}: {said}", advice="check the address, and that the server is up")
    )


def hopeless(error: BaseException) -> bool:
    """Failures that waiting does not mend: a certificate that does not fit, a host name that does not exist."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    return isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN


def body_headers(request: Request[A]) -> dict[str, str]:
    """What describes the body."""
    if request.body is None:
        return {}
    return {"Content-Type": request.media_type}


def fixed_headers(token: str | None) -> dict[str, str]:
    """What every request says."""
    headers = {
        "User-Agent": f"penstock/{__version__}",
        "Accept": "application/json, */*",
        "Accept-Encoding": "identity",
    }
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return headers


class Transport:
    """Connections to one server."""

    def __init__(self, url: str, token: str | None, *, patience_s: float, timeout_s: float | None = None) -> None:
        parts = urlsplit(url)
        self.url = url
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host = parts.hostname or ""
        self._port = parts.port
        self._prefix = parts.path
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._at_rest: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._headers = fixed_headers(token)

    def close(self) -> None:
        """Close the connections at rest. The transport may still be used; it opens new ones."""
        with self._lock:
            resting, self._at_rest = self._at_rest, []
        for connection in resting:
            connection.close()

    # --- one call, one answer ---
    def send(self, request: Request[T]) -> T:
        """The answer to one call, tried again while that is safe and the call's time is not over."""

        def attempt(attempt_s: float) -> bytes:
            with self._exchange(request, attempt_s) as pieces:
                return b"".join(pieces)

        return request.read(self._insist(request, attempt))

    def save(self, request: Request[bytes], file: BinaryIO) -> None:
        """Write the answer into `file` piece by piece; on a second try from the start again."""

        def attempt(attempt_s: float) -> None:
            file.seek(0)
            file.truncate()
            with self._exchange(request, attempt_s) as pieces:
                file.writelines(pieces)

        self._insist(request, attempt)

    def _insist(self, request: Request[T], attempt: Callable[[float], A]) -> A:
        budget = Patience(self._patience_s, self._timeout_s or request.timeout_s)
        while True:
            try:
                return attempt(budget.attempt_s)
            except ApiError as error:
                again = request.repeatable and may_retry(error)
                rest = budget.rest(error.problem.retry_after_s) if again else None
                if rest is None:
                    raise
            except BROKEN as error:
                rest = budget.rest() if request.repeatable and not hopeless(error) else None
                if rest is None:
                    raise unreachable(self.url, error) from error
            time.sleep(rest)

    @contextmanager
    def _exchange(self, request: Request[T], attempt_s: float) -> Iterator[Iterator[bytes]]:
        """One try: the body of a good answer, piece by piece. The connection goes to rest if all of it was read."""
        ends = time.monotonic() + attempt_s
        connection = self._take()
        response: http.client.HTTPResponse | None = None
        try:
            sock = self._connect(connection, ends)
            response = _ask(connection, request.method, self._prefix + request.path, self._headers, request)
            _check(response)
            yield _pieces(sock, response, ends)
        finally:
            kept = response is not None and _read_whole(response)
            if response is not None:
                response.close()
            self._give_back(connection, kept=kept)

    def _connect(self, connection: http.client.HTTPConnection, ends: float) -> socket.socket:
        """The open socket. It is held beside the connection, which forgets it when the answer says `close`."""
        if connection.sock is None:
            connection.timeout = max(0.001, min(limits.CLIENT_CONNECT_S, ends - time.monotonic()))
            connection.connect()
        sock: socket.socket = connection.sock
        sock.settimeout(max(0.001, ends - time.monotonic()))
        return sock

    def _take(self) -> http.client.HTTPConnection:
        with self._lock:
            while self._at_rest:
                connection = self._at_rest.pop()
                if not _closed_by_peer(connection.sock):
                    return connection
                connection.close()
        return self._make(self._host, self._port, blocksize=CHUNK_BYTES)

    def _give_back(self, connection: http.client.HTTPConnection, *, kept: bool) -> None:
        with self._lock:
            if kept and len(self._at_rest) < limits.CLIENT_CONNECTIONS_AT_REST:
                self._at_rest.append(connection)
                return
        connection.close()

    # --- streams ---
    def follow(self, stream: Stream[T], *, complete: Callable[[], bool], until: float | None = None) -> Iterator[T]:
        """The messages of a live stream, over as many connections as it takes.

        It ends with the server's `end`. A connection that ends in good order without it may only mean that the server
        stops: then the stream is over when `complete` says so and one more connection brings nothing new. `until` (of
        the steady clock) raises TimeoutError.
        """
        patience_s = max(self._patience_s, limits.CLIENT_STREAM_PATIENCE_S) if stream.live else self._patience_s
        budget = Patience(patience_s)
        last_id: str | None = None
        while True:
            retry_after_s: float | None = None
            broken: Exception = http.client.RemoteDisconnected("the stream ended before its subject did")
            news = False
            try:
                for message in self._messages(stream.path, last_id, until):
                    if message.event == END_EVENT:
                        return
                    if message.event == PROBLEM_EVENT:
                        raise from_answer(500, PROBLEM_TYPE, message.data)
                    news = True
                    budget.renew()
                    last_id = message.id if message.id is not None else last_id
                    yield stream.read(message.data)
                if complete() and not news:
                    return
            except ApiError as error:
                if not may_retry(error):
                    raise
                broken, retry_after_s = error, error.problem.retry_after_s
            except BROKEN as error:
                if hopeless(error):
                    raise unreachable(self.url, error) from error
                broken = error
            check_until(until, stream.path)
            rest = budget.rest(retry_after_s)
            if rest is None:
                if isinstance(broken, ApiError):
                    raise broken
                raise unreachable(self.url, broken) from broken
            time.sleep(rest if until is None else max(0.0, min(rest, until - time.monotonic())))

    def _messages(self, path: str, last_id: str | None, until: float | None) -> Iterator[Message]:
        """One connection's worth of a stream."""
        parser = Parser()
        headers = {**self._headers, "Accept": "text/event-stream"}
        if last_id is not None:
            headers["Last-Event-ID"] = last_id
        connection = self._make(self._host, self._port, timeout=limits.CLIENT_CONNECT_S)
        with closing(connection):
            connection.connect()
            sock = connection.sock
            _quiet_until(sock, until)
            response = _ask(connection, "GET", self._prefix + path, headers, None)
            with closing(response):
                _check(response)
                while True:
                    _quiet_until(sock, until)
                    chunk = response.read1(CHUNK_BYTES)
                    if not chunk:
                        return
                    yield from parser.feed(chunk)


def _ask(
    connection: http.client.HTTPConnection, method: str, path: str, headers: dict[str, str], request: Request[T] | None
) -> http.client.HTTPResponse:
    body: bytes | None = None
    if request is not None:
        body = request.body
        headers = {**headers, **body_headers(request)}
    # A server that refuses a body (too large, no token) may answer and close before it has read all of it.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.request(method, path, body, headers)
    return connection.getresponse()


def _check(response: http.client.HTTPResponse) -> None:
    if not 200 <= response.status < 300:
        body = response.read(ERROR_BYTES_MAX)
        raise from_answer(
            response.status, response.getheader("Content-Type", ""), body, response.getheader("Retry-After")
        )


def _pieces(sock: socket.socket, response: http.client.HTTPResponse, ends: float) -> Iterator[bytes]:
    """The body; each piece may take what is left of the try, so that a trickle cannot last for ever."""
    while True:
        sock.settimeout(max(0.001, ends - time.monotonic()))
        piece = response.read1(CHUNK_BYTES)
        if not piece:
            break
        yield piece
    if response.length:  # the connection ended before the body did, which `read1` does not say
        raise http.client.IncompleteRead(b"", response.length)


def _read_whole(response: http.client.HTTPResponse) -> bool:
    """Whether nothing of the answer is left on the connection, so that the next one can use it."""
    over = response.length == 0 or (response.isclosed() and not response.length)
    return over and not response.will_close


def _closed_by_peer(sock: socket.socket) -> bool:
    """A connection at rest has nothing to read, unless the server closed it meanwhile."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _quiet_until(sock: socket.socket, until: float | None) -> None:
    left = math.inf if until is None else until - time.monotonic()
    sock.settimeout(max(0.001, min(limits.CLIENT_STREAM_SILENCE_S, left)))


def check_until(until: float | None, path: str) -> None:
    """Raise TimeoutError once the time a caller gave is over."""
    if until is not None and time.monotonic() >= until:
        raise TimeoutError(f"{path} has not ended in the given time")
