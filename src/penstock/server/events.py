"""The routes about events: pages of the log, and streams that a client can resume where they broke off.

A caller sees the events of its own team; operators see all. The log's own numbers are the ids of a stream, so that
`Last-Event-ID` and `after` mean the same. A job's stream ends with the job.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec

from penstock.domain import limits
from penstock.domain.lifecycle import TERMINAL_JOB_STATES
from penstock.domain.nouns import Job
from penstock.ports.store import Reader
from penstock.server.feed import Feed, Seen, with_owners
from penstock.server.routing import FOLLOW_TEXT, JOB_FILTERS, Call, Events, Parameter, Route, Sent
from penstock.server.service import Service
from penstock.server.views import event_view
from penstock.wire.api import EventPage

PAGE_EVENTS: Final = 200
_STAMPS_LEAN_S: Final = 60.0  #: servers whose clocks differ stamp one log
_ENDS: Final = frozenset({*(f"job.{state.value}" for state in TERMINAL_JOB_STATES), "job.purged"})
_encode = msgspec.json.Encoder().encode


def _start(call: Call, default: int) -> int:
    """Where to begin: after the last event the client has, then after the one it names."""
    last = call.last_event_id
    return int(last) if last is not None else call.whole("after", default)


def _sent(seen: Seen) -> Sent:
    event = seen.event
    return Sent(str(event.seq), event.kind, _encode(event_view(event)))


class _Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which events a list is of: the team's, since a moment, and, if that is asked for, only those of some jobs."""

    team: str | None
    since: float = 0.0
    states: frozenset[str] = frozenset()
    user: str | None = None
    tag: str | None = None

    @property
    def of_jobs(self) -> bool:
        return bool(self.states) or self.user is not None or self.tag is not None

    def takes(self, seen: Seen) -> bool:
        return (self.team is None or seen.owner.team == self.team) and seen.event.at >= self.since

    def takes_job(self, job: Job) -> bool:
        return (
            (not self.states or job.state.value in self.states)
            and (self.user is None or job.spec.user == self.user)
            and (self.tag is None or self.tag in job.tags)
        )


async def _taken(service: Service, wanted: _Wanted, page: Sequence[Seen]) -> list[Seen]:
    """Those of a page that are wanted. Jobs are looked up as they are now: their states and tags change."""
    taken = [seen for seen in page if wanted.takes(seen)]
    if not wanted.of_jobs or not taken:
        return taken
    ids = sorted({seen.owner.job for seen in taken if seen.owner.job is not None})
    jobs = await service.store.read(_read_jobs, ids)
    fitting = {job.id for job in jobs if wanted.takes_job(job)}
    return [seen for seen in taken if seen.owner.job in fitting]


def _read_jobs(reader: Reader, ids: Sequence[str]) -> list[Job]:
    return reader.jobs(ids)


def _before(reader: Reader, since: float) -> int:
    """The last event before a moment, by halving: stamps rise with the numbers, but for clocks that were set back."""
    low, high = 0, reader.last_seq()
    while low < high:
        middle = (low + high) // 2
        found = reader.events(middle, 1)
        if found and found[0].at < since - _STAMPS_LEAN_S:
            low = middle + 1
        else:
            high = middle
    return low


async def all_events(service: Service, call: Call) -> EventPage | Events:
    """What happened to anything of the caller's team. A stream without a start begins now."""
    feed, query = service.part(Feed), call.query
    wanted = _Wanted(
        team=call.walls,
        since=float(query.get("since", 0)),
        states=frozenset(query["state"].split(",")) if "state" in query else frozenset(),
        user=query.get("user"),
        tag=query.get("tag"),
    )
    first = await service.store.read(_before, wanted.since) if "since" in query else 0
    if call.flag("follow"):
        begin = max(_start(call, -1), first if "since" in query else -1)
        return Events(_stream(service, feed, begin, wanted))
    after, limit = max(first, _start(call, 0)), call.whole("limit", PAGE_EVENTS)
    found: list[Seen] = []
    looked = 0
    while len(found) < limit and looked < limits.EVENTS_PER_READ:
        page = await feed.page(after, limits.PAGE_EVENTS_MAX)
        if not page:
            break
        taken = (await _taken(service, wanted, page))[: limit - len(found)]
        found += taken
        # A full page goes on behind its last event, any other behind all that was looked at.
        after = taken[-1].event.seq if len(found) == limit else page[-1].event.seq
        looked += len(page)
    return EventPage(tuple(event_view(seen.event) for seen in found), after)


async def _stream(service: Service, feed: Feed, after: int, wanted: _Wanted) -> AsyncIterator[Sent]:
    if after < 0:
        after = await service.store.read(_read_last)
    async for seen in feed.follow(after, wanted.takes):
        if not wanted.of_jobs or await _taken(service, wanted, (seen,)):
            yield _sent(seen)


def _read_last(reader: Reader) -> int:
    return reader.last_seq()


# --- one job's ---
class _Past(msgspec.Struct, frozen=True):
    seen: list[Seen]
    upto: int
    over: bool


def _read_past(reader: Reader, job: str, after: int, since: float) -> _Past:
    """What the log says of a job and its attempts, and where the log stood then."""
    events = reader.events_of("job", job)
    for attempt in reader.attempts_of(job):
        events += reader.events_of("attempt", attempt.id)
    events = sorted((event for event in events if event.seq > after and event.at >= since), key=lambda event: event.seq)
    over = all(found.state in TERMINAL_JOB_STATES for found in reader.jobs((job,)))
    return _Past(with_owners(reader, events, {}), reader.last_seq(), over)


async def job_events(service: Service, call: Call) -> EventPage | Events:
    """What happened to one job and its attempts. A stream begins with the job and ends with it."""
    job = await service.find_job(call, call.params["id"])
    after = _start(call, 0)
    past = await service.store.read(_read_past, job.id, after, float(call.query.get("since", 0)))
    if call.flag("follow"):
        return Events(_job_stream(service, job.id, past, after))
    page = past.seen[: call.whole("limit", PAGE_EVENTS)]
    return EventPage(tuple(event_view(seen.event) for seen in page), page[-1].event.seq if page else after)


async def _job_stream(service: Service, job: str, past: _Past, after: int) -> AsyncIterator[Sent]:
    for seen in past.seen:
        yield _sent(seen)
    if past.over:
        return
    feed = service.part(Feed)
    async for seen in feed.follow(max(after, past.upto), lambda seen: seen.owner.job == job):
        yield _sent(seen)
        if seen.event.kind in _ENDS:
            return


_PARAMETERS: Final = (
    Parameter("after", "Events after this one, by its `seq`.", kind="integer", least=0),
    Parameter("limit", "How many at most.", kind="integer", least=1, most=limits.PAGE_EVENTS_MAX),
    Parameter("follow", FOLLOW_TEXT, kind="boolean"),
    Parameter("since", "Events at or after this second since the epoch.", kind="number", least=0, most=1e11),
)
LAST_EVENT: Final = (Parameter("last-event-id", "Where a broken stream goes on.", pattern="^[0-9]{1,18}$"),)

ROUTES: Final = (
    Route(
        "GET",
        "/v1/events",
        all_events,
        gives=EventPage,
        streams=True,
        query=(*_PARAMETERS, *JOB_FILTERS),
        headers=LAST_EVENT,
    ),
    Route(
        "GET", "/v1/jobs/{id}/events", job_events, gives=EventPage, streams=True, query=_PARAMETERS, headers=LAST_EVENT
    ),
)
