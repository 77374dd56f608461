"""Keeps the planner's snapshot up to date from the event log: each tick reads what changed, not what exists.

The loop calls `catch_up` before each plan; nothing else writes to the snapshot. It can be thrown away at any time and
rebuilt (`reset`), and the simulator compares the two. It must not decide anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from penstock.domain import limits
from penstock.domain.lifecycle import AttemptState
from penstock.domain.nouns import Attempt, Event, Job, Pool, Queue, Quota, Slice, Team, Zone
from penstock.planner.snapshot import QueueView, Snapshot
from penstock.ports.store import Reader, Store

E = TypeVar("E")
#: How many jobs a queue's window holds, the key of the last one, and their ids.
Window = tuple[int, tuple[int, str] | None, frozenset[str]]
Windows = dict[str, Window]


class Changes(msgspec.Struct):
    """One read of the store: the rows behind a page of events, or everything that lives."""

    upto: int
    whole: bool
    more: bool = False
    maintenance: bool | None = None
    teams: list[Team] = []
    queues: list[Queue] = []
    pools: list[Pool] = []
    zones: list[Zone] = []
    quotas: list[Quota] = []
    jobs: list[Job] = []
    attempts: list[Attempt] = []
    slices: list[Slice] = []
    dropped_jobs: list[str] = []
    dropped_attempts: list[str] = []  #: of purged jobs: closed before, gone with them without a word
    waiting: dict[str, int] = {}  #: per queue: how many more (or, when whole, how many) wait
    heads: dict[str, list[Job]] = {}


class Projection:
    """The snapshot and the event cursor it stands at."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.snapshot = Snapshot()
        self.cursor = -1

    async def catch_up(self) -> None:
        """Apply all events committed so far. The first time, and after `reset`, read everything that lives."""
        while True:
            if self.cursor < 0:
                changes = await self._store.read(read_everything)
            else:
                changes = await self._store.read(read_changes, self.cursor, self._windows())
            self._apply(changes)
            if not changes.more:
                return

    def reset(self) -> None:
        self.cursor = -1

    def _windows(self) -> Windows:
        return {name: _window(view) for name, view in self.snapshot.queues.items()}

    def _apply(self, changes: Changes) -> None:
        if changes.whole:
            witness = self.snapshot.witness
            self.snapshot = Snapshot()
            self.snapshot.witness = witness
        snapshot = self.snapshot
        if changes.maintenance is not None:
            snapshot.maintenance = changes.maintenance
        for team in changes.teams:
            snapshot.put_team(team)
        for queue in changes.queues:
            snapshot.put_queue(queue)
        for pool in changes.pools:
            snapshot.put_pool(pool)
        for zone in changes.zones:
            snapshot.put_zone(zone)
        for quota in changes.quotas:
            snapshot.put_quota(quota)
        for id in changes.dropped_jobs:
            snapshot.drop_job(id)
        for id in changes.dropped_attempts:
            if id in snapshot.attempts:
                old = snapshot.attempts[id]
                snapshot.put_attempt(msgspec.structs.replace(old, state=AttemptState.CLOSED))
        for job in changes.jobs:
            snapshot.put_job(job)
        for attempt in changes.attempts:
            snapshot.put_attempt(attempt)
        for slice in changes.slices:
            snapshot.put_slice(slice)
        for name, count in changes.waiting.items():
            view = snapshot.queues[name]
            view.waiting_total = count if changes.whole else view.waiting_total + count
        for name, heads in changes.heads.items():
            snapshot.queues[name].waiting = heads
        self.cursor = changes.upto


def _window(view: QueueView) -> Window:
    last = view.waiting[-1] if view.waiting else None
    key = (-last.priority, last.id) if last is not None else None
    return len(view.waiting), key, frozenset(job.id for job in view.waiting)


def read_everything(reader: Reader) -> Changes:
    """All that lives, and the heads of all queues."""
    queues = reader.queues()
    names = [queue.name for queue in queues]
    counts = reader.waiting_counts()
    return Changes(
        upto=reader.last_seq(),
        whole=True,
        maintenance=reader.control().maintenance,
        teams=reader.teams(),
        queues=queues,
        pools=reader.pools(),
        zones=reader.zones(),
        quotas=reader.quotas(),
        jobs=reader.live_jobs(),
        attempts=reader.live_attempts(),
        slices=reader.live_slices(),
        waiting={name: counts.get(name, 0) for name in names},
        heads=reader.heads(names, limits.WINDOW_JOBS),
    )


def read_changes(
    reader: Reader,
    cursor: int,
    windows: Windows,
) -> Changes:
    """The rows behind the events after `cursor`; heads only of queues whose window they touch."""
    events = reader.events(cursor, limits.EVENTS_PER_READ)
    if not events:
        return Changes(upto=cursor, whole=False)
    if events[0].seq != cursor + 1:  # forgotten by retention before we read them
        return read_everything(reader)
    ids: dict[str, dict[str, None]] = {}
    waiting: dict[str, int] = {}
    touched: dict[str, None] = {}
    for event in events:
        ids.setdefault(event.entity, {})[event.id] = None
        if event.entity == "job" and "priority" in event.body:
            _note_waiting(event, waiting, touched, windows)
        if event.kind == "job.created":
            del ids["job"][event.id]  # never placed: the window is all the planner sees of it
    jobs = list(ids.get("job", ()))
    found = reader.jobs(jobs) if jobs else []
    attempts = list(ids.get("attempt", ()))
    found_attempts = reader.attempts(attempts) if attempts else []
    return Changes(
        upto=events[-1].seq,
        whole=False,
        more=len(events) == limits.EVENTS_PER_READ,
        maintenance=reader.control().maintenance if "control" in ids else None,
        teams=_present(reader.team(id) for id in ids.get("team", ())),
        queues=_present(reader.queue(id) for id in ids.get("queue", ())),
        pools=_present(reader.pool(id) for id in ids.get("pool", ())),
        zones=_present(reader.zone(id) for id in ids.get("zone", ())),
        quotas=_present(reader.quota(*id.split("/", 1)) for id in ids.get("quota", ())),
        jobs=found,
        attempts=found_attempts,
        slices=reader.slices(list(ids["slice"])) if "slice" in ids else [],
        dropped_jobs=sorted(set(jobs) - {job.id for job in found}),
        dropped_attempts=sorted(set(attempts) - {attempt.id for attempt in found_attempts}),
        waiting=waiting,
        heads=reader.heads(list(touched), limits.WINDOW_JOBS) if touched else {},
    )


def _note_waiting(
    event: Event,
    waiting: dict[str, int],
    touched: dict[str, None],
    windows: Windows,
) -> None:
    """Count who came and went, and mark the queue whose window must be read again."""
    queue = str(event.body["queue"])
    delta = event.body.get("waiting", 0)
    assert isinstance(delta, int)
    if delta:
        waiting[queue] = waiting.get(queue, 0) + delta
    length, last, members = windows.get(queue, (0, None, frozenset()))
    priority = event.body["priority"]
    assert isinstance(priority, int)
    inside = last is None or length < limits.WINDOW_JOBS or (-priority, event.id) < last
    if inside or event.id in members:
        touched[queue] = None


def _present(found: Iterable[E | None]) -> list[E]:
    return [each for each in found if each is not None]
