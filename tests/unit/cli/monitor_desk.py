"""A server as the monitor's feed sees it, in one process: lists, a stream of events, logs, and being away.

`test_monitor_feed` and `test_monitor_screen` put things in and look at what was asked. The real server is met in
tests/process/test_monitor.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Self, cast

from penstock.client.errors import ApiError, Unreachable
from penstock.wire import api, problems

if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient


class Desk:
    """What the server knows and was asked; `away` makes every call fail, open streams too."""

    def __init__(self) -> None:
        self.slices: list[api.SliceView] = []
        self.jobs: list[api.JobView] = []
        self.queues: list[api.QueueView] = []
        self.events: list[api.EventView] = []
        self.logs: dict[str, list[api.LogChunk]] = {}
        self.away = False
        self.refusal: ApiError | None = None
        self.asked: Counter[str] = Counter()
        self.streams: list[dict[str, Any]] = []
        self.done: list[tuple[str, str]] = []
        self.clients = 0
        self._news = asyncio.Condition()

    def connect(self) -> AsyncClient:
        self.clients += 1
        return cast("AsyncClient", Connection(self))

    def check(self, what: str) -> None:
        self.asked[what] += 1
        if self.away:
            raise Unreachable(problems.problem("unavailable", "nobody there"))
        if self.refusal is not None:
            raise self.refusal

    async def tell(self, *events: api.EventView) -> None:
        """Something happens; whoever listens hears of it."""
        self.events += events
        await self.stir()

    async def stir(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def leave(self) -> None:
        self.away = True
        await self.stir()

    async def grow(self, rows: Callable[[], list[Any]], start: int = 0) -> AsyncIterator[Any]:
        """A list that is followed."""
        place = start
        while True:
            while place < len(rows()):
                yield rows()[place]
                place += 1
            async with self._news:
                await self._news.wait()
            self.check("stream goes on")


class Connection:
    """The methods of `AsyncClient` that the feed calls."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def slices(self) -> tuple[api.SliceView, ...]:
        self._desk.check("slices")
        return tuple(self._desk.slices)

    async def queues(self) -> tuple[api.QueueView, ...]:
        self._desk.check("queues")
        return tuple(self._desk.queues)

    async def page(self, *, state: str, limit: int) -> api.JobPage:
        self._desk.check(f"jobs {state}")
        return api.JobPage(tuple(job for job in self._desk.jobs if job.state in state.split(","))[:limit])

    async def server(self) -> None:
        self._desk.check("server")

    async def events(self, **asked: Any) -> AsyncIterator[api.EventView]:
        self._desk.check("events")
        self._desk.streams.append(asked)
        after = asked.get("after", 0)
        async for event in self._desk.grow(lambda: [each for each in self._desk.events if each.seq > after]):
            yield event

    async def logs(self, id: str, **asked: Any) -> AsyncIterator[api.LogChunk]:
        self._desk.check(f"logs {id}")
        assert asked == {"follow": True, "tail": 32 << 10}
        if id not in self._desk.logs:
            raise ApiError(problems.problem("not_found", f"job: there is no {id!r}"))
        async for chunk in self._desk.grow(lambda: self._desk.logs[id]):
            yield chunk

    async def cancel(self, id: str) -> api.CancelReply:
        self._desk.check("cancel")
        self._desk.done.append(("cancel", id))
        return api.CancelReply(id, "cancelling")

    async def resume(self, id: str) -> api.Accepted:
        self._desk.check("resume")
        self._desk.done.append(("resume", id))
        return api.Accepted(id=f"{id}x", state="queued", created=True)


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(20.0):
        while not look():  # noqa: ASYNC110 (what is waited for cannot tell us)
            await asyncio.sleep(0.01)
