"""From a pending document to its one job: take it by compare-and-set, submit it under its own key, note the job.

`firestore.bridge` calls `pending` and `cancel` for what its watches show, and `adopt` for documents that some bridge
took and did not finish. Whoever crashes between two steps leaves a document from which the next bridge goes on: the
claim notes the key, the key finds the job, and submitting twice is submitting once (ADR 0022). It must not mirror what
jobs do later.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from penstock.domain.admission import BadInput
from penstock.domain.lifecycle import TERMINAL_JOB_STATES, JobState
from penstock.firestore.database import Database, LostRace, TooLarge, Trouble
from penstock.firestore.desk import Desk, Refused
from penstock.firestore.documents import Wanted, key_of, read
from penstock.firestore.fields import (
    CANCEL_REQUESTED,
    LOOK,
    NOW,
    OUT,
    RUNNING,
    SCHEDULED,
    Document,
    Stamp,
    moment,
)
from penstock.firestore.mirror import Entry, Mirror, key_now
from penstock.firestore.outcomes import ended, failure
from penstock.firestore.patience import Patience
from penstock.wire.api import JobView, Outcome

logger = logging.getLogger(__name__)

_JOB_ID: Final = re.compile(r"j[0-9a-z]{16}\Z", re.ASCII)


class Claims:
    """Takes documents in the name of one bridge (`me`)."""

    def __init__(self, database: Database, desk: Desk, mirror: Mirror, me: str) -> None:
        self._database = database
        self._desk = desk
        self._mirror = mirror
        self._me = me

    # --- pending ---
    async def pending(self, document: Document) -> None:
        """Take a document and submit its job; do nothing if another bridge was faster."""
        await self._mirror.room()
        try:
            wanted = read(document)
        except BadInput as error:
            await self._end(document, failure("InvalidDocument", str(error), field=error.field))
            return
        key = key_of(document)
        stamp = await self._take(document, key)
        if stamp is not None:
            entry = self._mirror.enter(document, key, status=SCHEDULED, stamp=stamp)
            await self._submit(entry, document, wanted)

    async def _take(self, document: Document, key: str) -> Stamp | None:
        content = {"status": SCHEDULED, "scheduled_at": NOW, "updated_at": NOW, "job_key": key, "bridge": self._me}
        patience = Patience(f"taking {document.name}")
        while True:
            try:
                return await self._database.update(document.name, content, document.stamp, remove=OUT)
            except LostRace:
                return await self._mine(document.name, key) if patience.tries else None
            except TooLarge as error:
                line = f"code: leaves no room for a status: {error}; Firestore takes 1 MiB in all"
                await self._end(document, failure("InvalidDocument", line, field="code"))
                return None
            except Trouble as trouble:
                await patience.rest(trouble)

    async def _mine(self, name: str, key: str) -> Stamp | None:
        """A claim whose answer was lost may have landed."""
        found = (await self._database.at_last((name,), LOOK)).get(name)
        if found is None or found.status != SCHEDULED or key_now(found) != key or found.text("bridge") != self._me:
            return None
        return found.stamp

    async def _end(self, document: Document, fields: dict[str, object]) -> None:
        """Let a document fail that has no job; if it has changed meanwhile it is looked at again anyway."""
        patience = Patience(f"writing {document.name}")
        content = {**fields, "updated_at": NOW}
        while True:
            try:
                await self._database.update(document.name, content, document.stamp, remove=OUT)
            except LostRace:
                return
            except TooLarge as error:
                if len(content) == 1:
                    logger.error("%s cannot be written at all: %s", document.name, error)  # noqa: TRY400 (one line)
                    return
                content = {"status": fields["status"]}
            except Trouble as trouble:
                await patience.rest(trouble)
            else:
                return

    async def _submit(self, entry: Entry, document: Document, wanted: Wanted) -> None:
        name = document.id if document.id.isprintable() and len(document.id) <= 128 else ""
        try:
            job, new = await self._desk.submit(wanted, key=entry.key, name=name, note=document.name)
        except Refused as error:
            self._mirror.push(entry, failure("InvalidDocument", str(error), field=error.field))
            return
        self._bind(entry, job)
        if not new:
            await self.look(entry)  # whoever submitted it may have missed what it did since

    def _bind(self, entry: Entry, job: str) -> None:
        """Note a document's job in it."""
        entry.result_url = self._desk.result_url(job)
        self._mirror.bind(entry, job)
        self._mirror.push(entry, {"job_id": job, "log_url": self._desk.log_url(job)}, hurry=False)

    # --- cancel_requested ---
    async def cancel(self, document: Document) -> None:
        """Stop a document's job; without one it is over at once."""
        entry = self._mirror.entries.get(document.name)
        if entry is None and not document.text("job_key"):
            await self._end(document, failure("Cancelled", "cancelled before it was taken", cause="cancelled"))
            return
        if entry is None:
            entry = await self.adopt(document)
        if entry is None or entry.over or entry.job is None:
            return  # still being submitted: its first write meets the request
        entry.status, entry.stamp, entry.cancelled = CANCEL_REQUESTED, document.stamp, True
        await self._desk.cancel(entry.job)
        await self.look(entry)

    # --- documents that some bridge has taken ---
    async def adopt(self, document: Document) -> Entry | None:
        """Go on with a document that was taken: find its job, or submit it, and write what it lacks.

        `document` may lack its code. One that this bridge knows is compared with its job once more.
        """
        entry = self._mirror.entries.get(document.name)
        if entry is not None:
            if not entry.working:
                await self._mirror.seen(entry, document)
                await self.look(entry)
            return entry
        entry = self._mirror.enter(document, key_now(document), status=document.status, stamp=document.stamp)
        job = document.text("job_id")
        if _JOB_ID.match(job) is None:
            await self._submit_again(entry)
            return entry
        view = await self._desk.view(job)
        if view is None:
            self._mirror.push(entry, failure("Lost", f"job {job} of this document is not known any more"))
        elif view.note != document.name:
            await self._submit_again(entry)  # another document's job: whoever may write here may not have its result
        else:
            entry.result_url = self._desk.result_url(job)
            self._mirror.bind(entry, job)
            await self.look(entry, view)
        return entry

    async def _submit_again(self, entry: Entry) -> None:
        """Its bridge went between the claim and the note of the job: the key tells whether there is one."""
        document = (await self._database.at_last((entry.name,))).get(entry.name)
        if document is None:
            self._mirror.forget(entry)
            return
        entry.stamp = document.stamp
        try:
            wanted = read(document)
        except BadInput as error:
            self._mirror.push(entry, failure("InvalidDocument", str(error), field=error.field))
            return
        await self._submit(entry, document, wanted)

    async def look(self, entry: Entry, view: JobView | None = None) -> None:
        """Ask where a document's job stands, and have it written if the document is behind."""
        if entry.job is None or entry.over:
            return
        view = await self._desk.view(entry.job) if view is None else view
        if view is None:
            self._mirror.push(entry, failure("Lost", f"job {entry.job} of this document is not known any more"))
        elif view.state in TERMINAL_JOB_STATES:
            await self.finish(entry)
        elif view.state == JobState.RUNNING or view.started_at is not None:
            attempt = max(1, entry.attempt, len(view.attempts))
            if entry.status != RUNNING or attempt != entry.attempt:
                entry.attempt = attempt
                self.started(entry, view.started_at)

    def started(self, entry: Entry, at: float | None) -> None:
        """Its job runs, for the first time or again."""
        fields: dict[str, object] = {"status": RUNNING, "attempt": entry.attempt}
        if at is not None:
            fields["started_at"] = moment(at)
        self._mirror.push(entry, fields)

    async def finish(self, entry: Entry) -> None:
        """Its job has ended: fetch what it left, and write it."""
        if entry.finishing or entry.job is None or entry.over:
            return
        entry.finishing = True
        outcome = await self._desk.outcome(entry.job)
        if outcome is None:
            self._mirror.push(entry, failure("Lost", f"the result of job {entry.job} is not known any more"))
            return
        if outcome.state not in TERMINAL_JOB_STATES:
            entry.finishing = False
            return
        reason, lines = await self._story(outcome)
        self._mirror.push(entry, ended(outcome, reason=reason, lines=lines, result_url=entry.result_url))

    async def _story(self, outcome: Outcome) -> tuple[str, list[str]]:
        """Why a job did not succeed, in the server's words, and the last lines it said."""
        if outcome.state == JobState.SUCCEEDED:
            return "", []
        view = await self._desk.view(outcome.id)
        reason = view.reason if view is not None else ""
        if outcome.error is not None and outcome.error.traceback:
            return reason, outcome.error.traceback.splitlines()[-20:]
        if outcome.started_at is None:
            return reason, []
        return reason, await self._desk.last_lines(outcome.id)
