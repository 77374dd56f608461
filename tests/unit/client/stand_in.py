"""A stand-in for the server: the wire's own structs over real sockets, with faults planted between request and answer.

Tests of both clients talk to it. It keeps jobs by idempotency key, so that a submit sent twice shows; everything it
was asked is in `asked`. A `fault` is taken by the next request it fits: answer something else, or cut the connection
before or after the effect. It must not decide anything a real server would.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from typing_extensions import override

from penstock.wire import api
from penstock.wire.problems import Problem, problem

TOKEN = "a-token"


class Asked(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    connection: int


class Answer(NamedTuple):
    status: int = 200
    body: bytes = b""
    media_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    missing: int = 0  #: bytes that the length promises beyond the body, before the connection is cut


class Cut(NamedTuple):
    """Close the connection: before anything was done, or after it was done but before the answer."""

    after: bool


class Pieces(NamedTuple):
    """A chunked body; `whole` says whether it ends in good order, or is cut off. None waits for the next `proceed`."""

    chunks: tuple[bytes | None, ...]
    whole: bool = True
    media_type: str = "text/event-stream"


Move = Answer | Cut | Pieces


def refusal(code: str, detail: str = "no", *, retry_after_s: float | None = None) -> Answer:
    return said(problem(code, detail, retry_after_s=retry_after_s))


def said(what: Problem) -> Answer:
    return Answer(what.status, msgspec.json.encode(what), "application/problem+json")


def event(id: str, body: msgspec.Struct, kind: str = "message") -> bytes:
    return f"id: {id}\nevent: {kind}\n".encode() + b"data: " + msgspec.json.encode(body) + b"\n\n"


class StandIn:
    """What it knows: jobs, results, artifacts, streams by path."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.faults: deque[tuple[str, Move]] = deque()
        self.jobs: dict[str, tuple[str, api.JobRequest]] = {}  #: by key
        self.outcomes: dict[str, deque[api.Outcome]] = {}  #: by job; the last one stays
        self.artifacts: dict[str, bytes] = {}
        self.streams: dict[str, deque[Pieces]] = {}  #: by path; the last one stays
        self.pages: dict[str, api.JobPage] = {}  #: by cursor
        self.proceed = threading.Semaphore(0)
        self.url = ""
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []

    # --- what tests set up ---
    def fault(self, path: str, *moves: Move) -> None:
        """The next requests to `path` meet these, one each."""
        self.faults.extend((path, move) for move in moves)

    def end(self, job: str, state: str = "succeeded", **more: object) -> None:
        fields: dict[str, object] = {"id": job, "state": state, "cause": state, "exit_code": 0, **more}
        self.outcomes.setdefault(job, deque()).append(msgspec.convert(fields, api.Outcome))

    def sent(self, path: str) -> list[Asked]:
        return [one for one in self.asked if one.path == path]

    # --- what it answers ---
    def new_connection(self, connection: socket.socket) -> int:
        with self._lock:
            self._connections.append(connection)
            return len(self._connections)

    def hang_up(self) -> None:
        """Cut every connection, as the end of a process does."""
        for connection in self._connections:
            with suppress(OSError):  # most are closed already
                connection.shutdown(socket.SHUT_RDWR)

    def answer(self, asked: Asked) -> Move:
        with self._lock:
            self.asked.append(asked)
            planted = self._planted(asked.path)
            if planted is not None and not (isinstance(planted, Cut) and planted.after):
                return planted
            if asked.headers.get("authorization") != f"Bearer {TOKEN}":
                return refusal("unauthenticated")
            done = self._do(asked)
            return planted or done

    def _planted(self, path: str) -> Move | None:
        for place, (wanted, move) in enumerate(self.faults):
            if wanted == path:
                del self.faults[place]
                return move
        return None

    def _do(self, asked: Asked) -> Move:
        match asked.method, asked.path.removeprefix("/v1").strip("/").split("/"):
            case "POST", ["jobs"]:
                accepted = self._submit(msgspec.json.decode(asked.body, type=api.JobRequest))
                return Answer(201, msgspec.json.encode(accepted))
            case "POST", ["jobs", "batch"]:
                batch = msgspec.json.decode(asked.body, type=api.BatchRequest)
                taken = api.BatchAccepted(tuple(self._submit(job) for job in batch.jobs))
                return Answer(201, msgspec.json.encode(taken))
            case "GET", ["jobs"]:
                return Answer(body=msgspec.json.encode(self.pages[asked.query.get("cursor", "")]))
            case "GET", ["jobs", id, "result"]:
                waiting = self.outcomes[id]
                return Answer(body=msgspec.json.encode(waiting.popleft() if len(waiting) > 1 else waiting[0]))
            case "GET", ["jobs", id]:
                return Answer(body=msgspec.json.encode(view(id, self.outcomes[id][-1].state)))
            case "POST", ["jobs", id, "cancel"]:
                return Answer(body=msgspec.json.encode(api.CancelReply(id, "cancelling")))
            case "POST", ["jobs", id, "resume" | "rerun"]:
                return Answer(201, msgspec.json.encode(api.Accepted(id=id + "x", state="queued", created=True)))
            case "GET", ["jobs", _, "artifacts", *name]:
                return Answer(body=self.artifacts[unquote("/".join(name))], media_type="application/octet-stream")
            case "POST", ["slices", _, "preempt"]:
                return Answer(204)
            case "PUT", ["blobs" | "snapshots" | "secrets", _]:
                return Answer(204)
            case "GET", _ if asked.path in self.streams:
                pieces = self.streams[asked.path]
                return pieces.popleft() if len(pieces) > 1 else pieces[0]
            case _:
                return refusal("not_found", f"there is no {asked.path}")

    def _submit(self, job: api.JobRequest) -> api.Accepted:
        key = job.idempotency_key
        assert key is not None, "a submit without a key may make two jobs"
        created = key not in self.jobs
        id = self.jobs.setdefault(key, (f"j{len(self.jobs)}", job))[0]
        return api.Accepted(id=id, state="queued", created=created)


