"""What people read of logs: one stream as bytes, or all streams of a job merged by arrival, live or to the end.

Routes for users and the one by which agents append. Readers walk from the bucket into memory without noticing where one
ends and the other begins; the id of each event says how far every stream was read, so that a reader goes on exactly
there after any restart. Lost bytes are said, never skipped in silence (S18). It must not keep bytes: `server.logbook`
does.
"""

from __future__ import annotations

import asyncio
import heapq
import re
from bisect import bisect_right
from collections.abc import AsyncIterator
from typing import Final

import msgspec
from typing_extensions import override

from penstock.controller.jobs import NotFound
from penstock.domain import limits
from penstock.domain.lifecycle import TERMINAL_JOB_STATES
from penstock.domain.nouns import Role
from penstock.ports.store import Reader
from penstock.server.agents import bells, bound_attempt
from penstock.server.logbook import STREAMS, Full, LogBook, Piece, Slow, Stream, Tail, job_prefix
from penstock.server.routing import ID_PATTERN, Call, Events, Parameter, Raw, Refusal, Reply, Route, Sent
from penstock.server.service import Service
from penstock.wire.agent import LogAck
from penstock.wire.api import LogChunk

#: A follower that was not woken looks by itself whether its job has ended: a lost wake-up must not hold it for ever.
LOOK_S: Final = 30.0
#: What an id of an event is made of: attempt, then rank, letter of the stream and offset of each.
_ID_PART: Final = re.compile(
    r"(?P<attempt>[0-9a-z]+):(?P<places>[0-9]{1,9}[oel][0-9]{1,18}(,[0-9]{1,9}[oel][0-9]{1,18})*)"
)
_NAMES: Final = {name[0]: name for name in STREAMS}
_ID_CHARACTERS_MAX: Final = 60_000
_encode = msgspec.json.Encoder().encode


def _make_book(service: Service) -> LogBook:
    book = LogBook(service.objects, service.clock)
    bells(service).listeners.append(lambda news: book.heed(news.ended, news.closed))
    return book


def book(service: Service) -> LogBook:
    """The log book of this server. Whoever stops the server awaits its `close`, so that all bytes become durable."""
    return service.part(_make_book)


# --- where a reader stands ---
class Places:
    """How far each stream was read, as text that fits into the id of an event."""

    def __init__(self, text: str | None = None) -> None:
        self._offsets: dict[tuple[str, int, str], int] = {}
        self._parts: dict[str, dict[tuple[int, str], str]] = {}  #: attempt -> (rank, stream) -> its part of the text
        for part in text.split(";") if text else ():
            found = _ID_PART.fullmatch(part)
            if found is None:
                raise Refusal("conflict", "header Last-Event-ID: is not an id of this stream", field="last-event-id")
            for place in found["places"].split(","):
                rank, letter, offset = re.split(r"([oel])", place)
                self._move(found["attempt"], int(rank), _NAMES[letter], int(offset))

    def of(self, stream: Stream) -> int:
        return self._offsets.get((stream.attempt, stream.rank, stream.name), 0)

    def move(self, stream: Stream, offset: int) -> None:
        self._move(stream.attempt, stream.rank, stream.name, offset)

    def _move(self, attempt: str, rank: int, name: str, offset: int) -> None:
        self._offsets[attempt, rank, name] = offset
        self._parts.setdefault(attempt, {})[rank, name] = f"{rank}{name[0]}{offset}"

    @override
    def __str__(self) -> str:
        return ";".join(f"{attempt}:{','.join(parts.values())}" for attempt, parts in self._parts.items())


