"""What `tpu monitor` knows, and one frame of it: lists as they were last read, folded with events as they come.

`cli.monitor_feed` puts lists and events in; `frame` gives what is shown, as data: `--once --json` prints it, and
`cli.monitor_text` makes lines of it for the terminal. Pure: time is an argument, nothing is asked or drawn here. An
event never changes a list by itself, it only tells which list is out of date, so that what is shown is what the server
says and not a second opinion of ours.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import msgspec

from penstock.wire.api import EventView, JobView, LogChunk, QueueView, SliceView

EVENTS_KEPT = 200
LOG_LINES_KEPT = 500
LINE_CHARACTERS = 4_000  #: of a line that has not ended: a progress bar without end must not fill our memory
KNOWN_MAX = 20_000  #: attempts and slices whose job and zone are remembered: a monitor may stand for weeks
QUIET_S = 600.0  #: a running job that reported progress, and then none for so long, may be stuck
LIVE = ("running", "provisioning", "queued")
COMING, LEAVING, BROKEN = ("intended", "creating"), ("draining", "deleting"), ("preempted", "failed")
#: Numbers of `payload.progress(done, total, samples=…, shards=…)` that have a column.
SAMPLES, SHARDS = "samples", "shards"


class Stale(msgspec.Struct, frozen=True):
    """Which lists an event has put out of date."""

    jobs: bool = False
    slices: bool = False
    queues: bool = False

    def __or__(self, other: Stale) -> Stale:
        return Stale(self.jobs or other.jobs, self.slices or other.slices, self.queues or other.queues)

    def __bool__(self) -> bool:
        return self.jobs or self.slices or self.queues


NOTHING, ALL = Stale(), Stale(True, True, True)
#: By the first word of an event's kind. Attempts move slices too: they are bound and released with them.
_STALE_BY = {
    "job": Stale(jobs=True, queues=True),
    "attempt": Stale(jobs=True, slices=True),
    "slice": Stale(slices=True),
    "queue": Stale(queues=True),
}
#: Book-keeping: no list changes by them, and nobody reads them.
_IDLE_KINDS = frozenset({"queue.charged", "slice.observed", "zone.learned"})


# --- what a frame is ---
class Share(msgspec.Struct, frozen=True, kw_only=True):
    """How far a payload says it is."""

    done: float
    total: float | None
    samples: float | None
    shards: float | None
    metrics: dict[str, float]
    said_s: float  #: seconds ago


class SliceRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    title: str  #: its place in a fleet, else its id
    zone: str
    pool: str
    accelerator: str
    chips: int
    state: str
    spot: bool
    job: str | None
    job_name: str
    user: str | None
    progress: Share | None
    age_s: float
    preemptions: int  #: since `Frame.since`: of the job on it, or of its place in a fleet, whichever had more
    why: str


class ZoneRow(msgspec.Struct, frozen=True, kw_only=True):
    zone: str
    busy: int
    free: int
    coming: int
    leaving: int
    broken: int
    preemptions: int  #: since `Frame.since`
    slices: tuple[SliceRow, ...]


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    state: str
    cause: str | None
    stopping: bool
    quiet: bool
    queue: str
    user: str
    on: str
    stage: int
    progress: Share | None
    age_s: float
    ran_s: float | None
    preemptions: int
    reason: str


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    waiting: int
    running: int
    quota_chips: int | None
    weight: float
    paused: bool


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    at: float
    kind: str
    id: str
    job: str | None
    body: dict[str, object]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over everything, whatever the filter hides."""

    slices: int
    chips: int
    busy: int
    free: int
    coming: int
    leaving: int
    broken: int
    running: int
    provisioning: int
    queued: int
    quiet: int
    succeeded: int  #: this and the next three: since `Frame.since`
    failed: int
    cancelled: int
    preemptions: int
    samples: float
    shards: float


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    since: float
    server: str
    away: str  #: what is wrong when the server does not answer; the rest is then what it said last
    filter: str
    totals: Totals
    zones: tuple[ZoneRow, ...]
    jobs: tuple[JobRow, ...]
    queues: tuple[QueueRow, ...]
    events: tuple[EventRow, ...]  #: newest first
    selected: str | None  #: the job whose log it is
    log: tuple[str, ...]


