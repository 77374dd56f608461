"""What a process test saw, as a history the rules can judge; and the judgement itself.

Tests of this folder record what they sent, wrote, planted and read with an `Evidence`, never what the server says of
itself, and call `prove` with the rules that this puts to the test: each must have had a premise and hold.
`test_rules` looks that every rule of real processes is proved somewhere. It must not repair or excuse anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from penstock.domain.invariants.history import History, Recorder
from penstock.domain.invariants.rules import check
from penstock.domain.nouns import Event
from penstock.ports.store import Reader
from penstock.store.sqlite import SqliteStore
from penstock.wire.api import LogChunk
from tests.process.installation import SystemClock

_PAGE: Final = 10_000


class Evidence(Recorder):
    """A history in the making. Events are read from the store's file by another connection than the server's."""

    def __init__(self, store: Path | None = None) -> None:
        super().__init__(History(), self._last_seq, lambda: time.monotonic() if self.at is None else self.at)
        self.at: float | None = None  #: when what is recorded next happened, if not now
        self._store = store

    def read_events(self) -> list[Event]:
        """All that is committed by now."""
        if self._store is not None:
            self.history.events = events_of(self._store)
        return self.history.events

    def _last_seq(self) -> int:
        events = self.read_events()
        return events[-1].seq if events else 0

    def written(self, stream: str, size: int, sha256: str) -> None:
        self.world("log.written", stream, bytes=size, sha256=sha256)

    def read_whole(self, stream: str, size: int, sha256: str) -> None:
        """One stream as `tpu logs` gives it: without a marker there is no gap."""
        self.client("log.read.ok", stream, parts=[[0, size, 0]], sha256=sha256)

    def read_pieces(self, stream: str, chunks: Iterable[tuple[LogChunk, bytes]]) -> None:
        """One stream as its events give it, with the offset of each and the marks for what is missing."""
        digest, parts, missing = hashlib.sha256(), [], 0
        for chunk, data in chunks:
            if chunk.dropped:
                missing = chunk.dropped
                continue
            parts.append([chunk.offset, len(data), missing])
            digest.update(data)
            missing = 0
        self.client("log.read.ok", stream, parts=parts, sha256=digest.hexdigest())

    def prove(self, *rules: str) -> dict[str, int]:
        """How often each rule was put to the test: at least once, and none is broken."""
        self.read_events()
        report = check(self.history, rules=rules)
        assert report.violations == [], "\n".join(str(each) for each in report.violations)
        assert all(report.premises[rule] > 0 for rule in rules), f"never put to the test: {report.premises}"
        return report.premises


def events_of(store: Path) -> list[Event]:
    """What an SQLite file holds, read as anybody could."""

    def look(reader: Reader) -> list[Event]:
        events: list[Event] = []
        while page := reader.events(events[-1].seq if events else 0, _PAGE):
            events += page
        return events

    async def read() -> list[Event]:
        opened = SqliteStore.open(store, SystemClock())
        try:
            return await opened.read(look)
        finally:
            await opened.close()

    return asyncio.run(read())
