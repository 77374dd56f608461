"""The sync client: one method per call of the API, and above them `run`, `exec`, `map` and job handles.

What `penstock.Client` is, and what every `tpu` command talks through. Threads may share one. It decides nothing: what
is asked is in `client.calls`, how it is sent in `client.transport`, how results are read in `client.results`. It must
not import server code, nor start a server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack

from penstock.client import calls, wishes
from penstock.client.calls import Filter, Request
from penstock.client.errors import ApiError, JobFailed
from penstock.client.job import JOB_ENDINGS, Job
from penstock.client.results import write_whole
from penstock.client.settings import required
from penstock.client.transport import Transport
from penstock.client.wishes import Isolation, JobOptions
from penstock.domain import limits
from penstock.domain.lifecycle import TERMINAL_JOB_STATES
from penstock.wire import api, capacity, solving
from penstock.wire.api import CommandRequest, JobRequest
from penstock.wire.cost import CostPage, JobCost
from penstock.wire.inventory import ReservationView, ReserveRequest

T = TypeVar("T")


class Client:
    """A connection to Penstock.

    `url` and `token` are found by themselves if left out: the environment (`PENSTOCK_URL`, `PENSTOCK_TOKEN`), then
    `penstock.toml`, then the server that runs on this machine. `timeout_s` bounds each call with all its tries;
    `patience_s` is how long to go on trying while the server is away.

    >>> with Client() as client:
    ...     client.exec("result = sum(numbers)", variables={"numbers": [1, 2, 3]})
    6
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float | None = None,
        patience_s: float = limits.CLIENT_PATIENCE_S,
    ) -> None:
        self.settings = required(url, token)
        self._timeout_s = timeout_s
        self._transport = Transport(self.settings.url, self.settings.token, patience_s=patience_s, timeout_s=timeout_s)

    @property
    def url(self) -> str:
        return self.settings.url

    def close(self) -> None:
        """Close the connections. The client may still be used; it opens new ones."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, request: Request[T]) -> T:
        return self._transport.send(request)

    # --- jobs: what people use ---
    def run(
        self,
        directory: str | os.PathLike[str] | None,
        argv: Sequence[str],
        *,
        on: str | Sequence[str] | None = None,
        setup: str = "",
        **options: Unpack[JobOptions],
    ) -> Job:
        """Submit a command that runs in a frozen copy of `directory` (None: in an empty one); does not wait.

        Only files the server does not have yet are sent; `.gitignore` and `.tpuignore` are respected. `setup` is a
        shell command that runs first, once per environment and host.
        """
        snapshot = None if directory is None else self.upload(directory)
        command = CommandRequest(tuple(argv), snapshot, setup)
        return self.job(self.submit(wishes.job_request(command, on, options)).id)

    def upload(self, directory: str | os.PathLike[str]) -> str:
        """Freeze a directory, send what the server lacks of it; the snapshot's hash."""
        from penstock.client.upload import upload_directory

        return upload_directory(self, Path(directory))

    def start(
        self,
        code: str,
        *,
        variables: Mapping[str, object] | None = None,
        on: str | Sequence[str] | None = None,
        isolation: Isolation = "fork",
        setup: str = "",
        **options: Unpack[JobOptions],
    ) -> Job:
        """Submit a snippet and do not wait. `variables` (JSON values) are in scope; `result` is what it leaves.

        `setup` is a shell command that makes the environment it runs in, once per host: `pip install einops`.
        """
        payload = wishes.snippet(code, variables, isolation, setup)
        return self.job(self.submit(wishes.job_request(payload, on, options)).id)

    def exec(
        self,
        code: str,
        *,
        variables: Mapping[str, object] | None = None,
        on: str | Sequence[str] | None = None,
        isolation: Isolation = "fork",
        setup: str = "",
        wait_s: float | None = None,
        **options: Unpack[JobOptions],
    ) -> object:
        """Run a snippet and return what it left in `result`; JobFailed if it failed.

        After `wait_s` TimeoutError is raised; the job itself goes on (bound it with `timeout_s`).
        """
        return self.start(code, variables=variables, on=on, isolation=isolation, setup=setup, **options).result(wait_s)

    def map(
        self,
        code: str | JobRequest,
        items: Iterable[object],
        *,
        on: str | Sequence[str] | None = None,
        isolation: Isolation = "fork",
        at_most: int | None = None,
        wait_s: float | None = None,
        errors: Literal["raise", "return"] = "raise",
        **options: Unpack[JobOptions],
    ) -> Iterator[object]:
        """Run a snippet once per item, and yield the results in the order of the items.

        An item is the variable `item`; a mapping gives its keys as variables instead. Everything is submitted before
        this returns. A job that failed raises JobFailed at its place; with `errors="return"` it is yielded instead.
        `wait_s` bounds the wait for each next result. A `JobRequest` instead of code is a template for all.
        No more than `at_most` of the jobs are under way at once; the server sees to it, also when the caller is gone.
        """
        template = code
        if isinstance(template, str):
            template = wishes.job_request(wishes.snippet(template, None, isolation), on, options)
        # Every item is checked before the first is sent.
        accepted = self.submit_many(list(wishes.members(template, items, at_most)))
        return self._in_order([one.id for one in accepted], wait_s, errors)

    def _in_order(
        self, ids: Sequence[str], wait_s: float | None, errors: Literal["raise", "return"]
    ) -> Iterator[object]:
        for id in ids:
            try:
                yield self.job(id).result(wait_s)
            except JobFailed as error:
                if errors == "raise":
                    raise
                yield error

    def job(self, id: str) -> Job:
        """A handle of a job; nothing is asked yet."""
        return Job(self, id)

    def jobs(
        self,
        *,
        state: str | None = None,
        user: str | None = None,
        tag: str | None = None,
        since: float | None = None,
        queue: str | None = None,
    ) -> Iterator[api.JobView]:
        """All jobs that fit, newest first, page by page as they are asked for. `since` is seconds since the epoch."""
        cursor: str | None = None
        while True:
            page = self.page(state=state, user=user, tag=tag, since=since, queue=queue, cursor=cursor)
            yield from page.jobs
            cursor = page.next
            if cursor is None:
                return

    def wait(self, id: str, timeout_s: float | None = None) -> api.Outcome:
        """Wait until a job ends, well or not. TimeoutError after `timeout_s`; the job goes on."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # Most jobs that somebody waits for end within one call; a longer one is followed by its events.
            outcome = self._send(calls.outcome(id, calls.waiting_s(self._timeout_s, until)))
            if outcome.state in TERMINAL_JOB_STATES:
                return outcome
            for event in self._follow_events(outcome.id, None, {}, until):
                if event.kind in JOB_ENDINGS:
                    break

    # --- jobs: the calls ---
    def submit(self, job: JobRequest) -> api.Accepted:
        """Take one job in. It gets an idempotency key if it has none, so that trying again never makes two."""
        return self._send(calls.submit(job))

    def submit_many(self, jobs: Iterable[JobRequest]) -> list[api.Accepted]:
        """Take many in, in batches that are taken whole or not at all (10,000 jobs or 16 MiB)."""
        accepted: list[api.Accepted] = []
        for batch in calls.submit_batches(jobs):
            try:
                accepted += self._send(batch).jobs
            except ApiError as error:
                if accepted:
                    error.add_note(f"the {len(accepted)} jobs before were taken in")
                raise
        return accepted

    def page(
        self,
        *,
        state: str | None = None,
        user: str | None = None,
        tag: str | None = None,
        since: float | None = None,
        queue: str | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> api.JobPage:
        """One page of jobs, newest first."""
        wanted = Filter(state=state, user=user, tag=tag, since=since, queue=queue)
        return self._send(calls.page(wanted, cursor, limit))

    def get(self, id: str) -> api.JobView:
        """One job, by its id or a unique start of it."""
        return self._send(calls.get(id))

    def cancel(self, id: str) -> api.CancelReply:
        return self._send(calls.cancel(id))

    def resume(self, id: str, *, on: Sequence[str] = (), idempotency_key: str | None = None) -> api.Accepted:
        """Go on from a finished job's last checkpoint, as a new job."""
        return self._send(calls.again(id, "resume", on, idempotency_key))

    def rerun(self, id: str, *, on: Sequence[str] = (), idempotency_key: str | None = None) -> api.Accepted:
        """Run a finished job's request once more, from nothing."""
        return self._send(calls.again(id, "rerun", on, idempotency_key))

    def edit(self, id: str, *, priority: int | None = None, tags: Sequence[str] | None = None) -> api.JobView:
        return self._send(calls.edit(id, priority, tags))

    def why(self, id: str) -> api.WhyView:
        """Why a job is not running, and what would help."""
        return self._send(calls.why(id))

    def outcome(self, id: str) -> api.Outcome:
        """Where a job stands, and its result or error once it ended. Arrays in it are still references."""
        return self._send(calls.outcome(id))

    def artifacts(self, id: str) -> tuple[api.ArtifactView, ...]:
        """What the attempt that counts left in its output directory."""
        return self._send(calls.artifacts(id)).artifacts

    def artifact(self, id: str, name: str) -> bytes:
        """One artifact in memory; `save_artifact` is for large ones."""
        return self._send(calls.artifact(id, name))

    def save_artifact(self, id: str, name: str, path: str | os.PathLike[str]) -> None:
        """Write one artifact to a file, which appears only when it is whole."""
        write_whole(Path(path), lambda file: self._transport.save(calls.artifact(id, name), file))

    # --- what happens ---
    def events(
        self,
        id: str | None = None,
        *,
        follow: bool = False,
        after: int | None = None,
        **filters: Unpack[calls.EventFilters],
    ) -> Iterator[api.EventView]:
        """Events of one job or of all, after the one with the number `after`, or `since` a moment.

        With `follow` as they happen: those of a job from its first to its last, those of all from now on.
        """
        if follow:
            yield from self._follow_events(id, after, filters)
            return
        while True:
            page = self._send(calls.event_page(id, after, filters))
            yield from page.events
            if page.next == after:
                return
            after = page.next

    def _follow_events(
        self, id: str | None, after: int | None, filters: calls.EventFilters, until: float | None = None
    ) -> Iterator[api.EventView]:
        wanted = calls.event_stream(id, after, filters)
        return self._transport.follow(wanted, complete=lambda: self._ended(id), until=until)

    def _ended(self, id: str | None) -> bool:
        return id is not None and self.get(id).state in TERMINAL_JOB_STATES

    def logs(
        self,
        id: str,
        *,
        follow: bool = False,
        host: int | None = None,
        stream: str | None = None,
        attempt: str | None = None,
        tail: int | None = None,
    ) -> Iterator[api.LogChunk]:
        """What a job's processes wrote, as chunks; `client.results.log_bytes` gives a chunk's bytes.

        All attempts, hosts and streams (`out`, `err`, `log`), in the order they arrived, unless one is named. With
        `follow` until the job ends. `tail`: from about so many bytes before the end of each stream.
        """
        wanted = calls.log_stream(id, follow=follow, host=host, stream=stream, attempt=attempt, tail=tail)
        chunks = self._transport.follow(wanted, complete=lambda: not follow or self._ended(id))
        return (chunk for chunk in chunks if stream in (None, chunk.stream))

    def log_bytes(self, id: str, *, stream: str, host: int = 0, attempt: str | None = None) -> bytes:
        """One stream of one host as it was written, so far."""
        return self._send(calls.log_bytes(id, host=host, stream=stream, attempt=attempt))

    # --- capacity ---
    def pools(self) -> tuple[api.PoolView, ...]:
        return self._send(calls.pools()).pools

    def pool(self, name: str) -> api.PoolView:
        return self._send(calls.pool(name))

    def put_pool(self, name: str, pool: api.PoolRequest) -> api.PoolView:
        """Make a pool, or change it."""
        return self._send(calls.put_pool(name, pool))

    def delete_pool(self, name: str) -> None:
        self._send(calls.delete_pool(name))

    def delete_queue(self, name: str) -> None:
        """Take a queue away; refused while a job is in it that has not ended."""
        self._send(calls.delete_queue(name))

    def queues(self) -> tuple[api.QueueView, ...]:
        return self._send(calls.queues()).queues

    def queue(self, name: str) -> api.QueueView:
        return self._send(calls.queue(name))

    def put_queue(self, name: str, queue: api.QueueRequest) -> api.QueueView:
        return self._send(calls.put_queue(name, queue))

    def slices(self) -> tuple[api.SliceView, ...]:
        return self._send(calls.slices()).slices

    def preempt(self, slice: str, *, notice_s: float = 0.0) -> None:
        """Take a local slice away, as a cloud would."""
        self._send(calls.preempt(slice, notice_s))

    def hosts(self, slice: str) -> tuple[capacity.HostView, ...]:
        """The hosts of a slice and their addresses."""
        return self._send(calls.hosts(slice)).hosts

    def replace_slice(self, slice: str, *, now: bool = False) -> capacity.ReplaceReply:
        """Let a slice go for another; with `now` a job on it goes on elsewhere at once."""
        return self._send(calls.replace_slice(slice, now))

    def recreate(self, pool: str) -> capacity.RecreateReply:
        """Look for what is broken in a pool, and try its resting zones, now."""
        return self._send(calls.recreate(pool))

    def adopt(self, name: str, zone: str, *, own: bool = False) -> capacity.AdoptReply:
        """Take over a TPU that exists; the reply has what its hosts must run."""
        return self._send(calls.adopt(capacity.AdoptRequest(name, zone, own)))

    def unreached(self, slice: str, hosts: Sequence[capacity.HostTrouble]) -> None:
        """Say why hosts of a TPU that is being adopted could not be set up."""
        self._send(calls.unreached(slice, hosts))

    def zones(self) -> tuple[capacity.ZoneView, ...]:
        """What is known of each zone that pools may use."""
        return self._send(calls.zones()).zones

    def solve(self, slice: str, *, dry_run: bool = False) -> solving.SolveView:
        """Have every host of a slice looked at and mended, or only looked at; `solved` tells what came of it."""
        return self._send(calls.solve(slice, dry_run))

    def solved(self, slice: str, run: str, *, wait_s: float = 0.0) -> solving.SolveView:
        """How far that is; with `wait_s` it is answered when it is done, or after that time."""
        return self._send(calls.solved(slice, run, wait_s))

    def cost(
        self, by: str = "job", *, since: float | None = None, until: float | None = None, limit: int | None = None
    ) -> CostPage:
        """Where chip-seconds and money went, by job, user, queue or zone; of the last week unless told."""
        return self._send(calls.cost_page(by, since, until, limit))

    def job_cost(self, id: str) -> JobCost:
        """What one job used, and how often it should save."""
        return self._send(calls.job_cost(id))

    def reserve(
        self,
        slice: str | None = None,
        *,
        pool: str | None = None,
        for_s: float = 43_200.0,
        note: str = "",
        user: str | None = None,
    ) -> ReservationView:
        """Keep a slice, or all of a pool, for one's own jobs; it ends by itself."""
        wanted = ReserveRequest(for_s=for_s, note=note, user=user)
        return self._send(calls.reserve(slice, pool, wanted))

    def release(self, slice: str | None = None, *, pool: str | None = None) -> None:
        """End a reservation."""
        self._send(calls.release(slice, pool))

    # --- secrets, bytes, the server itself ---
    def secrets(self) -> tuple[str, ...]:
        """Names of the team's secrets; values never come back."""
        return self._send(calls.secrets()).names

    def set_secret(self, name: str, value: str) -> None:
        self._send(calls.set_secret(name, value))

    def delete_secret(self, name: str) -> None:
        self._send(calls.delete_secret(name))

    def missing_blobs(self, hashes: Sequence[str]) -> tuple[str, ...]:
        """Which of these the server does not have yet."""
        return self._send(calls.missing_blobs(hashes)).missing

    def put_blob(self, sha256: str, data: bytes) -> None:
        self._send(calls.put_blob(sha256, data))

    def get_blob(self, sha256: str) -> bytes:
        return self._send(calls.get_blob(sha256))

    def put_snapshot(self, sha256: str, data: bytes) -> None:
        self._send(calls.put_snapshot(sha256, data))

    def clean(
        self,
        *,
        older_than_s: float | None = None,
        keep_results: bool = False,
        dry_run: bool = False,
        cursor: str | None = None,
    ) -> api.CleanReply:
        """Remove what jobs left that ended so long ago (None: the server's retention), for administrators.

        One call does a bounded part: call again with `cursor=reply.next` until that is None. With `dry_run` nothing
        goes, and the reply counts what would.
        """
        wanted = api.CleanRequest(older_than_s=older_than_s, keep_results=keep_results, dry_run=dry_run, cursor=cursor)
        return self._send(calls.clean(wanted))

    def maintenance(self, on: bool) -> api.Maintenance:
        """Stop starting anything new, or go on; what runs is left alone either way. For operators."""
        return self._send(calls.maintenance(on))

    def server(self) -> api.ServerView:
        """Who answers, and who the server thinks we are."""
        return self._send(calls.server())