# --- what is known ---
class Board:
    """Everything the monitor knows. `since` is how far back it was told of events."""

    def __init__(self, since: float, server: str = "") -> None:
        self.since = since
        self.server = server
        self.away = ""
        self.last_seq: int | None = None
        self.log = LogTail()
        self._slices: tuple[SliceView, ...] = ()
        self._jobs: dict[str, JobView] = {}
        self._queues: tuple[QueueView, ...] = ()
        self._events: deque[EventRow] = deque(maxlen=EVENTS_KEPT)
        self._ended: Counter[str] = Counter()
        self._lost_jobs: Counter[str] = Counter()
        self._lost_zones: Counter[str] = Counter()
        self._lost = 0
        self._lost_slices: dict[str, str] = {}
        self._lost_places: Counter[str] = Counter()
        self._place_of: dict[str, str] = {}
        self._zone_of: dict[str, str] = {}
        self._job_of: dict[str, str] = {}

    # --- in ---
    def put_slices(self, slices: Sequence[SliceView]) -> None:
        self._slices = tuple(slices)
        for each in slices:
            _remember(self._zone_of, each.id, each.zone)
            _remember(self._place_of, each.id, each.title or each.id)

    def put_queues(self, queues: Sequence[QueueView]) -> None:
        self._queues = tuple(queues)

    def put_jobs(self, jobs: Iterable[JobView]) -> None:
        """All that are to be listed, in the order they are to be listed."""
        self._jobs = {job.id: job for job in jobs}

    def renew_jobs(self, jobs: Iterable[JobView]) -> None:
        """Some of them as they are now: how far they are has moved, which no event tells."""
        self._jobs.update((job.id, job) for job in jobs if job.id in self._jobs)

    def take(self, event: EventView) -> Stale:
        """Remember what happened; which lists have to be read again. One that is known already changes nothing."""
        if self.last_seq is not None and event.seq <= self.last_seq:
            return NOTHING
        self.last_seq = event.seq
        noun, _, verb = event.kind.partition(".")
        job = self._job(noun, event)
        match event.kind:
            case "attempt.closed" if event.body.get("cause") == "preempted" and job is not None:
                self._lost_jobs[job] += 1
            case "slice.intended":
                _remember(self._zone_of, event.id, str(event.body.get("zone", "")))
            case "slice.lost" | "slice.preempted" if event.id not in self._lost_slices:
                # Of one loss both may tell: what a notice announces is often seen, too, before it is deleted.
                _remember(self._lost_slices, event.id, event.kind)
                self._lost += 1
                self._lost_zones[self._zone_of.get(event.id, "")] += 1
                self._lost_places[self._place_of.get(event.id, event.id)] += 1
            case "job.succeeded" | "job.failed" | "job.cancelled":
                self._ended[verb] += 1
            case _:
                pass
        if event.kind in _IDLE_KINDS:
            return NOTHING
        self._events.appendleft(
            EventRow(seq=event.seq, at=event.at, kind=event.kind, id=event.id, job=job, body=event.body)
        )
        return _STALE_BY.get(noun, NOTHING)

    def _job(self, noun: str, event: EventView) -> str | None:
        if noun == "job":
            return event.id
        if noun == "attempt" and "job" in event.body:
            _remember(self._job_of, event.id, str(event.body["job"]))
        attempt = event.id if noun == "attempt" else str(event.body.get("attempt", ""))
        return self._job_of.get(attempt)

    # --- out ---
    @property
    def any_running(self) -> bool:
        return any(job.state == "running" for job in self._jobs.values())

    def default_selection(self) -> str | None:
        """Whose log is shown before the reader chose: a job that runs, else the newest there is."""
        jobs = sorted(self._jobs.values(), key=lambda job: (job.state == "running", job.created_at), reverse=True)
        return jobs[0].id if jobs else None

    def job(self, id: str | None) -> JobView | None:
        return self._jobs.get(id or "")

    def frame(self, now: float, *, words: str = "", selected: str | None = None) -> Frame:
        """What there is to see at `now`. `words` hides the rows that do not hold each of them."""
        slices = [self._slice_row(each, now) for each in self._slices]
        jobs = [self._job_row(each, now) for each in self._jobs.values()]
        wanted = words.casefold().split()
        tags = {job.id: job.tags for job in self._jobs.values()}
        shown = [row for row in slices if _fits(wanted, _slice_words(row), tags.get(row.job or "", ()))]
        events = [row for row in self._events if _fits(wanted, (row.kind, row.id, row.job or ""))]
        return Frame(
            at=now,
            since=self.since,
            server=self.server,
            away=self.away,
            filter=words,
            totals=self._totals(slices, jobs),
            zones=self._zones(shown),
            jobs=tuple(row for row in jobs if _fits(wanted, _job_words(row), tags[row.id])),
            queues=tuple(self._queue_row(each, jobs) for each in self._queues),
            events=tuple(events),
            selected=selected,
            log=self.log.lines(),
        )

    def _zones(self, rows: Sequence[SliceRow]) -> tuple[ZoneRow, ...]:
        by_zone: dict[str, list[SliceRow]] = {}
        for row in rows:
            by_zone.setdefault(row.zone, []).append(row)
        return tuple(
            ZoneRow(
                zone=zone,
                busy=sum(map(_busy, found)),
                free=sum(map(_free, found)),
                coming=_count(found, COMING),
                leaving=_count(found, LEAVING),
                broken=_count(found, BROKEN),
                preemptions=self._lost_zones[zone],
                slices=tuple(sorted(found, key=lambda row: (not _busy(row), row.title))),
            )
            for zone, found in sorted(by_zone.items())
        )

    def _totals(self, slices: Sequence[SliceRow], jobs: Sequence[JobRow]) -> Totals:
        said = [job.progress for job in jobs if job.state == "running" and job.progress is not None]
        return Totals(
            slices=len(slices),
            chips=sum(row.chips for row in slices),
            busy=sum(map(_busy, slices)),
            free=sum(map(_free, slices)),
            coming=_count(slices, COMING),
            leaving=_count(slices, LEAVING),
            broken=_count(slices, BROKEN),
            running=sum(job.state == "running" for job in jobs),
            provisioning=sum(job.state == "provisioning" for job in jobs),
            # The list of jobs is cut where many wait; the queues know how many.
            queued=max(sum(queue.waiting for queue in self._queues), sum(job.state == "queued" for job in jobs)),
            quiet=sum(job.quiet for job in jobs),
            succeeded=self._ended["succeeded"],
            failed=self._ended["failed"],
            cancelled=self._ended["cancelled"],
            preemptions=self._lost,
            samples=sum(each.samples or 0.0 for each in said),
            shards=sum(each.shards or 0.0 for each in said),
        )

    def _slice_row(self, slice: SliceView, now: float) -> SliceRow:
        job = self._jobs.get(slice.job or "")
        return SliceRow(
            id=slice.id,
            title=slice.title or slice.id,
            zone=slice.zone,
            pool=slice.pool,
            accelerator=slice.accelerator,
            chips=slice.chips,
            state=slice.state,
            spot=slice.spot,
            job=slice.job,
            job_name="" if job is None else job.name or job.kind,
            user=slice.user,
            progress=None if job is None else _share(job, now),
            age_s=max(0.0, now - slice.made_at),
            preemptions=max(self._lost_jobs[slice.job or ""], self._lost_places[slice.title or slice.id]),
            why=slice.why or slice.arriving,
        )

    def _job_row(self, job: JobView, now: float) -> JobRow:
        progress = _share(job, now)
        return JobRow(
            id=job.id,
            name=job.name or job.kind,
            state=job.state,
            cause=job.cause,
            stopping=job.cancel_requested and job.state in LIVE,
            quiet=job.state == "running" and progress is not None and progress.said_s > QUIET_S,
            queue=job.queue,
            user=job.user,
            on=job.slice or ",".join(job.on),
            stage=job.stage,
            progress=progress,
            age_s=max(0.0, now - job.created_at),
            ran_s=None if job.started_at is None else max(0.0, (job.finished_at or now) - job.started_at),
            preemptions=self._lost_jobs[job.id],
            reason=job.reason,
        )

    def _queue_row(self, queue: QueueView, jobs: Sequence[JobRow]) -> QueueRow:
        return QueueRow(
            name=queue.name,
            waiting=queue.waiting,
            running=sum(job.queue == queue.name and job.state == "running" for job in jobs),
            quota_chips=queue.quota_chips,
            weight=queue.weight,
            paused=queue.paused,
        )


