"""Who waits for orders, and how they are woken: a parked sync ends as soon as there may be an order for its slice.

`server.agents` parks syncs here. The controller's `ticked` hook rings for what a plan has just committed, without any
thread in between; `run` follows the store's log and rings for what anybody else committed (a cancel, a gang that
stops, another server). It also tells listeners which jobs ended and which attempts closed, so that logs need no
follower of their own, and wakes who waits for the end of one job (`server.bytes`). Rings are counted per slice, so that
one between an answer and the wait for the next is never lost. It must not decide what an order is: whoever wakes reads
the committed rows again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Final

import msgspec

from penstock.domain import limits
from penstock.domain.nouns import Event
from penstock.planner.actions import Drain, Place, Plan, Release
from penstock.ports.clock import Clock
from penstock.ports.store import Reader, Store, StoreError

logger = logging.getLogger(__name__)

#: After the store failed: as the controller's own loop does.
STORE_RETRY_S: Final = 1.0
#: The store wakes us; this only bounds how long a lost wake-up could go unnoticed.
WAIT_S: Final = 30.0

#: What can make an order for the hosts of a slice. Reports that hosts make themselves are not among them.
_SLICE_KINDS: Final = frozenset(
    {
        "slice.bound",
        "slice.released",
        "slice.creating",
        "slice.observed",
        "slice.draining",
        "slice.preempted",
        "slice.failed",
        "slice.deleting",
        "slice.gone",
    }
)
_ATTEMPT_KINDS: Final = frozenset({"attempt.stopping", "attempt.fencing"})
_JOB_ENDS: Final = frozenset({"job.succeeded", "job.failed", "job.cancelled"})


class Woken(Enum):
    """Why a parked sync goes on."""

    RUNG = auto()
    QUIET = auto()  #: nothing came in time
    DROPPED = auto()  #: its connection broke: nobody is left to be answered


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What a page of the log means to those who wait."""

    upto: int
    more: bool
    slices: tuple[str, ...] = ()  #: with orders, perhaps
    gone: tuple[str, ...] = ()  #: slices that will never be asked about again
    ended: tuple[str, ...] = ()  #: jobs
    closed: tuple[str, ...] = ()  #: attempts


