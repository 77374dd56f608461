"""A log book, its bucket and its readers without a server: what `test_logbook` and `test_logs` share."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import ObjectsError
from penstock.server.logbook import LogBook, Stream
from penstock.server.logs import Places, Reading, Wanted
from penstock.wire.api import LogChunk
from tests.unit.server.plant import Clock

OUT = Stream("j1", "a1", 0, "out")


class Broken:
    """Faults of a bucket: so many writes fail, before they take effect or after."""

    def __init__(self, before: int = 0, after: int = 0) -> None:
        self.left = {"before": before, "after": after}

    def _strike(self, when: str, verb: str) -> None:
        if verb == "put_new" and self.left[when]:
            self.left[when] -= 1
            raise ObjectsError(f"fault {when}")

    async def before(self, verb: str, path: str) -> None:
        self._strike("before", verb)

    async def after(self, verb: str, path: str) -> None:
        self._strike("after", verb)


class Shop:
    """A service as far as readers of logs see it: jobs end when the test says so."""

    def __init__(self, objects: MemoryObjects | None = None) -> None:
        self.objects = objects or MemoryObjects()
        self.clock = Clock()
        self.ended = False
        self.stopping = asyncio.Event()
        self.store = self
        self.book = LogBook(self.objects, self.clock)

    def part(self, _: object) -> LogBook:
        return self.book

    async def read(self, *_: object) -> bool:
        return self.ended

    def restart(self) -> None:
        """Die without a word, and start anew."""
        for tail in self.book._tails.values():
            if tail.timer is not None:
                tail.timer.cancel()
            if tail.flushing is not None:
                tail.flushing.cancel()
        self.book = LogBook(self.objects, self.clock)

    def reading(self, wanted: Wanted | None = None, after: str | None = None) -> Reading:
        return Reading(self, "j1", wanted or Wanted(), Places(after))  # type: ignore[arg-type]

    async def everything(self, stream: Stream = OUT) -> bytes:
        wanted = Wanted(attempt=stream.attempt, rank=stream.rank, stream=stream.name)
        return b"".join([piece async for piece in self.reading(wanted).bytes()])

    def end(self) -> None:
        self.ended = True
        self.book.heed(("j1",), ())


def content(event: bytes) -> bytes:
    chunk = msgspec.json.decode(event, type=LogChunk)
    return base64.b64decode(chunk.base64) if chunk.base64 else chunk.text.encode()


def play(story: Callable[[Shop], Any], shop: Callable[[], Shop] = Shop) -> None:
    async def act() -> None:
        made = shop()
        try:
            await story(made)
        finally:
            made.restart()

    asyncio.run(act())


async def until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not look():  # noqa: ASYNC110 (what is waited for cannot tell us)
            await asyncio.sleep(0.005)
