"""The event log as it grows, read once for all streams, with each event's team beside it.

`server.events` follows it for clients. One task reads the log while anybody listens and keeps the newest events; who
is further behind reads pages of its own. Whose an event is never changes, so it is looked up once. It must not decide
who may see what: it says whose each event is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, NamedTuple

from penstock.domain import limits
from penstock.domain.nouns import Event
from penstock.ports.store import Reader, StoreError
from penstock.server.service import Service

KEPT: Final = 8_192  #: newest events in memory: a stream that is no further behind reads nothing itself
OWNERS_KEPT: Final = 100_000  #: things whose team is remembered
WAIT_S: Final = 30.0  #: the store wakes us; this only bounds how long a lost wake-up could go unnoticed
STORE_RETRY_S: Final = 1.0


class Owner(NamedTuple):
    """Whose a thing is, and of which job it is a part."""

    team: str | None
    job: str | None = None


class Seen(NamedTuple):
    event: Event
    owner: Owner


Owners = dict[tuple[str, str], Owner]
NOBODY: Final = Owner(None)


class Feed:
    """One per service."""

    def __init__(self, service: Service) -> None:
        self._store = service.store
        self._clock = service.clock
        self._owners: Owners = {}
        self._kept: deque[Seen] = deque(maxlen=KEPT)
        self._cursor = -1  #: the newest event read, -1 while nobody listens
        self._from = -1  #: events after this one are kept
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None
        self._news: asyncio.Future[None] | None = None

    async def follow(self, after: int, take: Callable[[Seen], bool]) -> AsyncIterator[Seen]:
        """All events after one, as they come, that `take` wants. It never ends by itself."""
        self._join()
        try:
            while True:
                if self._cursor >= after >= self._from >= 0:
                    batch = self._newer(after)
                else:
                    batch = await self.page(after, limits.PAGE_EVENTS_MAX)
                for seen in batch:
                    if take(seen):
                        yield seen
                if batch:
                    after = batch[-1].event.seq
                else:
                    await self._wait(after)
        finally:
            self._leave()

    def _newer(self, after: int) -> list[Seen]:
        newer: list[Seen] = []
        for seen in reversed(self._kept):
            if seen.event.seq <= after:
                break
            newer.append(seen)
        newer.reverse()
        return newer

    async def page(self, after: int, limit: int) -> list[Seen]:
        """Events after one, from the store."""
        page = await self._store.read(read_page, after, limit, self._owners)
        self._remember(page)
        return page

    def _remember(self, page: Sequence[Seen]) -> None:
        for event, owner in page:
            if owner.team is not None:
                self._owners[event.entity, event.id] = owner
        while len(self._owners) > OWNERS_KEPT:
            del self._owners[next(iter(self._owners))]

    # --- the one reader ---
    def _join(self) -> None:
        self._listeners += 1
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
            self._task.add_done_callback(lambda _: self._tell())

    def _leave(self) -> None:
        self._listeners -= 1
        if self._listeners == 0 and self._task is not None:
            self._task.cancel()
            self._task = None
            self._cursor = self._from = -1
            self._kept.clear()

    async def _wait(self, after: int) -> None:
        """Until there may be events after one."""
        if self._cursor > after:
            return
        if self._task is not None and self._task.done():
            self._task.result()  # a reader that failed fails its streams: silence would look like a quiet log
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        # Shielded: many wait for the one future, and one that goes must not end it for the others.
        await asyncio.shield(self._news)

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _run(self) -> None:
        while True:
            try:
                if self._from < 0:
                    self._from = self._cursor = await self._store.read(_read_last)
                    self._tell()
                page = await self.page(self._cursor, limits.PAGE_EVENTS_MAX)
                if not page:
                    await self._store.wait(self._cursor, WAIT_S)
                    continue
            except StoreError:
                # Streams stay open: they go on where they were when the store is back.
                await self._clock.sleep(STORE_RETRY_S)
                continue
            falling = len(self._kept) + len(page) > KEPT
            self._kept.extend(page)
            if falling:
                self._from = self._kept[0].event.seq - 1
            self._cursor = page[-1].event.seq
            self._tell()


def _read_last(reader: Reader) -> int:
    return reader.last_seq()


def read_page(reader: Reader, after: int, limit: int, known: Mapping[tuple[str, str], Owner]) -> list[Seen]:
    return with_owners(reader, reader.events(after, limit), known)


def with_owners(reader: Reader, events: Sequence[Event], known: Mapping[tuple[str, str], Owner]) -> list[Seen]:
    """Events and whose they are; what is the whole installation's has no owner."""
    unknown: dict[str, set[str]] = {}
    for event in events:
        if (event.entity, event.id) not in known:
            unknown.setdefault(event.entity, set()).add(event.id)
    found = _owners(reader, unknown) if unknown else {}
    return [
        Seen(event, known.get((event.entity, event.id)) or found.get((event.entity, event.id), NOBODY))
        for event in events
    ]


def _owners(reader: Reader, unknown: Mapping[str, set[str]]) -> Owners:
    found: Owners = {}
    for job in reader.jobs(sorted(unknown.get("job", ()))):
        found["job", job.id] = Owner(job.spec.team, job.id)
    for attempt in reader.attempts(sorted(unknown.get("attempt", ()))):
        found["attempt", attempt.id] = Owner(attempt.team, attempt.job)
    for slice in reader.slices(sorted(unknown.get("slice", ()))):
        found["slice", slice.id] = Owner(slice.team)
    for name in unknown.get("pool", ()):
        pool = reader.pool(name)
        if pool is not None:
            found["pool", name] = Owner(pool.team)
    for name in unknown.get("queue", ()):
        queue = reader.queue(name)
        if queue is not None:
            found["queue", name] = Owner(queue.team)
    for name in unknown.get("team", ()):
        found["team", name] = Owner(name)
    return found
