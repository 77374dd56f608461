"""Where log bytes are between the host that wrote them and the bucket: in memory at once, durable soon after.

`server.logs` hands it what agents post and reads it for followers. A stream is addressed by offset, so a chunk may come
twice, late or after a restart and is kept once; where a stream durably ends is read back from the names of its objects.
All readers share the same pieces. It keeps no byte for ever: what is durable leaves memory first, and what is not makes
the agent wait. It must not know who may write or read.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from penstock.domain import limits
from penstock.ports.clock import Clock
from penstock.ports.objects import AlreadyThere, Objects, ObjectsError
from penstock.wire.agent import LogAck
from penstock.wire.api import LogChunk

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

logger = logging.getLogger(__name__)

STREAMS: Final = ("out", "err", "log")
#: A frame that every zstd reader skips; ours tells size and times of arrival of what follows.
_SKIPPED: Final = 0x184D2A50
_THREAD_BYTES: Final = 64 << 10  #: what is compressed beside the event loop: less costs less than the way to a thread
_OVERHEAD: Final = 300  #: bytes of memory a piece costs beside its data
_TAILS_MAX: Final = 4096  #: streams in memory whose bytes are all durable
_DECODED_MAX: Final = 8  #: objects kept decoded for readers of the same place
_ENCODER: Final = msgspec.json.Encoder()


class Full(Exception):
    """The stream has reached its cap: nothing more of it is taken."""


class Slow(Exception):
    """So much of the stream waits to be durable that the agent must wait too."""


class Stream(NamedTuple):
    """One stream of one host of one attempt."""

    job: str
    attempt: str
    rank: int
    name: str

    @property
    def prefix(self) -> str:
        return f"{job_prefix(self.job)}{self.attempt}/{self.rank}/{self.name}/"

    def path(self, offset: int) -> str:
        return f"{self.prefix}{offset:016d}.zst"


def job_prefix(job: str) -> str:
    return f"jobs/{job}/log/"


def parse_path(path: str) -> tuple[Stream, int] | None:
    """The stream and offset an object's name stands for; None for what is not a piece of a log."""
    parts = path.split("/")
    if len(parts) != 7 or not parts[6].endswith(".zst"):
        return None
    rank, offset = parts[4], parts[6].removesuffix(".zst")
    if not (rank.isdecimal() and offset.isdecimal()) or parts[5] not in STREAMS:
        return None
    return Stream(parts[1], parts[3], int(rank), parts[5]), int(offset)


class Piece:
    """Bytes as they arrived. `event` is made once for all followers."""

    __slots__ = ("_event", "at", "data", "offset")

    def __init__(self, at: float, offset: int, data: bytes) -> None:
        self.at = at
        self.offset = offset
        self.data = data
        self._event: bytes | None = None

    @property
    def end(self) -> int:
        return self.offset + len(self.data)

    def since(self, position: int) -> Piece:
        """The part of it from `position` on."""
        return self if position <= self.offset else Piece(self.at, position, self.data[position - self.offset :])

    def event(self, stream: Stream) -> bytes:
        """Itself as JSON: text when it is UTF-8, else base64, so that a reader gets back these very bytes."""
        if self._event is None:
            text, encoded = "", ""
            try:
                text = self.data.decode()
            except UnicodeDecodeError:
                # msgspec writes bytes as base64.
                encoded = _ENCODER.encode(self.data)[1:-1].decode()
            chunk = LogChunk(
                attempt=stream.attempt,
                rank=stream.rank,
                stream=stream.name,
                offset=self.offset,
                text=text,
                base64=encoded,
                at=self.at,
            )
            self._event = _ENCODER.encode(chunk)
        return self._event


# --- objects ---
class _Header(msgspec.Struct, array_like=True):
    size: int
    marks: list[tuple[float, int]]  #: (when it arrived, bytes)


def pack(pieces: Sequence[Piece]) -> bytes:
    """Pieces that follow each other as one object."""
    data = b"".join(piece.data for piece in pieces)
    header = _ENCODER.encode(_Header(len(data), [(piece.at, len(piece.data)) for piece in pieces]))
    return struct.pack("<II", _SKIPPED, len(header)) + header + zstd.compress(data, 3)


def _header(packed: bytes) -> _Header:
    magic, length = struct.unpack_from("<II", packed)
    if magic != _SKIPPED:
        raise ValueError("it has no header")
    return msgspec.json.decode(packed[8 : 8 + length], type=_Header)


def unpack(packed: bytes, offset: int) -> list[Piece]:
    data = zstd.decompress(packed)
    pieces = []
    at = 0
    for arrived, length in _header(packed).marks:
        pieces.append(Piece(arrived, offset + at, data[at : at + length]))
        at += length
    return pieces