class Cursor:
    """A reader's place in one stream."""

    def __init__(self, book: LogBook, stream: Stream, position: int, offsets: list[int]) -> None:
        self._book = book
        self.stream = stream
        self.position = position
        self._offsets = offsets  #: of the objects there were when last listed
        self._drops = book.drops
        self._object: list[Piece] = []  #: the one being read
        self._place = 0

    async def next(self) -> Piece | None:
        """What comes at or after the position; None when there is nothing yet."""
        piece = self._in_object()
        while piece is None:
            tail = self._book.tail(self.stream)
            if tail is not None and self.position >= tail.start:
                piece = tail.at(self.position)
                if piece is not None or not (self._offsets and self._offsets[-1] >= self.position):
                    break
                # The bucket goes further than memory: another server serves this stream by now.
            if not await self._enter_object(tail):
                # Below what memory holds and nowhere in the bucket: it was taken away, and the reader is told so.
                piece = tail.at(tail.start) if tail is not None else None
                break
            piece = self._in_object()
        return piece

    def _in_object(self) -> Piece | None:
        while self._place < len(self._object):
            piece = self._object[self._place]
            if piece.end > self.position:
                return piece.since(self.position)
            self._place += 1
        self._object = []
        return None

    async def _enter_object(self, tail: Tail | None) -> bool:
        """Load the next object that holds something after the position; False when there is none."""
        if await self._load():
            return True
        if tail is None and self._drops == self._book.drops:
            return False  # nothing has left memory since the bucket was listed: there is no more
        self._drops = self._book.drops
        self._offsets = (await self._book.stored(self.stream.prefix)).get(self.stream, [])
        return await self._load()

    async def _load(self) -> bool:
        first = max(0, bisect_right(self._offsets, self.position) - 1)
        for offset in self._offsets[first:]:
            pieces = await self._book.decoded(self.stream, offset)
            if pieces and pieces[-1].end > self.position:
                self._object, self._place = pieces, 0
                return True
        return False


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which streams of a job a reader wants; None: all. With `tail`, only about so many bytes of the end of each."""

    attempt: str | None = None
    rank: int | None = None
    stream: str | None = None
    tail: int | None = None

    def fits(self, stream: Stream) -> bool:
        return (
            self.attempt in (None, stream.attempt)
            and self.rank in (None, stream.rank)
            and self.stream in (None, stream.name)
        )


class Reading:
    """One reader of one job."""

    def __init__(self, service: Service, job: str, wanted: Wanted, places: Places) -> None:
        self._service = service
        self._book = book(service)
        self._job = job
        self._wanted = wanted
        self.places = places
        self._cursors: dict[Stream, Cursor] = {}
        self._heads: list[tuple[float, Stream, Piece]] = []
        self._idle: set[Stream] = set()
        self._seen = -1
        self._ended: bool | None = None  #: None: nothing was looked at yet

    async def open(self) -> None:
        """Look what there is and read the beginning: a bucket that is away is told before an answer has begun."""
        ended = await self._has_ended()
        for stream, offsets in (await self._book.stored(job_prefix(self._job))).items():
            self._add(stream, offsets)
        await self._fill(list(self._idle))
        self._ended = ended

    async def pieces(self, *, follow: bool) -> AsyncIterator[tuple[Stream, Piece, int]]:
        """What was written, by arrival: the stream, the piece, and how many bytes before it are lost."""
        leave = self._book.follow(self._job)
        topic = self._book.topic(self._job)
        try:
            if self._ended is None:
                await self.open()
            ended = self._ended is True
            while True:
                bell, ended = topic.bell, ended or topic.ended
                if topic.version != self._seen or not self._heads:
                    self._seen = topic.version
                    for stream in topic.streams:
                        self._add(stream, [])
                    await self._fill(list(self._idle))
                if self._heads:
                    _, stream, piece = heapq.heappop(self._heads)
                    lost = piece.offset - self._cursors[stream].position
                    self._cursors[stream].position = piece.end
                    self.places.move(stream, piece.end)
                    yield stream, piece, lost
                    await self._fill([stream])
                elif ended or not follow or self._service.stopping.is_set():
                    return
                else:
                    ended = await self._wait(bell)
        finally:
            leave()

    def _add(self, stream: Stream, offsets: list[int]) -> None:
        if stream not in self._cursors and self._wanted.fits(stream):
            self._cursors[stream] = Cursor(self._book, stream, self._begin(stream, offsets), offsets)
            self._idle.add(stream)

    def _begin(self, stream: Stream, offsets: list[int]) -> int:
        """Where to begin in a stream. Of one that is only in the bucket, its last object is the end of it."""
        place = self.places.of(stream)
        if self._wanted.tail is None or place:
            return place
        held = self._book.tail(stream)
        if held is not None:
            return max(0, held.end - self._wanted.tail)
        return offsets[-1] if offsets else 0

    async def _fill(self, streams: list[Stream]) -> None:
        for stream in streams:
            piece = await self._cursors[stream].next()
            if piece is None:
                self._idle.add(stream)
            else:
                self._idle.discard(stream)
                heapq.heappush(self._heads, (piece.at, stream, piece))

    async def _wait(self, bell: asyncio.Event) -> bool:
        """Until something is new; whether the job has ended, as far as this costs nothing to know."""
        try:
            async with asyncio.timeout(LOOK_S):
                await bell.wait()
        except TimeoutError:
            return await self._has_ended()
        return False

    async def _has_ended(self) -> bool:
        return await self._service.store.read(_job_has_ended, self._job)

    # --- as it is sent ---
    async def events(self, *, follow: bool) -> AsyncIterator[Sent]:
        async for stream, piece, lost in self.pieces(follow=follow):
            if lost > 0:
                yield Sent("", "log", _encode(_lost(stream, piece.offset, lost)))
            yield Sent(str(self.places), "log", piece.event(stream))
        if not self._service.stopping.is_set():
            yield Sent(str(self.places), "end", b"{}")

    async def bytes(self) -> AsyncIterator[bytes]:
        async for stream, piece, lost in self.pieces(follow=False):
            if lost > 0:
                yield f"\n[penstock: {lost} bytes of {stream.name} are lost]\n".encode()
            yield piece.data


def _lost(stream: Stream, offset: int, lost: int) -> LogChunk:
    return LogChunk(attempt=stream.attempt, rank=stream.rank, stream=stream.name, offset=offset, dropped=lost)


def _job_has_ended(reader: Reader, id: str) -> bool:
    found = reader.jobs((id,))
    return not found or found[0].state in TERMINAL_JOB_STATES


# --- routes ---
async def read_logs(service: Service, call: Call) -> Reply:
    """A job's output: as bytes when `stream` and `host` name one stream, else as events, which end with the job."""
    job = await service.find_job(call, call.params["id"])
    attempt = call.query.get("attempt")
    if attempt is not None and attempt not in await service.store.read(_attempt_ids, job.id):
        raise NotFound("attempt", attempt)
    wanted = Wanted(
        attempt=attempt,
        rank=int(call.query["host"]) if "host" in call.query else None,
        stream=call.query.get("stream"),
        tail=int(call.query["tail"]) if "tail" in call.query else None,
    )
    follow = call.flag("follow")
    reading = Reading(service, job.id, wanted, Places(call.last_event_id))
    await reading.open()
    if wanted.rank is not None and wanted.stream is not None and not follow:
        return Raw(reading.bytes())
    return Events(reading.events(follow=follow))


