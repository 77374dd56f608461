"""The bridge's loop: what Firestore shows becomes jobs, what Penstock tells becomes status, and nobody is forgotten.

`wiring.bridges` builds and runs it, as a process or inside `tpu serve`. Three things go on at once: the watch
(pending, cancel requests), the stream of events, and a slow look at documents that are taken and unfinished, a page at
a time. The look repairs whatever was missed, whoever missed it: a bridge that died, an event, a deleted document. Any
number of bridges may run on one collection. It must not keep anything that is not in Firestore or Penstock.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Final

from penstock.firestore.claim import Claims
from penstock.firestore.database import Database, Trouble
from penstock.firestore.desk import Desk
from penstock.firestore.fields import ACTIVE, CANCEL_REQUESTED, LOOK, PENDING, Document
from penstock.firestore.mirror import Entry, Mirror
from penstock.firestore.patience import Patience
from penstock.firestore.watch import Watch
from penstock.wire.api import EventView, JobView

logger = logging.getLogger(__name__)

SWEEP_PAGE: Final = 100  #: documents looked at in one round
SWEEP_S: Final = 10.0
LOOKS_AT_ONCE: Final = 16
UNCLAIMED: Final = 4_096  #: jobs whose events came before we knew whose they are
_STARTED: Final = "job.started"
_ENDED: Final = frozenset({"job.succeeded", "job.failed", "job.cancelled"})


class Bridge:
    """One bridge between one collection and one Penstock."""

    def __init__(self, database: Database, desk: Desk, *, me: str, sweep_s: float = SWEEP_S) -> None:
        self._database = database
        self._desk = desk
        self._sweep_s = sweep_s
        self._tasks: asyncio.TaskGroup | None = None
        self._early: OrderedDict[str, str] = OrderedDict()
        self._looks = asyncio.Semaphore(LOOKS_AT_ONCE)
        self._mirror = Mirror(database, desk.cancel, self._spawn)
        self._claims = Claims(database, desk, self._mirror, me)
        self._watch = Watch(database, (PENDING, CANCEL_REQUESTED), self._take)

    async def run(self) -> None:
        """Until cancelled. An error nobody expected ends it: whoever runs it starts another."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for work in (self._follow(), self._repair(), self._watch.run()):
                tasks.create_task(work)

    @property
    def listening(self) -> asyncio.Event:
        """Set once the watch has shown what there is."""
        return self._watch.listening

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)

    async def _take(self, document: Document) -> None:
        if document.status == CANCEL_REQUESTED:
            await self._claims.cancel(document)
            return
        await self._claims.pending(document)
        entry = self._mirror.entries.get(document.name)
        if entry is not None and entry.job is not None and self._early.pop(entry.job, None) is not None:
            await self._claims.look(entry)  # it went on while its id was on the way to us

    # --- what Penstock tells ---
    async def _follow(self) -> None:
        async for event in self._desk.follow():
            if event.kind != _STARTED and event.kind not in _ENDED:
                continue
            entry = self._mirror.by_job.get(event.id)
            if entry is None:
                self._early[event.id] = event.kind
                while len(self._early) > UNCLAIMED:
                    self._early.popitem(last=False)
            else:
                self._on_event(entry, event)

    def _on_event(self, entry: Entry, event: EventView) -> None:
        if event.kind == _STARTED and entry.attempt == 0:
            entry.attempt = 1
            self._claims.started(entry, event.at)
        else:
            self._spawn(self._look_at(entry, ended=event.kind in _ENDED))

    async def _look_at(self, entry: Entry, *, ended: bool) -> None:
        async with self._looks:
            await (self._claims.finish(entry) if ended else self._claims.look(entry))

    # --- what was missed ---
    async def _repair(self) -> None:
        """First everything once, without pause; then a page at a time."""
        patience = Patience("looking at documents")
        whole = False
        try_live = True
        after: str | None = None
        while True:
            try:
                if try_live:
                    await self._adopt_live()
                    try_live = False
                after = await self._sweep(after)
                patience.renew()
            except Trouble as trouble:
                await patience.rest(trouble)
                continue
            whole = whole or after is None
            if whole:
                await asyncio.sleep(self._sweep_s)
                self._watch.look()

    async def _sweep(self, after: str | None) -> str | None:
        """Look at one page of taken documents and at ours among them that are missing there; where the next begins."""
        page = await self._database.page(ACTIVE, after=after, limit=SWEEP_PAGE, fields=LOOK)
        last = page[-1].name if len(page) == SWEEP_PAGE else None
        there = {document.name for document in page}
        absent = [
            entry
            for name, entry in self._mirror.entries.items()
            if name not in there
            and not entry.working
            and entry.job is not None
            and (after is None or name > after)
            and (last is None or name <= last)
        ]
        async with asyncio.TaskGroup() as looks:
            for document in page:
                looks.create_task(self._look(document))
            for start in range(0, len(absent), SWEEP_PAGE):
                looks.create_task(self._check(absent[start : start + SWEEP_PAGE]))
        return last

    async def _look(self, document: Document) -> None:
        async with self._looks:
            await self._claims.adopt(document)

    async def _check(self, entries: list[Entry]) -> None:
        """Ours that no longer are among the taken ones: asked to cancel, ended by somebody else, or deleted."""
        found = await self._database.at_last([entry.name for entry in entries], LOOK)
        for entry in entries:
            if not entry.working and not entry.over:
                await self._mirror.seen(entry, found.get(entry.name))

    async def _adopt_live(self) -> None:
        """Unfinished jobs of this collection whose document was deleted while no bridge was there."""
        batch: dict[str, JobView] = {}
        async for job in self._desk.live():
            if job.note.startswith(f"{self._database.place.parent}/") and job.id not in self._mirror.by_job:
                batch[job.id] = job
            if len(batch) == SWEEP_PAGE:
                await self._adopt_jobs(batch)
                batch = {}
        if batch:
            await self._adopt_jobs(batch)

    async def _adopt_jobs(self, jobs: dict[str, JobView]) -> None:
        found = await self._database.get(sorted({job.note for job in jobs.values()}), LOOK)
        for id, job in jobs.items():
            document = found.get(job.note)
            if document is None or document.text("job_id") not in ("", id):
                logger.info("the document of job %s is gone; the job is cancelled", id)
                await self._desk.cancel(id)
