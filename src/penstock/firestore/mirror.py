"""What documents should say, written until it lands: in order for each document, never backwards, never past an end.

`firestore.claim` pushes fields; one writer per document takes the newest wish, so that states which pass quickly are
written once. Every write is conditional on the version last seen; when somebody else wrote, the document is read again
and decides: gone or replaced means cancel the job, a cancel request is kept and obeyed, an end stays. It must not ask
Penstock for anything but a cancel.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Final

from penstock.firestore.database import Database, LostRace, TooLarge, Trouble
from penstock.firestore.documents import key_fits, key_of
from penstock.firestore.fields import CANCEL_REQUESTED, LOOK, NOW, RANK, TERMINAL, Document, Stamp
from penstock.firestore.outcomes import reference
from penstock.firestore.patience import Patience

logger = logging.getLogger(__name__)

WRITERS: Final = 32  #: writes under way at once
LATER_S: Final = 0.2
ENTRIES_MAX: Final = 20_000  #: unfinished documents one bridge holds; beyond that pending ones wait in Firestore

Spawn = Callable[[Coroutine[object, object, None]], object]


@dataclass(slots=True)
class Entry:
    """One unfinished document: its job, the version we know, and what is still to be written."""

    name: str
    key: str
    status: str
    stamp: Stamp | None  #: None: it must be read again before it is written
    job: str | None = None
    result_url: str = ""
    attempt: int = 0
    wish: dict[str, object] = field(default_factory=dict)
    working: bool = False
    cancelled: bool = False  #: its job was asked to stop
    finishing: bool = False  #: its job has ended, and the result is being fetched
    over: bool = False


class Mirror:
    def __init__(self, database: Database, cancel: Callable[[str], Awaitable[None]], spawn: Spawn) -> None:
        self._database = database
        self._cancel = cancel
        self._spawn = spawn
        self._writers = asyncio.Semaphore(WRITERS)
        self._room = asyncio.Event()
        self._room.set()
        self.entries: dict[str, Entry] = {}
        self.by_job: dict[str, Entry] = {}

    # --- which documents ---
    async def room(self) -> None:
        """Wait while too many documents are unfinished."""
        await self._room.wait()

    def enter(self, document: Document, key: str, *, status: str, stamp: Stamp | None) -> Entry:
        entry = Entry(name=document.name, key=key, status=status, stamp=stamp)
        self.entries[entry.name] = entry
        if len(self.entries) >= ENTRIES_MAX:
            self._room.clear()
        return entry

    def bind(self, entry: Entry, job: str) -> None:
        """From now on this document shows that job."""
        entry.job = job
        self.by_job[job] = entry

    def forget(self, entry: Entry) -> None:
        entry.over = True
        entry.wish = {}
        if self.entries.get(entry.name) is entry:
            del self.entries[entry.name]
        if entry.job is not None and self.by_job.get(entry.job) is entry:
            del self.by_job[entry.job]
        if len(self.entries) < ENTRIES_MAX:
            self._room.set()

    # --- what they should say ---
    def push(self, entry: Entry, fields: dict[str, object], *, hurry: bool = True) -> None:
        """Have these fields written; what was pushed before and not yet written is joined with them.

        What is in no hurry waits a moment for what may come after it: most jobs start at once, and a write is saved.
        """
        if entry.over:
            return
        entry.wish = _joined(entry.wish, fields)
        if hurry:
            self._start(entry)
        else:
            self._spawn(self._start_later(entry))

    def _start(self, entry: Entry) -> None:
        if not entry.working and not entry.over and entry.wish:
            entry.working = True
            self._spawn(self._work(entry))

    async def _start_later(self, entry: Entry) -> None:
        await asyncio.sleep(LATER_S)
        self._start(entry)

    async def _work(self, entry: Entry) -> None:
        try:
            while entry.wish and not entry.over:
                async with self._writers:
                    fields, entry.wish = entry.wish, {}
                    await self._land(entry, fields)
        finally:
            entry.working = False

    async def _land(self, entry: Entry, fields: dict[str, object]) -> None:
        patience = Patience(f"writing {entry.name}")
        while not entry.over:
            if entry.wish:
                fields, entry.wish = _joined(fields, entry.wish), {}
            try:
                if entry.stamp is None:
                    await self.refresh(entry)
                    continue
                content = _allowed(entry, fields)
                if not content:
                    return
                told = {**content, "updated_at": NOW} if len(content) > 1 else content
                entry.stamp = await self._database.update(entry.name, told, entry.stamp)
            except LostRace as lost:
                entry.stamp = None
                if patience.tries:
                    await patience.rest(lost)
                patience.tries += 1
            except TooLarge as error:
                fields = _smaller(entry, fields, error)
            except Trouble as trouble:
                await patience.rest(trouble)
            else:
                entry.status = str(content.get("status", entry.status))
                if entry.status in TERMINAL:
                    self.forget(entry)
                return

    # --- what they do say ---
    async def refresh(self, entry: Entry) -> None:
        """Read a document again and draw the conclusions; Trouble if it cannot be read."""
        found = await self._database.get((entry.name,), LOOK)
        await self.seen(entry, found.get(entry.name))

    async def seen(self, entry: Entry, document: Document | None) -> None:
        """What somebody else made of a document: it is gone, replaced, over, to be cancelled, or just newer."""
        if document is None or key_now(document) != entry.key:
            logger.info("%s was deleted; its job %s is cancelled", entry.name, entry.job)
            self.forget(entry)
            if entry.job is not None:
                await self._cancel(entry.job)
            return
        if document.status in TERMINAL:
            self.forget(entry)
            return
        entry.stamp, entry.status = document.stamp, document.status
        if entry.status == CANCEL_REQUESTED and not entry.cancelled and entry.job is not None:
            entry.cancelled = True
            self._spawn(self._obey(entry, entry.job))

    async def _obey(self, entry: Entry, job: str) -> None:
        await self._cancel(job)
        logger.info("%s asked to cancel job %s", entry.name, job)


def key_now(document: Document) -> str:
    """The key of the job that a document stands for: the one noted when it was taken, if it is one of this document."""
    noted = document.text("job_key")
    # A document that is imported again has another time of creation, but keeps what was noted in it.
    return noted if noted and key_fits(document, noted) else key_of(document)


def _rank(status: object) -> int:
    return RANK.get(status, 0) if isinstance(status, str) else 0


def _joined(old: dict[str, object], new: dict[str, object]) -> dict[str, object]:
    """Two wishes as one: the newer values, but the status that is further."""
    joined = {**old, **new}
    if "status" in old and _rank(old["status"]) > _rank(new.get("status")):
        joined["status"] = old["status"]
    return joined


def _allowed(entry: Entry, fields: dict[str, object]) -> dict[str, object]:
    """The fields without a status that would go back, or that would hide a cancel request before the end."""
    status = fields.get("status")
    if status is None or status in TERMINAL:
        return fields
    if entry.status == CANCEL_REQUESTED or _rank(status) < _rank(entry.status):
        return {name: value for name, value in fields.items() if name != "status"}
    return fields


def _smaller(entry: Entry, fields: dict[str, object], error: TooLarge) -> dict[str, object]:
    """The next smaller thing to say, down to nothing."""
    if isinstance(fields.get("result"), str) and "result_truncated" not in fields:
        return reference(fields, entry.result_url)
    logger.warning("%s is too full for more than its status: %s", entry.name, error)
    return {"status": fields["status"]} if "status" in fields and len(fields) > 1 else {}
