"""Penstock as the bridge sees it: submit for somebody, look, cancel, and follow what happens to jobs.

It talks through the async client like any other user, with an administrator's token. Each submitter has a queue of its
own, because queues are what the planner shares by; they are made when first needed. What the server cannot answer now
is asked until it does. It must not know documents, only what they asked for.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import msgspec

from penstock.client.aio import AsyncClient
from penstock.client.errors import ApiError
from penstock.domain import limits
from penstock.firestore.documents import Wanted
from penstock.firestore.patience import Patience
from penstock.wire.api import Accepted, EventView, JobRequest, JobView, Outcome, QueueRequest, SnippetRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Queues that one team's submitters may have; who comes later shares one. Free text must not make rows without end.
QUEUES_MAX: Final = 1_000
LIVE: Final = "queued,provisioning,running"
LAST_LINES: Final = 20
LAST_LINES_BYTES: Final = 8 << 10
_PLAIN: Final = re.compile(r"[A-Za-z0-9@._+-]{1,80}\Z", re.ASCII)
#: Codes that are about the server or our token, not about the request: they pass, or an operator mends them.
_PASSING: Final = frozenset(
    {"unavailable", "not_leading", "too_many_requests", "fault", "unauthenticated", "forbidden"}
)


class Refused(Exception):
    """The server will never take this request: which field, and one line."""

    def __init__(self, field: str, line: str) -> None:
        super().__init__(line)
        self.field = field


class Desk:
    """One connection to Penstock for one collection; `tag` marks the jobs that came from it."""

    def __init__(self, client: AsyncClient, *, team: str, tag: str, public_url: str | None = None) -> None:
        self._client = client
        self._team = team
        self._tag = tag
        self._url = (public_url or client.url).rstrip("/")
        self._queues: set[str] = set()

    def log_url(self, job: str) -> str:
        return f"{self._url}/v1/jobs/{job}/logs"

    def result_url(self, job: str) -> str:
        return f"{self._url}/v1/jobs/{job}/result"

    # --- submitting ---
    async def submit(self, wanted: Wanted, *, key: str, name: str, note: str) -> tuple[str, bool]:
        """The one job with this key, and whether it is new; Refused if there never can be one."""
        request = JobRequest(
            payload=SnippetRequest(wanted.code, {"challenge_number": wanted.challenge_number}),
            on=() if wanted.accelerator is None else (wanted.accelerator,),
            user=wanted.submitter,
            name=name,
            note=note,
            priority=wanted.priority,
            timeout_s=wanted.timeout_s,
            env=wanted.env,
            tags=(self._tag, *(f"notify:{channel}" for channel in wanted.notify)),
            idempotency_key=key,
        )
        try:
            accepted = await self._submit(request, wanted.submitter)
        except ApiError as error:
            if error.problem.job is not None:
                # The document was changed after it was taken: the job is the one of what it said then.
                return error.problem.job, False
            raise Refused(error.field or "", str(error)) from error
        return accepted.id, accepted.created

    async def _submit(self, request: JobRequest, submitter: str) -> Accepted:
        while True:
            queue = await self._queue(submitter)
            queued = msgspec.structs.replace(request, queue=queue)
            try:
                return await self._ask("submitting", partial(self._client.submit, queued))
            except ApiError as error:
                if error.code != "not_found" or queue not in self._queues:
                    raise
                # Somebody may have removed the queue: then it is made again. Else the refusal is about something else.
                self._queues.discard(queue)
                if await self._known("reading a queue", partial(self._client.queue, queue)) is not None:
                    raise

    async def _queue(self, submitter: str) -> str:
        name = queue_of(self._team, submitter)
        if name in self._queues:
            return name
        if not self._queues:
            await self._learn_queues()
        if name not in self._queues:
            if len(self._queues) >= QUEUES_MAX:
                logger.warning("%s shares a queue: there are %d submitters' queues already", submitter, QUEUES_MAX)
                name = queue_of(self._team, "*")
            if name not in self._queues:
                await self._ask("making a queue", lambda: self._client.put_queue(name, QueueRequest(team=self._team)))
                self._queues.add(name)
        return name

    async def _learn_queues(self) -> None:
        """What is there is left as it is: an administrator may have given somebody another share."""
        prefix = queue_of(self._team, "")
        found = await self._ask("reading the queues", self._client.queues)
        self._queues.update(queue.name for queue in found if queue.name.startswith(prefix))

    # --- looking ---
    async def view(self, job: str) -> JobView | None:
        """A job; None when the server does not know it, or no more."""
        return await self._known("reading a job", lambda: self._client.get(job))

    async def outcome(self, job: str) -> Outcome | None:
        return await self._known("reading a result", lambda: self._client.outcome(job))

    async def cancel(self, job: str) -> None:
        await self._known("cancelling", lambda: self._client.cancel(job))

    async def live(self) -> AsyncIterator[JobView]:
        """Unfinished jobs of this collection."""
        cursor: str | None = None
        while True:
            page = await self._ask("listing jobs", partial(self._client.page, state=LIVE, tag=self._tag, cursor=cursor))
            for job in page.jobs:
                yield job
            cursor = page.next
            if cursor is None:
                return

    async def last_lines(self, job: str) -> list[str]:
        """The end of what a job's first host said on standard error; nothing if that cannot be had now."""
        tail = ""
        try:
            async for chunk in self._client.logs(job, host=0, stream="err"):
                tail = (tail + chunk.text)[-LAST_LINES_BYTES:]
        except ApiError as error:
            logger.info("the log of %s cannot be read: %s", job, error)
        return tail.splitlines()[-LAST_LINES:]

    async def follow(self) -> AsyncIterator[EventView]:
        """What happens to anything of the team, from now on, over as many connections as it takes."""
        patience = Patience("following events")
        after: int | None = None
        while True:
            try:
                async for event in self._client.events(follow=True, after=after):
                    patience.renew()
                    after = event.seq
                    yield event
            except ApiError as error:
                await patience.rest(error)

    async def _known(self, doing: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """None for what the server does not know, and for what it cannot even be asked."""
        try:
            return await self._ask(doing, call)
        except ApiError as error:
            if error.code not in ("not_found", "gone"):
                logger.warning("%s was refused: %s", doing, error)
            return None

    async def _ask(self, doing: str, call: Callable[[], Awaitable[T]]) -> T:
        patience = Patience(doing)
        while True:
            try:
                return await call()
            except ApiError as error:
                if error.code not in _PASSING:
                    raise
                await patience.rest(error)


def queue_of(team: str, submitter: str) -> str:
    """The queue of one submitter. All teams share one space of names, and a name must fit into a path."""
    word = submitter if not submitter or submitter == "*" or _PLAIN.match(submitter) else _digest(submitter)
    name = f"firestore:{team}:{word}"
    return name if len(name) <= limits.NAME_CHARACTERS_MAX else f"firestore:{_digest(team)}:{word}"


def _digest(text: str) -> str:
    return "~" + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:24]
