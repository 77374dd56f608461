"""The routes about events: pages of the log, and streams that a client can resume where they broke off.

A caller sees the events of its own team; operators see all. The log's own numbers are the ids of a stream, so that
`Last-Event-ID` and `after` mean the same. A job's stream ends with the job.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import msgspec

from penstock.domain import limits
from penstock.domain.lifecycle import TERMINAL_JOB_STATES
from penstock.ports.store import Reader
from penstock.server.feed import Feed, Seen, with_owners
from penstock.server.routing import FOLLOW_TEXT, Call, Events, Parameter, Route, Sent
from penstock.server.service import Service
from penstock.server.views import event_view
from penstock.wire.api import EventPage

PAGE_EVENTS: Final = 200
_ENDS: Final = frozenset({*(f"job.{state.value}" for state in TERMINAL_JOB_STATES), "job.purged"})
_encode = msgspec.json.Encoder().encode


def _start(call: Call, default: int) -> int:
    """Where to begin: after the last event the client has, then after the one it names."""
    last = call.last_event_id
    return int(last) if last is not None else call.whole("after", default)


def _sent(seen: Seen) -> Sent:
    event = seen.event
    return Sent(str(event.seq), event.kind, _encode(event_view(event)))


async def all_events(service: Service, call: Call) -> EventPage | Events:
    """What happened to anything of the caller's team. A stream without a start begins now."""
    feed, team = service.part(Feed), call.walls

    def mine(seen: Seen) -> bool:
        return team is None or seen.owner.team == team

    if call.flag("follow"):
        begin = _start(call, -1)
        return Events(_stream(service, feed, begin, team))
    after, limit = _start(call, 0), call.whole("limit", PAGE_EVENTS)
    found: list[Seen] = []
    looked = 0
    while len(found) < limit and looked < limits.EVENTS_PER_READ:
        page = await feed.page(after, limits.PAGE_EVENTS_MAX)
        if not page:
            break
        for seen in page:
            after, looked = seen.event.seq, looked + 1
            if mine(seen):
                found.append(seen)
                if len(found) == limit:
                    break
    return EventPage(tuple(event_view(seen.event) for seen in found), after)


async def _stream(service: Service, feed: Feed, after: int, team: str | None) -> AsyncIterator[Sent]:
    if after < 0:
        after = await service.store.read(_read_last)
    async for seen in feed.follow(after, lambda seen: team is None or seen.owner.team == team):
        yield _sent(seen)


def _read_last(reader: Reader) -> int:
    return reader.last_seq()


# --- one job's ---
class _Past(msgspec.Struct, frozen=True):
    seen: list[Seen]
    upto: int
    over: bool


def _read_past(reader: Reader, job: str, after: int) -> _Past:
    """What the log says of a job and its attempts, and where the log stood then."""
    events = reader.events_of("job", job)
    for attempt in reader.attempts_of(job):
        events += reader.events_of("attempt", attempt.id)
    events = sorted((event for event in events if event.seq > after), key=lambda event: event.seq)
    over = all(found.state in TERMINAL_JOB_STATES for found in reader.jobs((job,)))
    return _Past(with_owners(reader, events, {}), reader.last_seq(), over)


async def job_events(service: Service, call: Call) -> EventPage | Events:
    """What happened to one job and its attempts. A stream begins with the job and ends with it."""
    job = await service.find_job(call, call.params["id"])
    after = _start(call, 0)
    past = await service.store.read(_read_past, job.id, after)
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
)
LAST_EVENT: Final = (Parameter("last-event-id", "Where a broken stream goes on.", pattern="^[0-9]{1,18}$"),)

ROUTES: Final = (
    Route("GET", "/v1/events", all_events, gives=EventPage, streams=True, query=_PARAMETERS, headers=LAST_EVENT),
    Route(
        "GET", "/v1/jobs/{id}/events", job_events, gives=EventPage, streams=True, query=_PARAMETERS, headers=LAST_EVENT
    ),
)
