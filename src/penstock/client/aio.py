"""The async client: the methods of `client.client.Client` by the same names, for one event loop, over httpx2.

What `penstock.AsyncClient` is. It is imported only when it is asked for, because httpx2 takes longer to import than
most commands take. It decides nothing: what is asked is in `client.calls`, how it is sent in `client.aio_transport`. A
test compares its methods with those of the sync client.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack

from penstock.client import calls, wishes
from penstock.client.aio_transport import AsyncTransport
from penstock.client.calls import Filter, Request
from penstock.client.errors import ApiError, JobFailed
from penstock.client.job import JOB_ENDINGS, AsyncJob
from penstock.client.results import write_whole
from penstock.client.settings import required
from penstock.client.wishes import Isolation, JobOptions
from penstock.domain import limits
from penstock.domain.lifecycle import TERMINAL_JOB_STATES
from penstock.wire import api, capacity, solving
from penstock.wire.api import CommandRequest, JobRequest
from penstock.wire.cost import CostPage, JobCost
from penstock.wire.inventory import ReservationView, ReserveRequest

T = TypeVar("T")


class AsyncClient:
    """A connection to Penstock.

    `url` and `token` are found by themselves if left out: the environment (`PENSTOCK_URL`, `PENSTOCK_TOKEN`), then
    `penstock.toml`, then the server that runs on this machine. `timeout_s` bounds each call with all its tries;
    `patience_s` is how long to go on trying while the server is away.

    >>> async with AsyncClient() as client:
    ...     await client.exec("result = sum(numbers)", variables={"numbers": [1, 2, 3]})
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
        self._transport = AsyncTransport(
            self.settings.url, self.settings.token, patience_s=patience_s, timeout_s=timeout_s
        )

    @property
    def url(self) -> str:
        return self.settings.url

    async def close(self) -> None:
        """Close the connections. The client cannot be used any more."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(self, request: Request[T]) -> T:
        return await self._transport.send(request)

    # --- jobs: what people use ---
    async def run(
        self,
        directory: str | os.PathLike[str] | None,
        argv: Sequence[str],
        *,
        on: str | Sequence[str] | None = None,
        setup: str = "",
        **options: Unpack[JobOptions],
    ) -> AsyncJob:
        """Submit a command that runs in a frozen copy of `directory` (None: in an empty one); does not wait.

        Only files the server does not have yet are sent; `.gitignore` and `.tpuignore` are respected. `setup` is a
        shell command that runs first, once per environment and host.
        """
        snapshot = None if directory is None else await self.upload(directory)
        command = CommandRequest(tuple(argv), snapshot, setup)
        return self.job((await self.submit(wishes.job_request(command, on, options))).id)

    async def upload(self, directory: str | os.PathLike[str]) -> str:
        """Freeze a directory, send what the server lacks of it; the snapshot's hash."""
        from penstock.client.upload import upload_directory_async

        return await upload_directory_async(self, Path(directory))

    async def start(
        self,
        code: str,
        *,
        variables: Mapping[str, object] | None = None,
        on: str | Sequence[str] | None = None,
        isolation: Isolation = "fork",
        setup: str = "",
        **options: Unpack[JobOptions],
    ) -> AsyncJob:
        """Submit a snippet and do not wait. `variables` (JSON values) are in scope; `result` is what it leaves.

        `setup` is a shell command that makes the environment it runs in, once per host: `pip install einops`.
        """
        payload = wishes.snippet(code, variables, isolation, setup)
        return self.job((await self.submit(wishes.job_request(payload, on, options))).id)

    async def exec(
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
        job = await self.start(code, variables=variables, on=on, isolation=isolation, setup=setup, **options)
        return await job.result(wait_s)

    async def map(
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
    ) -> AsyncIterator[object]:
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
        accepted = await self.submit_many(list(wishes.members(template, items, at_most)))
        return self._in_order([one.id for one in accepted], wait_s, errors)

    async def _in_order(
        self, ids: Sequence[str], wait_s: float | None, errors: Literal["raise", "return"]
    ) -> AsyncIterator[object]:
        for id in ids:
            try:
                yield await self.job(id).result(wait_s)
            except JobFailed as error:
                if errors == "raise":
                    raise
                yield error

    def job(self, id: str) -> AsyncJob:
        """A handle of a job; nothing is asked yet."""
        return AsyncJob(self, id)

    async def jobs(
        self,
        *,
        state: str | None = None,
        user: str | None = None,
        tag: str | None = None,
        since: float | None = None,
        queue: str | None = None,
    ) -> AsyncIterator[api.JobView]:
        """All jobs that fit, newest first, page by page as they are asked for. `since` is seconds since the epoch."""
        cursor: str | None = None
        while True:
            page = await self.page(state=state, user=user, tag=tag, since=since, queue=queue, cursor=cursor)
            for job in page.jobs:
                yield job
            cursor = page.next
            if cursor is None:
                return

    async def wait(self, id: str, timeout_s: float | None = None) -> api.Outcome:
        """Wait until a job ends, well or not. TimeoutError after `timeout_s`; the job goes on."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            outcome = await self._send(calls.outcome(id, calls.waiting_s(self._timeout_s, until)))
            if outcome.state in TERMINAL_JOB_STATES:
                return outcome
            async with aclosing(self._follow_events(outcome.id, None, {}, until)) as events:
                async for event in events:
                    if event.kind in JOB_ENDINGS:
                        break

    # --- jobs: the calls ---
    async def submit(self, job: JobRequest) -> api.Accepted:
        """Take one job in. It gets an idempotency key if it has none, so that trying again never makes two."""
        return await self._send(calls.submit(job))

    async def submit_many(self, jobs: Iterable[JobRequest]) -> list[api.Accepted]:
        """Take many in, in batches that are taken whole or not at all (10,000 jobs or 16 MiB)."""
        accepted: list[api.Accepted] = []
        for batch in calls.submit_batches(jobs):
            try:
                accepted += (await self._send(batch)).jobs
            except ApiError as error:
                if accepted:
                    error.add_note(f"the {len(accepted)} jobs before were taken in")
                raise
        return accepted

    async def page(
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
        return await self._send(
            calls.page(Filter(state=state, user=user, tag=tag, since=since, queue=queue), cursor, limit)
        )

    async def get(self, id: str) -> api.JobView:
        """One job, by its id or a unique start of it."""
        return await self._send(calls.get(id))

    async def cancel(self, id: str) -> api.CancelReply:
        return await self._send(calls.cancel(id))

    async def resume(self, id: str, *, on: Sequence[str] = (), idempotency_key: str | None = None) -> api.Accepted:
        """Go on from a finished job's last checkpoint, as a new job."""
        return await self._send(calls.again(id, "resume", on, idempotency_key))

    async def rerun(self, id: str, *, on: Sequence[str] = (), idempotency_key: str | None = None) -> api.Accepted:
        """Run a finished job's request once more, from nothing."""
        return await self._send(calls.again(id, "rerun", on, idempotency_key))

    async def edit(self, id: str, *, priority: int | None = None, tags: Sequence[str] | None = None) -> api.JobView:
        return await self._send(calls.edit(id, priority, tags))

    async def why(self, id: str) -> api.WhyView:
        """Why a job is not running, and what would help."""
        return await self._send(calls.why(id))

    async def outcome(self, id: str) -> api.Outcome:
        """Where a job stands, and its result or error once it ended. Arrays in it are still references."""
        return await self._send(calls.outcome(id))

    async def artifacts(self, id: str) -> tuple[api.ArtifactView, ...]:
        """What the attempt that counts left in its output directory."""
        return (await self._send(calls.artifacts(id))).artifacts

    async def artifact(self, id: str, name: str) -> bytes:
        """One artifact in memory; `save_artifact` is for large ones."""
        return await self._send(calls.artifact(id, name))

    async def save_artifact(self, id: str, name: str, path: str | os.PathLike[str]) -> None:
        """Write one artifact to a file, which appears only when it is whole."""
        data = await self.artifact(id, name)
        await asyncio.to_thread(write_whole, Path(path), lambda file: file.write(data))

    # --- what happens ---
    async def events(
        self,
        id: str | None = None,
        *,
        follow: bool = False,
        after: int | None = None,
        **filters: Unpack[calls.EventFilters],
    ) -> AsyncIterator[api.EventView]:
        """Events of one job or of all, after the one with the number `after`, or `since` a moment.

        With `follow` as they happen: those of a job from its first to its last, those of all from now on.
        """
        if follow:
            async with aclosing(self._follow_events(id, after, filters)) as live:
                async for event in live:
                    yield event
            return
        while True:
            page = await self._send(calls.event_page(id, after, filters))
            for event in page.events:
                yield event
            if page.next == after:
                return
            after = page.next

    def _follow_events(
        self, id: str | None, after: int | None, filters: calls.EventFilters, until: float | None = None
    ) -> AsyncGenerator[api.EventView]:
        wanted = calls.event_stream(id, after, filters)
        return self._transport.follow(wanted, complete=lambda: self._ended(id), until=until)

    async def _ended(self, id: str | None) -> bool:
        return id is not None and (await self.get(id)).state in TERMINAL_JOB_STATES

    async def logs(
        self,
        id: str,
        *,
        follow: bool = False,
        host: int | None = None,
        stream: str | None = None,
        attempt: str | None = None,
        tail: int | None = None,
    ) -> AsyncIterator[api.LogChunk]:
        """What a job's processes wrote, as chunks; `client.results.log_bytes` gives a chunk's bytes.

        All attempts, hosts and streams (`out`, `err`, `log`), in the order they arrived, unless one is named. With
        `follow` until the job ends. `tail`: from about so many bytes before the end of each stream.
        """

        async def complete() -> bool:
            return not follow or await self._ended(id)

        wanted = calls.log_stream(id, follow=follow, host=host, stream=stream, attempt=attempt, tail=tail)
        async with aclosing(self._transport.follow(wanted, complete=complete)) as chunks:
            async for chunk in chunks:
                if stream in (None, chunk.stream):
                    yield chunk

    async def log_bytes(self, id: str, *, stream: str, host: int = 0, attempt: str | None = None) -> bytes:
        """One stream of one host as it was written, so far."""
        return await self._send(calls.log_bytes(id, host=host, stream=stream, attempt=attempt))

    # --- capacity ---
    async def pools(self) -> tuple[api.PoolView, ...]:
        return (await self._send(calls.pools())).pools

    async def pool(self, name: str) -> api.PoolView:
        return await self._send(calls.pool(name))

    async def put_pool(self, name: str, pool: api.PoolRequest) -> api.PoolView:
        """Make a pool, or change it."""
        return await self._send(calls.put_pool(name, pool))

    async def delete_pool(self, name: str) -> None:
        await self._send(calls.delete_pool(name))

    async def delete_queue(self, name: str) -> None:
        """Take a queue away; refused while a job is in it that has not ended."""
        await self._send(calls.delete_queue(name))

    async def queues(self) -> tuple[api.QueueView, ...]:
        return (await self._send(calls.queues())).queues

    async def queue(self, name: str) -> api.QueueView:
        return await self._send(calls.queue(name))

    async def put_queue(self, name: str, queue: api.QueueRequest) -> api.QueueView:
        return await self._send(calls.put_queue(name, queue))

    async def slices(self) -> tuple[api.SliceView, ...]:
        return (await self._send(calls.slices())).slices

    async def preempt(self, slice: str, *, notice_s: float = 0.0) -> None:
        """Take a local slice away, as a cloud would."""
        await self._send(calls.preempt(slice, notice_s))

    async def hosts(self, slice: str) -> tuple[capacity.HostView, ...]:
        """The hosts of a slice and their addresses."""
        return (await self._send(calls.hosts(slice))).hosts

    async def replace_slice(self, slice: str, *, now: bool = False) -> capacity.ReplaceReply:
        """Let a slice go for another; with `now` a job on it goes on elsewhere at once."""
        return await self._send(calls.replace_slice(slice, now))

    async def recreate(self, pool: str) -> capacity.RecreateReply:
        """Look for what is broken in a pool, and try its resting zones, now."""
        return await self._send(calls.recreate(pool))

    async def adopt(self, name: str, zone: str, *, own: bool = False) -> capacity.AdoptReply:
        """Take over a TPU that exists; the reply has what its hosts must run."""
        return await self._send(calls.adopt(capacity.AdoptRequest(name, zone, own)))

    async def unreached(self, slice: str, hosts: Sequence[capacity.HostTrouble]) -> None:
        """Say why hosts of a TPU that is being adopted could not be set up."""
        await self._send(calls.unreached(slice, hosts))

    async def zones(self) -> tuple[capacity.ZoneView, ...]:
        """What is known of each zone that pools may use."""
        return (await self._send(calls.zones())).zones

    async def solve(self, slice: str, *, dry_run: bool = False) -> solving.SolveView:
        """Have every host of a slice looked at and mended, or only looked at; `solved` tells what came of it."""
        return await self._send(calls.solve(slice, dry_run))

    async def solved(self, slice: str, run: str, *, wait_s: float = 0.0) -> solving.SolveView:
        """How far that is; with `wait_s` it is answered when it is done, or after that time."""
        return await self._send(calls.solved(slice, run, wait_s))

    async def cost(
        self, by: str = "job", *, since: float | None = None, until: float | None = None, limit: int | None = None
    ) -> CostPage:
        """Where chip-seconds and money went, by job, user, queue or zone; of the last week unless told."""
        return await self._send(calls.cost_page(by, since, until, limit))

    async def job_cost(self, id: str) -> JobCost:
        """What one job used, and how often it should save."""
        return await self._send(calls.job_cost(id))

    async def reserve(
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
        return await self._send(calls.reserve(slice, pool, wanted))

    async def release(self, slice: str | None = None, *, pool: str | None = None) -> None:
        """End a reservation."""
        await self._send(calls.release(slice, pool))

    # --- secrets, bytes, the server itself ---
    async def secrets(self) -> tuple[str, ...]:
        """Names of the team's secrets; values never come back."""
        return (await self._send(calls.secrets())).names

    async def set_secret(self, name: str, value: str) -> None:
        await self._send(calls.set_secret(name, value))

    async def delete_secret(self, name: str) -> None:
        await self._send(calls.delete_secret(name))

    async def missing_blobs(self, hashes: Sequence[str]) -> tuple[str, ...]:
        """Which of these the server does not have yet."""
        return (await self._send(calls.missing_blobs(hashes))).missing

    async def put_blob(self, sha256: str, data: bytes) -> None:
        await self._send(calls.put_blob(sha256, data))

    async def get_blob(self, sha256: str) -> bytes:
        return await self._send(calls.get_blob(sha256))

    async def put_snapshot(self, sha256: str, data: bytes) -> None:
        await self._send(calls.put_snapshot(sha256, data))

    async def clean(
        self,
        *,
        older_than_s: float | None = None,
        keep_results: bool = False,
        dry_run: bool = False,
        cursor: str | None = None,
    ) -> api.CleanReply:
        """As `Client.clean`."""
        wanted = api.CleanRequest(older_than_s=older_than_s, keep_results=keep_results, dry_run=dry_run, cursor=cursor)
        return await self._send(calls.clean(wanted))

    async def maintenance(self, on: bool) -> api.Maintenance:
        """Stop starting anything new, or go on; what runs is left alone either way. For operators."""
        return await self._send(calls.maintenance(on))

    async def server(self) -> api.ServerView:
        """Who answers, and who the server thinks we are."""
        return await self._send(calls.server())