def _attempt_ids(reader: Reader, job: str) -> list[str]:
    return [attempt.id for attempt in reader.attempts_of(job)]


async def append_log(service: Service, call: Call) -> LogAck:
    """Take a chunk of one stream at its offset; repeating it is harmless."""
    attempt, rank = await bound_attempt(service, call, late=True)
    said = int(call.query["rank"])
    if said != rank:
        raise Refusal("forbidden", f"query rank: {said} is another host's; this one is rank {rank}", field="rank")
    assert isinstance(call.body, bytes)
    stream = Stream(attempt.job, attempt.id, rank, call.query["stream"])
    try:
        offset, gap, last = int(call.query["offset"]), call.flag("gap"), call.flag("last")
        return await book(service).append(stream, offset, call.body, gap=gap, last=last)
    except Full as full:
        raise Refusal("too_large", f"body: {full}", advice="drop the rest and end with a marker") from full
    except Slow as slow:
        raise Refusal("unavailable", str(slow), advice="send it again later", retry_after_s=1.0) from slow


_HOST: Final = Parameter("host", "only this host, by its rank", "integer", least=0, most=1_000_000)
_STREAM: Final = Parameter("stream", "only this stream", choices=STREAMS)

ROUTES: Final = (
    Route(
        "GET",
        "/v1/jobs/{id}/logs",
        read_logs,
        gives="bytes",
        streams=True,
        query=(
            Parameter("follow", "go on until the job has ended", "boolean"),
            _HOST,
            _STREAM,
            Parameter("attempt", "only this attempt", pattern=ID_PATTERN),
            Parameter(
                "tail",
                "only about so many bytes of the end of each stream, and what comes",
                "integer",
                least=1,
                most=limits.LOG_BYTES_MAX,
            ),
        ),
        headers=(Parameter("last-event-id", "go on after this event", longest=_ID_CHARACTERS_MAX),),
    ),
    Route(
        "POST",
        "/v1/agent/attempts/{attempt}/logs",
        append_log,
        takes=bytes,
        gives=LogAck,
        role=Role.AGENT,
        body_max=limits.LOG_CHUNK_BYTES,
        body_optional=True,  # nothing new: only a question how far it is
        query=(
            Parameter("rank", "the host's rank in the attempt", "integer", required=True, least=0, most=1_000_000),
            _STREAM._replace(required=True, text="which stream"),
            Parameter(
                "offset", "where the chunk begins in its stream", "integer", required=True, least=0, most=1 << 50
            ),
            Parameter("gap", "what lies between is gone for good: mark it", "boolean"),
            Parameter("last", "its end: answer when all of it is durable", "boolean"),
        ),
    ),
)
