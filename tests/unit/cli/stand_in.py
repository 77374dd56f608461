"""A stand-in for the server: enough of the API for the commands, over real HTTP, with everything it was told on record.

Tests put jobs, outcomes and log chunks in, run a command line, and look at what was sent and printed. Rules of the real
server are not repeated here: the real one is tested with the commands in tests/process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
from typing_extensions import override

from penstock.wire import api, capacity, problems
from penstock.wire.cost import CostPage, JobCost
from penstock.wire.inventory import ReservationView, ReserveRequest

ENDED = ("succeeded", "failed", "cancelled")


def job(id: str = "j0001", state: str = "running", **more: Any) -> api.JobView:
    """A job as the server shows it."""
    known: dict[str, Any] = {
        "name": "train.py",
        "team": "lab",
        "queue": "default",
        "user": "ada",
        "kind": "command",
        "on": ("v5e-8",),
        "slices": 1,
        "created_at": 1_700_000_000.0,
        "version": 1,
    }
    return api.JobView(id=id, state=state, **{**known, **more})


def attempt(id: str = "a0001", **more: Any) -> api.AttemptView:
    known: dict[str, Any] = {
        "replica": 0,
        "fence": 1,
        "stage": 0,
        "state": "running",
        "slices": ("s1",),
        "hosts": 1,
        "created_at": 1_700_000_001.0,
        "started_at": 1_700_000_002.0,
    }
    return api.AttemptView(id=id, **{**known, **more})


def outcome(id: str = "j0001", state: str = "succeeded", cause: str | None = None, **more: Any) -> api.Outcome:
    known: dict[str, Any] = {"exit_code": None, "attempts": 1, "started_at": 10.0, "finished_at": 12.5}
    return api.Outcome(id=id, state=state, cause=cause or state, **{**known, **more})


def chunk(text: str = "", *, stream: str = "out", offset: int = 0, rank: int = 0, **more: Any) -> api.LogChunk:
    return api.LogChunk(attempt="a0001", rank=rank, stream=stream, offset=offset, text=text, **more)


class StandIn:
    """What the server knows, and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.jobs: dict[str, api.JobView] = {}
        self.outcomes: dict[str, api.Outcome] = {}
        self.ending = outcome()  #: how submitted jobs end
        self.logs: list[api.LogChunk] = []
        self.events: list[api.EventView] = []
        self.why = api.WhyView(id="j0001", state="queued", code="no_capacity", sentence="no slice is free", place=3)
        self.pools: dict[str, api.PoolView] = {}
        self.queues: dict[str, api.QueueView] = {}
        self.slices: list[api.SliceView] = []
        self.hosts: dict[str, tuple[capacity.HostView, ...]] = {}
        self.zones: list[capacity.ZoneView] = []
        self.replaced: list[tuple[str, bool]] = []
        self.cost: CostPage | None = None
        self.job_cost: JobCost | None = None
        self.reservations: dict[tuple[str, str], ReserveRequest] = {}  #: (slices or pools, name) -> what was asked
        self.secrets: dict[str, str] = {}
        self.artifacts: dict[str, bytes] = {}
        self.submitted: list[api.JobRequest] = []
        self.asked: list[tuple[str, str]] = []
        self.queries: list[dict[str, str]] = []
        self.blobs: set[str] = set()
        self.snapshots: dict[str, bytes] = {}
        self.cleaned: list[api.CleanReply] = []  #: what calls of `clean` answer, one after the other
        self.cleanings: list[api.CleanRequest] = []
        self.refusals: dict[str, problems.Problem] = {}  #: path -> what is answered instead

    def pool(self, name: str, accelerator: str, **more: Any) -> None:
        known: dict[str, Any] = {
            "team": "lab",
            "provider": "local",
            "zones": ("local",),
            "min": 0,
            "max": 1,
            "spot": False,
            "idle_s": 600.0,
        }
        self.pools[name] = api.PoolView(name=name, accelerator=accelerator, **{**known, **more})

    # --- answers ---
    def answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        self.asked.append((method, path))
        self.queries.append(query)
        if path in self.refusals:
            refusal = self.refusals[path]
            return refusal.status, "application/problem+json", msgspec.json.encode(refusal)
        for pattern, handler in self._routes():
            if (found := re.fullmatch(pattern, f"{method} {path}")) is not None:
                return handler(*found.groups(), query=query, body=body)
        missing = problems.problem("not_found", f"{method} {path} is not here")
        return 404, "application/problem+json", msgspec.json.encode(missing)

    def _routes(self) -> list[tuple[str, Callable[..., tuple[int, str, bytes]]]]:
        return [
            (r"GET /v1/server", self._server),
            (r"POST /v1/jobs", self._submit),
            (r"POST /v1/jobs/batch", self._batch),
            (r"GET /v1/jobs", self._list),
            (r"GET /v1/jobs/([^/]+)", self._job),
            (r"PATCH /v1/jobs/([^/]+)", self._edit),
            (r"POST /v1/jobs/([^/]+)/cancel", self._cancel),
            (r"POST /v1/jobs/([^/]+)/(?:resume|rerun)", self._again),
            (r"GET /v1/jobs/([^/]+)/why", lambda *_, **__: _json(self.why)),
            (r"GET /v1/jobs/([^/]+)/result", self._result),
            (r"GET /v1/jobs/([^/]+)/logs", self._logs),
            (r"GET /v1/jobs/([^/]+)/events", self._events),
            (r"GET /v1/events", lambda **more: self._events("", **more)),
            (r"GET /v1/jobs/([^/]+)/artifacts", self._artifacts),
            (r"GET /v1/jobs/[^/]+/artifacts/(.+)", self._artifact),
            (r"GET /v1/pools", lambda **_: _json(api.PoolPage(tuple(self.pools.values())))),
            (r"GET /v1/pools/([^/]+)", self._pool),
            (r"POST /v1/pools/([^/]+)/recreate", self._recreate),
            (r"PUT /v1/pools/([^/]+)", self._put_pool),
            (r"DELETE /v1/pools/([^/]+)", lambda name, **_: self._drop(self.pools, name)),
            (r"GET /v1/queues", lambda **_: _json(api.QueuePage(tuple(self.queues.values())))),
            (r"PUT /v1/queues/([^/]+)", self._put_queue),
            (r"DELETE /v1/queues/([^/]+)", lambda name, **_: self._drop(self.queues, name)),
            (r"GET /v1/slices/([^/]+)/hosts", lambda id, **_: _json(capacity.HostPage(self.hosts.get(id, ())))),
            (r"POST /v1/slices/([^/]+)/replace", self._replace),
            (r"PUT /v1/(slices|pools)/([^/]+)/reservation", self._reserve),
            (r"DELETE /v1/(slices|pools)/([^/]+)/reservation", self._release),
            (r"GET /v1/cost", lambda **_: _json(self.cost)),
            (r"GET /v1/jobs/([^/]+)/cost", lambda *_, **__: _json(self.job_cost)),
            (r"GET /v1/zones", lambda **_: _json(capacity.ZonePage(tuple(self.zones)))),
            (r"GET /v1/slices", lambda **_: _json(api.SlicePage(tuple(self.slices)))),
            (r"GET /v1/secrets", lambda **_: _json(api.SecretPage(tuple(self.secrets)))),
            (r"PUT /v1/secrets/([^/]+)", self._put_secret),
            (r"DELETE /v1/secrets/([^/]+)", lambda name, **_: self._drop(self.secrets, name)),
            (r"POST /v1/blobs/missing", self._missing),
            (r"PUT /v1/blobs/([^/]+)", self._put_blob),
            (r"PUT /v1/snapshots/([^/]+)", self._put_snapshot),
            (r"POST /v1/clean", self._clean),
        ]

    def _server(self, **_: Any) -> tuple[int, str, bytes]:
        view = api.ServerView(
            version="0", api="v1", leading=True, store="memory", root="memory", principal="ada", team="lab",
            role="operator", started_at=0.0,
        )  # fmt: skip
        return _json(view)

    def _take(self, request: api.JobRequest) -> api.Accepted:
        self.submitted.append(request)
        id = f"j{len(self.submitted):04}"
        self.jobs[id] = job(id, self.ending.state, name=request.name)
        self.outcomes[id] = msgspec.structs.replace(self.ending, id=id)
        return api.Accepted(id=id, state="queued", created=True)

    def _submit(self, *, body: bytes, **_: Any) -> tuple[int, str, bytes]:
        return _json(self._take(msgspec.json.decode(body, type=api.JobRequest)), 201)

    def _batch(self, *, body: bytes, **_: Any) -> tuple[int, str, bytes]:
        requests = msgspec.json.decode(body, type=api.BatchRequest).jobs
        return _json(api.BatchAccepted(tuple(self._take(request) for request in requests)), 201)

    def _list(self, *, query: dict[str, str], **_: Any) -> tuple[int, str, bytes]:
        states = query["state"].split(",") if "state" in query else None
        found = [each for each in self.jobs.values() if states is None or each.state in states]
        return _json(api.JobPage(tuple(found[: int(query.get("limit", 1000))])))

    def _job(self, id: str, **_: Any) -> tuple[int, str, bytes]:
        found = [each for each in self.jobs.values() if each.id.startswith(id)]
        if len(found) != 1:
            code = "ambiguous" if found else "not_found"
            no = problems.problem(code, f"job: {id!r} means {len(found)} jobs")
            return no.status, "application/problem+json", msgspec.json.encode(no)
        return _json(found[0])

    def _edit(self, id: str, *, body: bytes, **_: Any) -> tuple[int, str, bytes]:
        wanted = msgspec.json.decode(body, type=api.EditRequest)
        self.jobs[id] = msgspec.structs.replace(self.jobs[id], tags=wanted.tags or ())
        return _json(self.jobs[id])

    def _cancel(self, id: str, **_: Any) -> tuple[int, str, bytes]:
        if id not in self.jobs:
            no = problems.problem("not_found", f"job: there is no {id!r}")
            return no.status, "application/problem+json", msgspec.json.encode(no)
        return _json(api.CancelReply(id, "cancelling"))

    def _again(self, id: str, **_: Any) -> tuple[int, str, bytes]:
        new = f"{id}x"
        self.jobs[new] = job(new, self.ending.state, parent=id)
        self.outcomes[new] = msgspec.structs.replace(self.ending, id=new)
        return _json(api.Accepted(id=new, state="queued", created=True), 201)

    def _result(self, id: str, **_: Any) -> tuple[int, str, bytes]:
        return _json(self.outcomes.get(id, outcome(id)))

    def _logs(self, _id: str, *, query: dict[str, str], **_: Any) -> tuple[int, str, bytes]:
        wanted = [
            each
            for each in self.logs
            if query.get("stream") in (None, each.stream) and query.get("host") in (None, str(each.rank))
        ]
        return _stream(wanted)

    def _events(self, _id: str, *, query: dict[str, str], **_: Any) -> tuple[int, str, bytes]:
        after = int(query.get("after", 0))
        later = [event for event in self.events if event.seq > after]
        if query.get("follow") == "true":
            return _stream(later)
        return _json(api.EventPage(tuple(later), later[-1].seq if later else after))

    def _artifacts(self, _id: str, **_: Any) -> tuple[int, str, bytes]:
        return _json(api.ArtifactPage(tuple(api.ArtifactView(name=n, attempt="a", fence=1) for n in self.artifacts)))

    def _artifact(self, name: str, **_: Any) -> tuple[int, str, bytes]:
        return 200, "application/octet-stream", self.artifacts[name]

    def _put_pool(self, name: str, *, body: bytes, **_: Any) -> tuple[int, str, bytes]:
        wanted = msgspec.json.decode(body, type=api.PoolRequest)
        shown = {**msgspec.to_builtins(wanted), "name": name, "team": "lab", "race": wanted.race or 1}
        self.pools[name] = msgspec.convert(shown, api.PoolView)
        return _json(self.pools[name])

    def _pool(self, name: str, **_: Any) -> tuple[int, str, bytes]:
        return _json(self.pools[name])

    def _recreate(self, name: str, **_: Any) -> tuple[int, str, bytes]:
        return _json(
            capacity.RecreateReply(
                pool=name, wanted=8, ready=5, coming=1, broken=("tpu-a-1",), retried=("us-central1-b",)
            )
        )

    def _replace(self, id: str, *, body: bytes, **_: Any) -> tuple[int, str, bytes]:
        self.replaced.append((id, msgspec.json.decode(body, type=capacity.ReplaceRequest).now))
        return _json(capacity.ReplaceReply(id=id, state="deleting"))

    def _reserve(self, kind: str, name: str, *, body: bytes, **_: Any) -> tuple[int, str, bytes]:
        asked = msgspec.json.decode(body, type=ReserveRequest)
        self.reservations[kind, name] = asked
        view = ReservationView(of=name, user=asked.user or "ada", since=0.0, until=asked.for_s, note=asked.note)
        return _json(view)

    def _release(self, kind: str, name: str, **_: Any) -> tuple[int, str, bytes]:
        self.reservations.pop((kind, name), None)
        return 204, "application/json", b""

    def _put_queue(self, name: str, *, body: bytes, **_: Any) -> tuple[int, str, bytes]:
        wanted = msgspec.to_builtins(msgspec.json.decode(body, type=api.QueueRequest))
        if wanted["budget"] is not None:
            wanted["budget"]["spent"] = 12.5
        self.queues[name] = msgspec.convert({**wanted, "name": name, "team": "lab"}, api.QueueView)
        return _json(self.queues[name])

    def _put_secret(self, name: str, *, body: bytes, **_: Any) -> tuple[int, str, bytes]:
        self.secrets[name] = msgspec.json.decode(body, type=api.SecretRequest).value
        return 204, "application/json", b""

    def _drop(self, there: dict[str, Any], name: str) -> tuple[int, str, bytes]:
        if there.pop(name, None) is None:
            no = problems.problem("not_found", f"there is no {name!r}")
            return no.status, "application/problem+json", msgspec.json.encode(no)
        return 204, "application/json", b""

    def _clean(self, *, body: bytes, **_: Any) -> tuple[int, str, bytes]:
        self.cleanings.append(msgspec.json.decode(body, type=api.CleanRequest))
        return _json(self.cleaned[len(self.cleanings) - 1])

    def _missing(self, *, body: bytes, **_: Any) -> tuple[int, str, bytes]:
        asked = msgspec.json.decode(body, type=api.MissingRequest).blobs
        return _json(api.MissingReply(tuple(blob for blob in asked if blob not in self.blobs)))

    def _put_blob(self, blob: str, **_: Any) -> tuple[int, str, bytes]:
        self.blobs.add(blob)
        return 204, "application/json", b""

    def _put_snapshot(self, snapshot: str, *, body: bytes, **_: Any) -> tuple[int, str, bytes]:
        self.snapshots[snapshot] = body
        return 204, "application/json", b""


def _json(value: object, status: int = 200) -> tuple[int, str, bytes]:
    return status, "application/json", msgspec.json.encode(value)


def _stream(values: list[Any]) -> tuple[int, str, bytes]:
    lines = [f"id: {number}\ndata: {msgspec.json.encode(value).decode()}\n\n" for number, value in enumerate(values)]
    return 200, "text/event-stream", ("".join(lines) + "event: end\ndata: {}\n\n").encode()


@contextmanager
def serving() -> Iterator[StandIn]:
    """A stand-in that listens on this machine until the block ends."""
    known = StandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, media_type, reply = known.answer(self.command, parts.path, query, body)
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: tests read standard error."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    known.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield known
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
