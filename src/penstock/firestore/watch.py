"""Documents that want something, each version handed on once: a narrow listen, and pages where more wait than it shows.

`firestore.bridge` has one for pending documents and cancel requests. The listen shows the first few by name; when it is
full, pages with a cursor go through all of them, so that a backlog of any size is in memory a page at a time and no
document waits behind the names before it. One listen for both: the emulator looks at the whole collection for each
listen at each write. It must not read what documents say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from penstock.firestore.database import PAGE, Database, Trouble, document_of, stamp_of
from penstock.firestore.fields import Document, Stamp
from penstock.firestore.patience import Patience

logger = logging.getLogger(__name__)

#: Documents a listen shows. The emulator sends all of them again for every write anywhere, and each may hold 1 MiB.
WINDOW: Final = 16
HANDS: Final = 32  #: documents handled at once
REMEMBERED: Final = 4_096  #: versions that were handed on: the same may be seen again until its write is seen
AGAIN_S: Final = 1.0  #: between two rounds through a backlog that does not shrink

Handler = Callable[[Document], Awaitable[None]]


class Watch:
    """Hands every document with one of these statuses to `handle`, at most `HANDS` at once, for ever."""

    def __init__(self, database: Database, statuses: Sequence[str], handle: Handler) -> None:
        self._database = database
        self._statuses = tuple(statuses)
        self._handle = handle
        self._seen: OrderedDict[str, Stamp] = OrderedDict()
        self._busy: set[str] = set()
        self._hands = asyncio.Semaphore(HANDS)
        self._backlog = asyncio.Event()
        self.listening = asyncio.Event()  #: set once the listen has shown what there is

    def look(self) -> None:
        """Go through all of them once more: a listen that died silently must not be the only way."""
        self._backlog.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(tasks))
            tasks.create_task(self._page(tasks))

    async def _listen(self, tasks: asyncio.TaskGroup) -> None:
        patience = Patience("listening for documents")
        while True:
            try:
                await self._listen_once(tasks, patience)
            except Trouble as trouble:
                await patience.rest(trouble)

    async def _listen_once(self, tasks: asyncio.TaskGroup, patience: Patience) -> None:
        window: set[str] = set()
        async with contextlib.aclosing(self._database.listen(self._statuses, WINDOW)) as changes:
            async for change in changes:
                match change.kind:
                    case "document":
                        window.add(change.name)
                        stamp = stamp_of(change.document)
                        if self._fresh(change.name, stamp):
                            await self._take(tasks, document_of(change.document))
                    case "left":
                        window.discard(change.name)
                    case "reset":
                        window.clear()
                    case "current":
                        patience.renew()
                        self.listening.set()
                    case _ if change.total != len(window):
                        raise Trouble(f"the listen shows {len(window)} of {change.total} documents")
                if len(window) >= WINDOW:
                    self._backlog.set()

    async def _page(self, tasks: asyncio.TaskGroup) -> None:
        patience = Patience("reading documents")
        while True:
            await self._backlog.wait()
            self._backlog.clear()
            after: str | None = None
            news = False
            try:
                while True:
                    page = await self._database.page(self._statuses, after=after, limit=PAGE)
                    patience.renew()
                    for document in page:
                        if self._fresh(document.name, document.stamp):
                            news = True
                            await self._take(tasks, document)
                    if len(page) < PAGE:
                        break
                    after = page[-1].name
            except Trouble as trouble:
                self._backlog.set()
                await patience.rest(trouble)
            if not news:
                await asyncio.sleep(AGAIN_S)

    def _fresh(self, name: str, stamp: Stamp) -> bool:
        return name not in self._busy and self._seen.get(name) != stamp

    async def _take(self, tasks: asyncio.TaskGroup, document: Document) -> None:
        """Start handling one; waits while all hands are busy, which is what holds the stream and the pages back."""
        self._busy.add(document.name)
        await self._hands.acquire()
        tasks.create_task(self._work(document))

    async def _work(self, document: Document) -> None:
        try:
            await self._handle(document)
        finally:
            self._hands.release()
            self._busy.discard(document.name)
            self._seen[document.name] = document.stamp
            self._seen.move_to_end(document.name)
            while len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
