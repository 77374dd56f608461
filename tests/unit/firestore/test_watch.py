"""Every document once, a page at a time, whatever the listen shows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from google.cloud.firestore_v1.types import document as messages

from penstock.firestore.database import PAGE, Change, Database, Trouble, document_of
from penstock.firestore.fields import Document
from penstock.firestore.watch import HANDS, WINDOW, Watch


class Backlog:
    """Pending documents by the thousand, of which it counts how many are out at once."""

    def __init__(self, count: int) -> None:
        self.waiting = {f"d{number:05}": self._raw(f"d{number:05}") for number in range(count)}
        self.out: set[str] = set()
        self.most = 0
        self.broken = 2  #: listens that break at once, pages too

    def _raw(self, name: str) -> Any:
        raw = messages.Document.pb()(name=name)
        raw.update_time.seconds = 1
        return raw

    def _show(self, names: Sequence[str]) -> list[Any]:
        self.out.update(names)
        self.most = max(self.most, len(self.out))
        return [self.waiting[name] for name in names]

    async def listen(self, statuses: Sequence[str], limit: int) -> AsyncIterator[Change]:
        if self.broken:
            self.broken -= 1
            raise Trouble("broken")
        for raw in self._show(sorted(self.waiting)[:limit]):
            yield Change("document", raw, raw.name)
        yield Change("current")
        await asyncio.Event().wait()

    async def page(self, statuses: Sequence[str], *, after: str | None, limit: int) -> list[Document]:
        await asyncio.sleep(0)
        if self.broken:
            self.broken -= 1
            raise Trouble("broken")
        names = [name for name in sorted(self.waiting) if after is None or name > after][:limit]
        return [document_of(raw) for raw in self._show(names)]

    def gone(self, name: str) -> None:
        del self.waiting[name]
        self.out.discard(name)


def test_a_backlog_is_handled_once_each_and_never_held_as_a_whole() -> None:
    count = 3_000
    backlog = Backlog(count)
    handled: Counter[str] = Counter()
    busy = [0, 0]
    done = asyncio.Event()

    async def handle(document: Document) -> None:
        busy[0] += 1
        busy[1] = max(busy)
        await asyncio.sleep(0)
        handled[document.name] += 1
        busy[0] -= 1
        backlog.gone(document.name)
        if not backlog.waiting:
            done.set()

    async def run() -> None:
        watch = Watch(cast(Database, backlog), ("pending",), handle)
        working = asyncio.create_task(watch.run())
        await asyncio.wait_for(done.wait(), 60)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert watch.listening.is_set()

    asyncio.run(run())
    assert handled == Counter(dict.fromkeys(handled, 1))
    assert len(handled) == count
    assert busy[1] <= HANDS
    assert backlog.most <= PAGE + WINDOW + HANDS
