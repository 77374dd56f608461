"""Every call of the API as data: method, path, what is sent, how the answer is read, whether it may be repeated.

`client.client` and `client.aio` send these, each with its own transport, so that the two cannot differ in what they
ask. A call is repeatable when doing it twice is doing it once: reads, puts, and submits, which always carry a key. It
must not send anything, nor check values the server checks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar, cast
from urllib.parse import quote, urlencode

import msgspec

from penstock.client.errors import bad_input, unreadable
from penstock.domain import limits
from penstock.wire import api, capacity, cost, inventory, solving

T = TypeVar("T")
Query = Mapping[str, str | float | None]
OCTETS = "application/octet-stream"
_ENCODER = msgspec.json.Encoder()


class Request(NamedTuple, Generic[T]):
    """One call. `path` is complete, with its query; `read` turns the body of a good answer into a value."""

    method: str
    path: str
    read: Callable[[bytes], T]
    body: bytes | None = None
    media_type: str = "application/json"
    repeatable: bool = True
    timeout_s: float = limits.CLIENT_CALL_S


class Stream(NamedTuple, Generic[T]):
    """A stream: where it is, and how one message of it is read."""

    path: str
    read: Callable[[bytes], T]
    live: bool = True  #: it follows something that goes on; otherwise it tells what there is, and a caller waits for it


@cache
def _decoder(kind: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def read_as(kind: type[T], path: str) -> Callable[[bytes], T]:
    """A reader of JSON answers that says which call gave an answer it cannot read."""
    decode: Callable[[bytes], T] = _decoder(cast(Hashable, kind)).decode

    def read(body: bytes) -> T:
        try:
            return decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise unreadable(path, error) from error

    return read


def _nothing(_: bytes) -> None:
    return None


def part(field: str, value: str, *, slashes: bool = False) -> str:
    """One part of a path, quoted. What would be another path (empty, `.`, `..`, a slash) is refused here."""
    pieces = value.split("/")
    if any(piece in ("", ".", "..") for piece in pieces) or (len(pieces) > 1 and not slashes):
        raise bad_input(f"{field}: {value!r} is not a name", field=field)
    return quote(value, safe="/" if slashes else "")


def _query(values: Query) -> str:
    given = {
        name: ("true" if value else "false") if isinstance(value, bool) else value
        for name, value in values.items()
        if value is not None
    }
    return "?" + urlencode(given) if given else ""


def _get(path: str, kind: type[T]) -> Request[T]:
    return Request("GET", path, read_as(kind, path))


def _send(method: str, path: str, body: msgspec.Struct, kind: type[T], *, repeatable: bool = True) -> Request[T]:
    return Request(method, path, read_as(kind, path), _ENCODER.encode(body), repeatable=repeatable)


def _job(id: str, *, verb: str = "") -> str:
    return f"/v1/jobs/{part('job', id)}" + (f"/{verb}" if verb else "")


def new_key() -> str:
    """A key no other submit has."""
    return os.urandom(16).hex()


# --- jobs ---
def submit(job: api.JobRequest) -> Request[api.Accepted]:
    if job.idempotency_key is None:
        job = msgspec.structs.replace(job, idempotency_key=new_key())
    return _send("POST", "/v1/jobs", job, api.Accepted)


def submit_batches(jobs: Iterable[api.JobRequest]) -> Iterator[Request[api.BatchAccepted]]:
    """As few batches as the limits allow, in order; each is taken whole or not at all. Jobs without a key get one."""
    stem = new_key()
    batch: list[bytes] = []
    size = 0
    for index, job in enumerate(jobs):
        key = job.idempotency_key or f"{stem}/{index}"
        encoded = _ENCODER.encode(msgspec.structs.replace(job, idempotency_key=key))
        if batch and (len(batch) == limits.BATCH_JOBS_MAX or size + len(encoded) > limits.CLIENT_BATCH_BYTES):
            yield _batch(batch)
            batch, size = [], 0
        batch.append(encoded)
        size += len(encoded) + 1
    if batch:
        yield _batch(batch)


def _batch(jobs: list[bytes]) -> Request[api.BatchAccepted]:
    """The JSON of a `BatchRequest` whose jobs are encoded already: they were, to know their size."""
    path = "/v1/jobs/batch"
    body = b'{"jobs":[' + b",".join(jobs) + b"]}"
    return Request("POST", path, read_as(api.BatchAccepted, path), body, timeout_s=limits.CLIENT_BATCH_S)


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs a list shows; what is None is not filtered by."""

    state: str | None = None
    user: str | None = None
    tag: str | None = None
    since: float | None = None  #: seconds since the epoch
    queue: str | None = None


def page(wanted: Filter, cursor: str | None, limit: int | None) -> Request[api.JobPage]:
    query = {**msgspec.structs.asdict(wanted), "cursor": cursor, "limit": limit}
    return _get("/v1/jobs" + _query(query), api.JobPage)


def get(id: str) -> Request[api.JobView]:
    return _get(_job(id), api.JobView)