def view(id: str, state: str = "queued") -> api.JobView:
    return api.JobView(
        id=id, name="", team="t", queue="q", user="u", state=state, kind="snippet", on=("v5e-1",), slices=1,
        created_at=0.0, version=1,
    )  # fmt: skip


def _handler(server: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        @override
        def setup(self) -> None:
            super().setup()
            self.number = server.new_connection(self.connection)

        @override
        def log_message(self, format: str, *args: object) -> None:
            return None

        def _any(self) -> None:
            parts = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", "0")))
            query = dict(parse_qsl(parts.query))
            asked = Asked(self.command, unquote(parts.path), query, headers, body, self.number)
            match server.answer(asked):
                case Cut():
                    self._hang_up()
                case Pieces() as pieces:
                    self._stream(pieces)
                case Answer() as answer:
                    self._send(answer)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any  # noqa: N815 (the standard library's names)

        def _send(self, answer: Answer) -> None:
            self.send_response(answer.status)
            if answer.status != 204:
                self.send_header("Content-Type", answer.media_type)
                self.send_header("Content-Length", str(len(answer.body) + answer.missing))
            for name, value in answer.headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)
            if answer.missing:
                self._hang_up()

        def _stream(self, pieces: Pieces) -> None:
            self.send_response(200)
            self.send_header("Content-Type", pieces.media_type)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in pieces.chunks:
                if chunk is None:
                    server.proceed.acquire(timeout=30)
                else:
                    self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            if pieces.whole:
                self.wfile.write(b"0\r\n\r\n")
            else:
                self._hang_up()

        def _hang_up(self) -> None:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    return Handler


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    @override
    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up in the middle are part of the tests."""


@contextmanager
def serving(server: StandIn, port: int = 0) -> Iterator[Callable[[], None]]:
    """Serve on a free port of this machine; the function stops it early."""
    httpd = _Quiet(("127.0.0.1", port), _handler(server))
    server.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def stop() -> None:
        httpd.shutdown()
        server.hang_up()
        httpd.server_close()

    try:
        yield stop
    finally:
        stop()
        thread.join()