class Bells:
    """One per server. `on_drop(slice)` is told when a parked sync's connection breaks: its host may have died."""

    def __init__(self, store: Store, clock: Clock, remembered: Callable[[], int]) -> None:
        """`remembered` says up to which event the controller's memory goes."""
        self._store = store
        self._remembered = remembered
        self._clock = clock
        self._rings: dict[str, int] = {}  #: slice -> how often it was rung for
        self._seqs: dict[str, int] = {}  #: slice -> the event its last ring was for: memory must reach it
        self._heard: dict[str, dict[int, int]] = {}  #: slice -> host -> the ring its last answer knew of
        self._parked: dict[str, set[asyncio.Future[None]]] = {}
        self._awaited: dict[str, set[asyncio.Future[None]]] = {}  #: job -> who waits for its end
        self._cursor = -1
        self.on_drop: Callable[[str], None] | None = None
        self.listeners: list[Callable[[News], None]] = []

    # --- ringing ---
    def ring(self, slice: str, seq: int) -> None:
        """There may be an order for this slice, by an event with this number or a later one."""
        self._rings[slice] = self._rings.get(slice, 0) + 1
        self._seqs[slice] = max(seq, self._seqs.get(slice, 0))
        for waiting in self._parked.pop(slice, ()):
            if not waiting.done():
                waiting.set_result(None)

    def hush(self) -> None:
        """Wake everybody: the server stops, or cannot say who has to be woken."""
        for slice in list(self._parked):
            self.ring(slice, 0)
        self._tell_ended(tuple(self._awaited))

    def ticked(self, plan: Plan, _epoch: int) -> None:
        """The controller's hook: the plan's decisions are committed by now. Orders to stop come through the log."""
        seq = self._remembered() + 1  # memory takes in whole pages: one event further, and it knows of this commit
        for action in plan.actions:
            match action:
                case Place():
                    for slice in action.slices:
                        self.ring(slice, seq)
                case Release() | Drain():
                    self.ring(action.slice, seq)
                case _:
                    pass

    async def run(self) -> None:
        """Follow the log until cancelled."""
        while True:
            try:
                if self._cursor < 0:
                    self._cursor = await self._store.read(_last_seq)
                    self.hush()  # what was committed before this will be in no news
                await self._store.wait(self._cursor, WAIT_S)
                await self._take_news()
            except StoreError as error:
                logger.warning("the log cannot be read, bells are late: %s", error)
                await self._clock.sleep(STORE_RETRY_S)

    async def _take_news(self) -> None:
        while True:
            news = await self._store.read(read_news, self._cursor)
            self._cursor = news.upto
            for slice in news.slices:
                self.ring(slice, news.upto)
            for slice in news.gone:
                for kept in (self._rings, self._seqs, self._heard):
                    kept.pop(slice, None)
            self._tell_ended(news.ended)
            for listener in self.listeners:
                listener(news)
            if not news.more:
                return

    def _tell_ended(self, jobs: Iterable[str]) -> None:
        for job in jobs:
            for waiting in self._awaited.pop(job, ()):
                if not waiting.done():
                    waiting.set_result(None)

    # --- waiting ---
    @contextmanager
    def end_of(self, job: str) -> Iterator[asyncio.Future[None]]:
        """Done when the job may have ended, or the server stops. Whoever waits reads the job after this began."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        awaited = self._awaited.setdefault(job, set())
        awaited.add(waiting)
        try:
            yield waiting
        finally:
            awaited.discard(waiting)
            if not awaited and self._awaited.get(job) is awaited:
                del self._awaited[job]

    def rung(self, slice: str) -> int:
        """How often it has been rung for: taken before an answer is made, and compared after."""
        return self._rings.get(slice, 0)

    def stale(self, slice: str, host: int) -> bool:
        """Whether memory may not know of an order: it was rung for since this host's answer, or a moment before."""
        if self._heard.get(slice, {}).get(host, -1) != self.rung(slice):
            return True
        return self._remembered() < self._seqs.get(slice, 0)

    def answered(self, slice: str, host: int, rung: int) -> None:
        """An answer from committed rows, no older than that ring, goes to this host."""
        self._heard.setdefault(slice, {})[host] = rung

    async def park(self, slice: str, rung: int, wait_s: float, dropped: Callable[[], Awaitable[object]]) -> Woken:
        """Wait until the slice is rung for once more, at most `wait_s`. `dropped` ends when the connection does."""
        if self.rung(slice) != rung:
            return Woken.RUNG
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parked = self._parked.setdefault(slice, set())
        parked.add(waiting)
        watch = asyncio.ensure_future(dropped())
        try:
            await asyncio.wait((waiting, watch), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            broken = watch.done()
            watch.cancel()
            parked.discard(waiting)
            if not parked and self._parked.get(slice) is parked:
                del self._parked[slice]
        if waiting.done():
            return Woken.RUNG
        if broken:
            if self.on_drop is not None:
                self.on_drop(slice)
            return Woken.DROPPED
        return Woken.QUIET

    @property
    def parked(self) -> int:
        """How many syncs wait now."""
        return sum(len(waiting) for waiting in self._parked.values())

    @property
    def awaited(self) -> int:
        """How many wait for the end of a job now."""
        return sum(len(waiting) for waiting in self._awaited.values())


def _last_seq(reader: Reader) -> int:
    return reader.last_seq()


def read_news(reader: Reader, after: int) -> News:
    """What happened since, on the reader's thread; an attempt's events are turned into those of its slices."""
    events = reader.events(after, limits.EVENTS_PER_READ)
    stopped = list(dict.fromkeys(event.id for event in events if event.kind in _ATTEMPT_KINDS))
    slices = [event.id for event in events if event.kind in _SLICE_KINDS]
    if stopped:
        slices += [bound.slice for attempt in reader.attempts(stopped) for bound in attempt.slices]
    return News(
        upto=events[-1].seq if events else after,
        more=len(events) == limits.EVENTS_PER_READ,
        slices=tuple(dict.fromkeys(slices)),
        gone=_ids(events, frozenset({"slice.gone"})),
        ended=_ids(events, _JOB_ENDS),
        closed=_ids(events, frozenset({"attempt.closed"})),
    )


def _ids(events: Iterable[Event], kinds: frozenset[str]) -> tuple[str, ...]:
    return tuple(event.id for event in events if event.kind in kinds)
