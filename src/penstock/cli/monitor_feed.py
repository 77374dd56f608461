"""Keeps a `Board` up to date from the server: one stream of events, and a list only when an event says it changed.

`cli.monitor` fills the first board with `first_look`; the live screen runs a `Feed` beside itself. How far jobs are is
in no event, so running jobs alone are looked at now and then. A server that goes away is told on the board and tried
again for ever, at the address that holds by then; the stream goes on behind the last event that was seen. It must not
draw, nor decide what is shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.cli.monitor_model import ALL, NOTHING, Board, LogTail, Stale
from penstock.cli.words import STATE_WORDS

if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient
    from penstock.client.client import Client

#: Lists are cut here: nobody reads more, and a look must stay cheap however many jobs wait.
JOBS_RUNNING, JOBS_QUEUED, JOBS_ENDED = 500, 100, 15
PROGRESS_S = 2.0  #: between two looks at running jobs
CALM_S = 0.5  #: between two readings of a list, however many events come
WHOLE_S = 60.0  #: between two readings of everything: a list that no event announced is not wrong for ever
AWAY_S = 1.0  #: between two tries to reach the server
PATIENCE_S = 1.0  #: with one call; longer, and the screen would look as if all were well
CHOOSING_S = 0.2  #: a selection that is moved on at once is not asked for
LOG_BYTES = 32 << 10  #: of the end of each stream of the selected job
ASIDE = "running,provisioning"


def first_look(client: Client, board: Board, *, events: bool = False) -> None:
    """Everything that is listed, with a plain client; with `events` also what happened since the board's `since`."""
    board.put_slices(client.slices())
    board.put_queues(client.queues())
    board.put_jobs(
        (
            *client.page(state=ASIDE, limit=JOBS_RUNNING).jobs,
            *client.page(state="queued", limit=JOBS_QUEUED).jobs,
            *client.page(state=STATE_WORDS["ended"], limit=JOBS_ENDED).jobs,
        )
    )
    if events:
        for event in client.events(since=board.since):
            board.take(event)


def log_look(client: Client, board: Board, job: str) -> None:
    """The end of a job's log."""
    from penstock.client.results import log_bytes

    board.log = LogTail()
    for chunk in client.logs(job, tail=LOG_BYTES):
        board.log.add(chunk, log_bytes(chunk))


class Feed:
    """Runs beside the screen; `changed` is called whenever the board has."""

    def __init__(self, board: Board, connect: Callable[[], AsyncClient], changed: Callable[[], None]) -> None:
        self.board = board
        self.client: AsyncClient | None = None  #: while the server answers
        self._connect = connect
        self._changed = changed
        self._stale: Stale = ALL
        self._news = asyncio.Event()
        self._selected: str | None = None
        self._chosen = asyncio.Event()

    def select(self, job: str | None) -> None:
        """Show another job's log."""
        if job != self._selected:
            self._selected = job
            self.board.log = LogTail()
            self._chosen.set()

    async def run(self) -> None:
        """For as long as the screen stands."""
        from penstock.client.errors import ApiError

        while True:
            try:
                async with self._connect() as client:
                    await self._serve(client)
            except* ApiError as errors:
                self._lose(_first(errors))
            await asyncio.sleep(AWAY_S)

    def _lose(self, error: BaseException) -> None:
        from penstock.client.errors import Unreachable

        self.client = None
        self.board.away = f"the server does not answer: {error}" if isinstance(error, Unreachable) else str(error)
        self._stale = ALL
        self._changed()

    async def _serve(self, client: AsyncClient) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look(client))
            group.create_task(self._listen(client))
            group.create_task(self._tail(client))

    # --- lists ---
    async def _look(self, client: AsyncClient) -> None:
        loop = asyncio.get_running_loop()
        whole_at = loop.time() + WHOLE_S
        while True:
            if loop.time() > whole_at:
                self._stale, whole_at = ALL, loop.time() + WHOLE_S
            stale, self._stale = self._stale, NOTHING
            self._news.clear()
            try:
                await self._read(client, stale)
            except BaseException:
                self._stale |= stale  # it was not read after all
                raise
            self.client, self.board.away = client, ""
            self._changed()
            await asyncio.sleep(CALM_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(PROGRESS_S - CALM_S):
                    await self._news.wait()

    async def _read(self, client: AsyncClient, stale: Stale) -> None:
        if stale.jobs:
            running = await client.page(state=ASIDE, limit=JOBS_RUNNING)
            queued = await client.page(state="queued", limit=JOBS_QUEUED)
            ended = await client.page(state=STATE_WORDS["ended"], limit=JOBS_ENDED)
            self.board.put_jobs((*running.jobs, *queued.jobs, *ended.jobs))
        elif self.board.any_running:
            self.board.renew_jobs((await client.page(state="running", limit=JOBS_RUNNING)).jobs)
        elif not stale:
            await client.server()  # nothing moves: is it still there?
        if stale.slices:
            self.board.put_slices(await client.slices())
        if stale.queues:
            self.board.put_queues(await client.queues())

    # --- events ---
    async def _listen(self, client: AsyncClient) -> None:
        """Behind the last event that is known; at first from the board's `since` on."""
        board = self.board
        if board.last_seq is None:
            stream = client.events(follow=True, since=board.since)
        else:
            stream = client.events(follow=True, after=board.last_seq)
        async for event in stream:
            stale = board.take(event)
            if stale:
                self._stale |= stale
                self._news.set()

    # --- the log of the selection ---
    async def _tail(self, client: AsyncClient) -> None:
        following: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as group:
            while True:
                self._chosen.clear()
                if self._selected is not None:
                    following = group.create_task(self._follow(client, self._selected))
                await self._chosen.wait()
                if following is not None:
                    following.cancel()

    async def _follow(self, client: AsyncClient, job: str) -> None:
        from penstock.client.errors import ApiError, Unreachable
        from penstock.client.results import log_bytes

        await asyncio.sleep(CHOOSING_S)
        log = LogTail()
        try:
            async for chunk in client.logs(job, follow=True, tail=LOG_BYTES):
                log.add(chunk, log_bytes(chunk))
                self.board.log = log
                self._changed()
        except Unreachable:
            raise
        except ApiError as error:
            self.board.log = LogTail.of(f"[{error}]")  # such as a job that was cleaned away meanwhile
            self._changed()


def _first(errors: BaseExceptionGroup[Exception]) -> BaseException:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