class Tail:
    """The end of one stream: all that is not durable, and some that is."""

    __slots__ = ("_offsets", "cost", "durable", "end", "flushing", "pieces", "start", "stored", "stream", "timer")

    def __init__(self, stream: Stream, end: int, stored: int) -> None:
        self.stream = stream
        self.start = self.durable = self.end = end
        self.stored = stored  #: bytes kept so far, at most; without what was dropped
        self.pieces: list[Piece] = []
        self._offsets: list[int] = []
        self.cost = 0
        self.timer: asyncio.TimerHandle | None = None
        self.flushing: asyncio.Task[None] | None = None

    @property
    def pending(self) -> int:
        """Bytes that are not durable; less than `end - durable` where some were dropped."""
        first = bisect_right(self._offsets, self.durable) - 1
        return sum(len(piece.since(self.durable).data) for piece in self.pieces[max(0, first) :])

    def add(self, at: float, offset: int, data: bytes) -> None:
        for place in range(0, len(data), limits.LOG_PIECE_BYTES):
            piece = Piece(at, offset + place, data[place : place + limits.LOG_PIECE_BYTES])
            self.pieces.append(piece)
            self._offsets.append(piece.offset)
            self.cost += len(piece.data) + _OVERHEAD
        self.end = offset + len(data)
        self.stored += len(data)

    def at(self, position: int) -> Piece | None:
        """What there is from a position on, which is not below `start`; it begins later where bytes were dropped."""
        place = bisect_right(self._offsets, position) - 1
        if place >= 0 and self.pieces[place].end > position:
            return self.pieces[place].since(position)
        return self.pieces[place + 1] if place + 1 < len(self.pieces) else None

    def next_object(self) -> list[Piece]:
        """The first pieces that are not durable and follow each other, about as many as one object should hold."""
        found: list[Piece] = []
        size = 0
        for piece in self.pieces[max(0, bisect_right(self._offsets, self.durable) - 1) :]:
            rest = piece.since(self.durable)
            if not rest.data:
                continue
            if found and (rest.offset != found[-1].end or size >= limits.LOG_OBJECT_BYTES):
                break
            found.append(rest)
            size += len(rest.data)
        return found

    def forget(self, kept: int) -> None:
        """Let durable pieces go until no more than `kept` bytes are left."""
        count, cost = 0, self.cost
        while count < len(self.pieces) and self.pieces[count].end <= self.durable and cost > kept:
            cost -= len(self.pieces[count].data) + _OVERHEAD
            count += 1
        if count:
            self.start = self.pieces[count - 1].end
            del self.pieces[:count], self._offsets[:count]
            self.cost = cost

    def jump(self, end: int) -> None:
        """Another server has made the stream durable up to here: what is held is no news."""
        self.pieces.clear()
        self._offsets.clear()
        self.cost = 0
        self.start = self.durable = self.end = end


class Topic:
    """What followers of one job wait on."""

    def __init__(self) -> None:
        self.bell = asyncio.Event()
        self.version = 0
        self.followers = 0
        self.ended = False
        self.streams: set[Stream] = set()

    def ring(self) -> None:
        self.version += 1
        self.bell.set()
        self.bell = asyncio.Event()