def cancel(id: str) -> Request[api.CancelReply]:
    path = _job(id, verb="cancel")
    return Request("POST", path, read_as(api.CancelReply, path))


def again(id: str, verb: str, on: Sequence[str], idempotency_key: str | None) -> Request[api.Accepted]:
    """`verb` is resume or rerun."""
    wanted = api.AgainRequest(on=tuple(on), idempotency_key=idempotency_key or new_key())
    return _send("POST", _job(id, verb=verb), wanted, api.Accepted)


def edit(id: str, priority: int | None, tags: Sequence[str] | None) -> Request[api.JobView]:
    wanted = api.EditRequest(priority=priority, tags=None if tags is None else tuple(tags))
    return _send("PATCH", _job(id), wanted, api.JobView)


def why(id: str) -> Request[api.WhyView]:
    return _get(_job(id, verb="why"), api.WhyView)


def outcome(id: str, wait_s: float | None = None) -> Request[api.Outcome]:
    """With `wait_s` it is answered when the job has ended, or after that time."""
    return _get(_job(id, verb="result") + _query({"wait": wait_s}), api.Outcome)


def waiting_s(call_s: float | None, until: float | None) -> float:
    """How long one call may wait for an end: a try may take half of a call's time, and it shall not be cut off."""
    most = min(limits.RESULT_WAIT_S, (call_s or limits.CLIENT_CALL_S) / 4)
    return round(most if until is None else max(0.0, min(most, until - time.monotonic())), 3)


# --- what happens ---
class EventFilters(TypedDict, total=False):
    """Which events of all: those since a moment, and only those of jobs like these."""

    since: float | None  #: seconds since the epoch
    state: str | None
    user: str | None
    tag: str | None


def _narrowed(filters: EventFilters) -> dict[str, str | float | None]:
    return {name: filters.get(name) for name in ("since", "state", "user", "tag")}  # type: ignore[misc]


def event_page(id: str | None, after: int | None, filters: EventFilters) -> Request[api.EventPage]:
    path = "/v1/events" if id is None else _job(id, verb="events")
    return _get(path + _query({"after": after, **_narrowed(filters)}), api.EventPage)


def event_stream(id: str | None, after: int | None, filters: EventFilters) -> Stream[api.EventView]:
    path = "/v1/events" if id is None else _job(id, verb="events")
    return Stream(path + _query({"after": after, "follow": True, **_narrowed(filters)}), read_as(api.EventView, path))


def log_stream(
    id: str, *, follow: bool, host: int | None, stream: str | None, attempt: str | None, tail: int | None = None
) -> Stream[api.LogChunk]:
    if host is not None and not follow:
        stream = None  # one stream of one host comes as bytes, which have no chunks: the caller picks it out of three
    query: Query = {"host": host, "stream": stream, "attempt": attempt, "follow": follow, "tail": tail}
    path = _job(id, verb="logs")
    return Stream(path + _query(query), read_as(api.LogChunk, path), live=follow)


def log_bytes(id: str, *, host: int, stream: str, attempt: str | None) -> Request[bytes]:
    query: Query = {"host": host, "stream": stream, "attempt": attempt}
    return Request("GET", _job(id, verb="logs") + _query(query), bytes, timeout_s=limits.CLIENT_BYTES_S)


# --- results and artifacts ---
def artifacts(id: str) -> Request[api.ArtifactPage]:
    return _get(_job(id, verb="artifacts"), api.ArtifactPage)


def artifact(id: str, name: str) -> Request[bytes]:
    path = f"{_job(id, verb='artifacts')}/{part('artifact', name, slashes=True)}"
    return Request("GET", path, bytes, timeout_s=limits.CLIENT_BYTES_S)


# --- capacity ---
def pools() -> Request[api.PoolPage]:
    return _get("/v1/pools", api.PoolPage)


def pool(name: str) -> Request[api.PoolView]:
    return _get(f"/v1/pools/{part('pool', name)}", api.PoolView)


def put_pool(name: str, wanted: api.PoolRequest) -> Request[api.PoolView]:
    return _send("PUT", f"/v1/pools/{part('pool', name)}", wanted, api.PoolView)


def delete_pool(name: str) -> Request[None]:
    return Request("DELETE", f"/v1/pools/{part('pool', name)}", _nothing)


def delete_queue(name: str) -> Request[None]:
    return Request("DELETE", f"/v1/queues/{part('queue', name)}", _nothing)


def queues() -> Request[api.QueuePage]:
    return _get("/v1/queues", api.QueuePage)


def queue(name: str) -> Request[api.QueueView]:
    return _get(f"/v1/queues/{part('queue', name)}", api.QueueView)


def put_queue(name: str, wanted: api.QueueRequest) -> Request[api.QueueView]:
    return _send("PUT", f"/v1/queues/{part('queue', name)}", wanted, api.QueueView)


def slices() -> Request[api.SlicePage]:
    return _get("/v1/slices", api.SlicePage)