def _remember(known: dict[str, str], id: str, what: str) -> None:
    known[id] = what
    if len(known) > KNOWN_MAX:
        del known[next(iter(known))]


def _share(job: JobView, now: float) -> Share | None:
    said = job.progress
    if said is None:
        return None
    return Share(
        done=said.done,
        total=said.total,
        samples=said.metrics.get(SAMPLES),
        shards=said.metrics.get(SHARDS),
        metrics={name: value for name, value in said.metrics.items() if name not in (SAMPLES, SHARDS)},
        said_s=max(0.0, now - said.at),
    )


def _busy(row: SliceRow) -> bool:
    return row.state == "ready" and row.job is not None


def _free(row: SliceRow) -> bool:
    return row.state == "ready" and row.job is None


def _count(rows: Sequence[SliceRow], states: Sequence[str]) -> int:
    return sum(row.state in states for row in rows)


def _slice_words(row: SliceRow) -> Sequence[str]:
    return (
        row.id,
        row.title,
        row.zone,
        row.pool,
        row.accelerator,
        row.state,
        row.job or "free",
        row.job_name,
        row.user or "",
    )


def _job_words(row: JobRow) -> Sequence[str]:
    return (row.id, row.name, row.state, row.cause or "", row.queue, row.user, row.on)


def _fits(wanted: Sequence[str], words: Sequence[str], more: Sequence[str] = ()) -> bool:
    text = "\n".join((*words, *more)).casefold()
    return all(word in text for word in wanted)