class LogBook:
    """The streams of one server."""

    def __init__(self, objects: Objects, clock: Clock) -> None:
        self._objects = objects
        self._clock = clock
        self._tails: dict[Stream, Tail] = {}  #: least recently written first
        self._opening: dict[Stream, asyncio.Task[Tail]] = {}
        self._topics: dict[str, Topic] = {}
        self._decoded: dict[str, asyncio.Task[list[Piece]]] = {}
        self._cost = 0
        self.drops = 0  #: how often a stream left memory: whoever listed the bucket before may have to look again

    # --- writing ---
    async def append(
        self, stream: Stream, offset: int, data: bytes, *, gap: bool = False, last: bool = False
    ) -> LogAck:
        """Take what is new of a chunk and say how far the stream is durable and received. `last`: make it durable."""
        tail = await self._open(stream)
        if offset > tail.end:
            await self._look_again(tail)
        if tail.end < offset and not gap:
            return LogAck(tail.durable, tail.end)
        fresh = data[max(0, tail.end - offset) :]
        if fresh:
            if tail.stored + len(fresh) > limits.LOG_BYTES_MAX + limits.LOG_MARK_BYTES_MAX:
                raise Full(f"{limits.LOG_BYTES_MAX} bytes of {stream.name} are kept already")
            await self._make_room(tail)
            # While we waited, another post may have brought the same bytes.
            fresh = data[max(0, tail.end - offset) :]
        if fresh:
            self._take(tail, max(offset, tail.end), fresh)
        if last:
            await self._settle(tail)
        return LogAck(tail.durable, tail.end)

    def _take(self, tail: Tail, offset: int, data: bytes) -> None:
        before = tail.cost
        tail.add(self._clock.now(), offset, data)
        self._cost += tail.cost - before
        self._tails.pop(tail.stream, None)
        self._tails[tail.stream] = tail
        topic = self.topic(tail.stream.job)
        topic.streams.add(tail.stream)
        topic.ring()
        self._flush_later(tail)
        self._shrink()

    async def _open(self, stream: Stream) -> Tail:
        tail = self._tails.get(stream)
        if tail is not None:
            return tail
        opening = self._opening.get(stream)
        if opening is None:
            opening = self._opening[stream] = asyncio.create_task(self._recover(stream))
            opening.add_done_callback(lambda _: self._opening.pop(stream, None))
        found = await asyncio.shield(opening)
        return self._tails.setdefault(stream, found)

    async def _recover(self, stream: Stream) -> Tail:
        """Where the stream durably ends: after the last object there is."""
        offsets = sorted(parsed[1] for path in await self._objects.list(stream.prefix) if (parsed := parse_path(path)))
        if not offsets:
            return Tail(stream, 0, 0)
        end = await self._end_of(stream, offsets[-1])
        bounds = zip(offsets, [*offsets[1:], end], strict=True)
        most = limits.LOG_OBJECT_BYTES + limits.LOG_PIECE_BYTES
        return Tail(stream, end, sum(min(later - earlier, most) for earlier, later in bounds))

    async def _end_of(self, stream: Stream, offset: int) -> int:
        path = stream.path(offset)
        stored = await self._objects.get(path)
        if stored is None:
            raise ObjectsError(f"{path}: it was listed and cannot be read")
        try:
            return offset + _header(stored.data).size
        except (ValueError, struct.error, msgspec.MsgspecError) as error:
            raise ObjectsError(f"{path}: it is not a piece of a log ({error})") from error

    async def _look_again(self, tail: Tail) -> None:
        """A chunk beyond the end: perhaps another server took what lies between, and made it durable."""
        known = await self._recover(tail.stream)
        if known.end > tail.end:
            self._cost -= tail.cost
            tail.jump(known.end)
            tail.stored = known.stored

    async def _settle(self, tail: Tail) -> None:
        """Wait until all of it is stored, for as long as one call may take; the answer tells how far it came."""
        goal, until = tail.end, self._clock.steady() + limits.LOG_SETTLE_S
        while tail.durable < goal and (left := until - self._clock.steady()) > 0:
            self._flush_now(tail)
            if tail.flushing is None:
                return
            await asyncio.wait((tail.flushing,), timeout=left)
            if tail.timer is not None:  # it could not be stored, and will be tried again
                return

    async def _make_room(self, tail: Tail) -> None:
        if tail.pending <= limits.LOG_PENDING_BYTES_MAX:
            return
        self._flush_now(tail)
        if tail.flushing is not None:
            await asyncio.wait((tail.flushing,), timeout=limits.CALL_TIMEOUT_S)
        if tail.pending > limits.LOG_PENDING_BYTES_MAX:
            raise Slow(f"{tail.pending} bytes of this stream wait to be stored")

    # --- making durable ---
    def _flush_later(self, tail: Tail) -> None:
        if tail.flushing is not None:
            return
        if tail.end - tail.durable >= limits.LOG_OBJECT_BYTES:
            self._flush_now(tail)
        elif tail.timer is None:
            loop = asyncio.get_running_loop()
            tail.timer = loop.call_later(limits.LOG_FLUSH_S, self._flush_now, tail)

    def _flush_now(self, tail: Tail) -> None:
        if tail.timer is not None:
            tail.timer.cancel()
            tail.timer = None
        if tail.flushing is None and tail.durable < tail.end:
            tail.flushing = asyncio.create_task(self._flush(tail))

    async def _flush(self, tail: Tail) -> None:
        """Store what is there now; what comes meanwhile has its own time."""
        goal = tail.end
        try:
            while tail.durable < goal:
                await self._store_one(tail)
        except ObjectsError as error:
            logger.warning("log bytes cannot be stored yet: %s", error)
        finally:
            tail.flushing = None
            if tail.durable < tail.end:
                self._flush_later(tail) if tail.durable >= goal else self._retry(tail)
            self._shrink()

    def _retry(self, tail: Tail) -> None:
        if tail.timer is None:
            tail.timer = asyncio.get_running_loop().call_later(limits.LOG_FLUSH_S, self._flush_now, tail)

    async def _store_one(self, tail: Tail) -> None:
        pieces = tail.next_object()
        offset, end = pieces[0].offset, pieces[-1].end
        large = end - offset > _THREAD_BYTES
        packed = await asyncio.to_thread(pack, pieces) if large else pack(pieces)
        try:
            await self._objects.put_new(tail.stream.path(offset), packed)
        except AlreadyThere:
            # Ours, its answer lost; or another server's, of the same bytes but perhaps not as many.
            end = await self._end_of(tail.stream, offset)
        before = tail.cost
        if end > tail.end:
            tail.jump(end)
        else:
            tail.durable = end
            tail.forget(limits.LOG_KEPT_BYTES)
        self._cost += tail.cost - before

    def _shrink(self) -> None:
        """Keep memory bounded: the streams that were written longest ago leave first, if they are durable."""
        if self._cost <= limits.LOG_MEMORY_BYTES_MAX and len(self._tails) <= _TAILS_MAX:
            return
        for stream, tail in list(self._tails.items()):
            before = tail.cost
            tail.forget(0)
            self._cost += tail.cost - before
            if tail.durable == tail.end and tail.flushing is None:
                self._drop(stream)
            if self._cost <= limits.LOG_MEMORY_BYTES_MAX // 2 and len(self._tails) <= _TAILS_MAX // 2:
                return

    def _drop(self, stream: Stream) -> None:
        del self._tails[stream]
        self.drops += 1
        topic = self._topics.get(stream.job)
        if topic is not None:
            topic.streams.discard(stream)
            self._forget_topic(stream.job, topic)

    def heed(self, ended: Iterable[str], closed: Iterable[str]) -> None:
        """Jobs ended: their followers may leave. Attempts closed: what their hosts sent is complete, so store it."""
        gone = set(closed)
        for tail in list(self._tails.values()) if gone else ():
            if tail.stream.attempt in gone:
                self._flush_now(tail)
        for job in ended:
            topic = self._topics.get(job)
            if topic is not None:
                topic.ended = True
                topic.ring()

    async def close(self) -> None:
        """Make everything durable that can be."""
        for tail in self._tails.values():
            self._flush_now(tail)
        flushing = [tail.flushing for tail in self._tails.values() if tail.flushing is not None]
        if flushing:
            await asyncio.wait(flushing, timeout=limits.CALL_TIMEOUT_S)
        for tail in self._tails.values():
            if tail.timer is not None:
                tail.timer.cancel()

    # --- reading ---
    def topic(self, job: str) -> Topic:
        found = self._topics.get(job)
        if found is None:
            found = self._topics[job] = Topic()
        return found

    def follow(self, job: str) -> Callable[[], None]:
        """Keep a job's topic while somebody reads; the answer ends it."""
        topic = self.topic(job)
        topic.followers += 1

        def leave() -> None:
            topic.followers -= 1
            self._forget_topic(job, topic)

        return leave

    def _forget_topic(self, job: str, topic: Topic) -> None:
        if not topic.followers and not topic.streams and self._topics.get(job) is topic:
            del self._topics[job]

    def tail(self, stream: Stream) -> Tail | None:
        return self._tails.get(stream)

    async def stored(self, prefix: str) -> dict[Stream, list[int]]:
        """The offsets of all objects under a prefix, in order, by stream."""
        found: dict[Stream, list[int]] = {}
        for path in await self._objects.list(prefix):
            parsed = parse_path(path)
            if parsed is not None:
                found.setdefault(parsed[0], []).append(parsed[1])
        for offsets in found.values():
            offsets.sort()
        return found

    async def decoded(self, stream: Stream, offset: int) -> list[Piece]:
        """The pieces of one object; readers of the same place share them."""
        path = stream.path(offset)
        reading = self._decoded.pop(path, None)
        if reading is None or (reading.done() and (reading.cancelled() or reading.exception() is not None)):
            reading = asyncio.create_task(self._decode(path, offset))
        self._decoded[path] = reading
        if len(self._decoded) > _DECODED_MAX:
            del self._decoded[next(iter(self._decoded))]
        return await asyncio.shield(reading)

    async def _decode(self, path: str, offset: int) -> list[Piece]:
        stored = await self._objects.get(path)
        if stored is None:
            return []  # retention took it since it was listed; the reader sees a gap
        try:
            large = len(stored.data) > _THREAD_BYTES
            return await asyncio.to_thread(unpack, stored.data, offset) if large else unpack(stored.data, offset)
        except (ValueError, struct.error, msgspec.MsgspecError, zstd.ZstdError) as error:
            raise ObjectsError(f"{path}: it is not a piece of a log ({error})") from error