def preempt(slice: str, notice_s: float) -> Request[None]:
    """Not repeatable: a slice made anew under the same question would be taken as well."""
    body = _ENCODER.encode(api.PreemptRequest(notice_s))
    return Request("POST", f"/v1/slices/{part('slice', slice)}/preempt", _nothing, body, repeatable=False)


def hosts(slice: str) -> Request[capacity.HostPage]:
    return _get(f"/v1/slices/{part('slice', slice)}/hosts", capacity.HostPage)


def replace_slice(slice: str, now: bool) -> Request[capacity.ReplaceReply]:
    return _send(
        "POST", f"/v1/slices/{part('slice', slice)}/replace", capacity.ReplaceRequest(now), capacity.ReplaceReply
    )


def recreate(pool: str) -> Request[capacity.RecreateReply]:
    path = f"/v1/pools/{part('pool', pool)}/recreate"
    return Request("POST", path, read_as(capacity.RecreateReply, path))


def adopt(wanted: capacity.AdoptRequest) -> Request[capacity.AdoptReply]:
    return _send("POST", "/v1/adopt", wanted, capacity.AdoptReply)


def unreached(slice: str, hosts: Sequence[capacity.HostTrouble]) -> Request[None]:
    path = f"/v1/slices/{part('slice', slice)}/unreached"
    return Request("POST", path, _nothing, _ENCODER.encode(capacity.UnreachedRequest(tuple(hosts))))


def zones() -> Request[capacity.ZonePage]:
    return _get("/v1/zones", capacity.ZonePage)


def solve(slice: str, dry_run: bool) -> Request[solving.SolveView]:
    """Repeatable: while a run is under way, another question for it is answered with the same run."""
    return _send("POST", f"/v1/slices/{part('slice', slice)}/solve", solving.SolveRequest(dry_run), solving.SolveView)


def solved(slice: str, run: str, wait_s: float) -> Request[solving.SolveView]:
    path = f"/v1/slices/{part('slice', slice)}/solve" + _query({"run": run, "wait": wait_s})
    return _get(path, solving.SolveView)


def cost_page(by: str, since: float | None, until: float | None, limit: int | None) -> Request[cost.CostPage]:
    return _get("/v1/cost" + _query({"by": by, "since": since, "until": until, "limit": limit}), cost.CostPage)


def job_cost(id: str) -> Request[cost.JobCost]:
    return _get(_job(id, verb="cost"), cost.JobCost)


def _claim(slice: str | None, pool: str | None) -> str:
    return f"/v1/pools/{part('pool', pool)}" if pool is not None else f"/v1/slices/{part('slice', slice or '')}"


def reserve(
    slice: str | None, pool: str | None, wanted: inventory.ReserveRequest
) -> Request[inventory.ReservationView]:
    return _send("PUT", f"{_claim(slice, pool)}/reservation", wanted, inventory.ReservationView)


def release(slice: str | None, pool: str | None) -> Request[None]:
    return Request("DELETE", f"{_claim(slice, pool)}/reservation", _nothing)


# --- secrets, bytes, the server itself ---
def secrets() -> Request[api.SecretPage]:
    return _get("/v1/secrets", api.SecretPage)


def set_secret(name: str, value: str) -> Request[None]:
    body = _ENCODER.encode(api.SecretRequest(value))
    return Request("PUT", f"/v1/secrets/{part('secret', name)}", _nothing, body)


def delete_secret(name: str) -> Request[None]:
    return Request("DELETE", f"/v1/secrets/{part('secret', name)}", _nothing)


def missing_blobs(hashes: Sequence[str]) -> Request[api.MissingReply]:
    return _send("POST", "/v1/blobs/missing", api.MissingRequest(tuple(hashes)), api.MissingReply)


def put_blob(sha256: str, data: bytes) -> Request[None]:
    return Request(
        "PUT",
        f"/v1/blobs/{part('blob', sha256)}",
        _nothing,
        data,
        "application/octet-stream",
        timeout_s=limits.CLIENT_BYTES_S,
    )


def get_blob(sha256: str) -> Request[bytes]:
    return Request("GET", f"/v1/blobs/{part('blob', sha256)}", bytes, timeout_s=limits.CLIENT_BYTES_S)


def put_snapshot(sha256: str, data: bytes) -> Request[None]:
    return Request("PUT", f"/v1/snapshots/{part('snapshot', sha256)}", _nothing, data, timeout_s=limits.CLIENT_BYTES_S)


def clean(wanted: api.CleanRequest) -> Request[api.CleanReply]:
    path = "/v1/clean"
    body = _ENCODER.encode(wanted)
    return Request("POST", path, read_as(api.CleanReply, path), body, timeout_s=limits.CLIENT_BATCH_S)


def maintenance(on: bool) -> Request[api.Maintenance]:
    return _send("POST", "/v1/maintenance", api.Maintenance(on), api.Maintenance)


def server() -> Request[api.ServerView]:
    return _get("/v1/server", api.ServerView)