# --- the log of one job ---
class LogTail:
    """The last lines of a job, put together from chunks; what a line replaced with a carriage return is not shown."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self._open: dict[tuple[str, int, str], str] = {}
        self._hosts: set[int] = set()

    @classmethod
    def of(cls, line: str) -> LogTail:
        """One line that no job wrote."""
        made = cls()
        made._lines.append(line)
        return made

    def add(self, chunk: LogChunk, data: bytes) -> None:
        source = (chunk.attempt, chunk.rank, chunk.stream)
        self._hosts.add(chunk.rank)
        if chunk.dropped:
            self._lines.append(f"[{chunk.dropped} bytes of {chunk.stream} are lost]")
        *whole, rest = (self._open.pop(source, "") + data.decode("utf-8", "replace")).split("\n")
        for line in whole:
            self._lines.append(self._marked(source, line))
        if rest:
            self._open[source] = rest[-LINE_CHARACTERS:]

    def _marked(self, source: tuple[str, int, str], line: str) -> str:
        text = line.rstrip("\r").rpartition("\r")[2]
        return f"[host {source[1]}] {text}" if len(self._hosts) > 1 else text

    def lines(self) -> tuple[str, ...]:
        return (*self._lines, *(self._marked(source, rest) for source, rest in self._open.items()))
