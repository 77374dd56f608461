"""Object calls that fail and are tried again, and create-if-absent whose answer can be lost.

Everything in `extract` that talks to a bucket goes through here. The adapters retry what is quick to retry; this waits
out an outage, up to `PATIENCE_S`, says so in one line at its beginning and one at its end, and then gives up with the
store's own words; or before that, when its process is asked to stop. A store may take no writes and answer reads: how
long a call is tried, and when its outage is over, is its own matter and not that of others which succeed.
`domain.ledger.settle` decides who won a create-if-absent, never the answer alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, TypeVar

from penstock.domain import ledger
from penstock.domain.ledger import Put, Verdict
from penstock.objects.drafts import MemoryDraft
from penstock.ports.objects import AlreadyThere, Damaged, Draft, Drafting, Forbidden, Kept, ObjectsError, Ranged, Stored

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: A worker that cannot reach its bucket for this long ends; whoever started it starts it again.
PATIENCE_S: Final = 900.0
PAUSE_S: Final = (0.2, 10.0)  #: the first pause at most, and the longest
#: Of a process that was asked to stop: what it has computed is stored if the bucket only stumbles.
LAST_PATIENCE_S: Final = 5.0
LOOK_S: Final = 0.25  #: how often a pause looks whether the process is to stop
TOLD_EVERY_S: Final = 60.0  #: a store that fails every now and then is told of so often at most


class Stopped(Exception):
    """The process was asked to stop, and has let go of what it held, or cannot."""


class Calls:
    """One process's way to the objects of a root."""

    def __init__(
        self,
        objects: Ranged,
        rng: random.Random,
        patience_s: float = PATIENCE_S,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.objects = objects
        self._rng = rng
        self._patience_s = patience_s
        self._should_stop = should_stop
        self._stopped = False  #: whether a call has given up because the process is to stop: then no other waits
        self._failing: set[Tries] = set()  #: calls that have failed, and not come to their end
        self._failed_at = 0.0  #: since when there are such
        self._told = False  #: whether that was said
        self._told_at = float("-inf")  #: when the beginning of one was said last

    async def read(self, path: str) -> Stored | None:
        return await self.patiently(lambda: self.objects.get(path))

    async def read_range(self, path: str, start: int, stop: int) -> bytes | None:
        return await self.patiently(lambda: self.objects.get_range(path, start, stop))

    async def list(self, prefix: str) -> tuple[str, ...]:
        return await self.patiently(lambda: self.objects.list(prefix))

    async def survey(self, prefix: str) -> tuple[Kept, ...]:
        return await self.patiently(lambda: self.objects.survey(prefix))

    async def put(self, path: str, data: bytes) -> int:
        return await self.patiently(lambda: self.objects.put(path, data))

    async def delete(self, path: str) -> None:
        await self.patiently(lambda: self.objects.delete(path))

    async def create(self, path: str, data: bytes) -> None:
        """Create if absent where it does not matter who was first."""
        await self.patiently(lambda: self._put_new_or_there(path, data))

    def draft(self, *, in_memory: bool = False) -> Draft:
        """An object that is written before it gets its name; in memory where the store has no such thing."""
        if isinstance(self.objects, Drafting) and not in_memory:
            return self.objects.draft()
        return MemoryDraft(self.objects)

    async def put_new(self, path: str, data: bytes | Draft, tries: Tries) -> tuple[Put, int]:
        """One of the tries, and the generation if it was created."""
        try:
            if isinstance(data, bytes):
                return Put.CREATED, await self.objects.put_new(path, data)
            return Put.CREATED, await data.name(path)
        except AlreadyThere:
            return Put.TAKEN, 0
        except ObjectsError as error:
            if _hopeless(error):
                raise
            tries.failed(error)
            return Put.UNKNOWN, 0

    async def create_own(self, path: str, data: bytes, own: str, holder_of: Callable[[bytes], str]) -> bool:
        """Create if absent and find out whether the record that stands is this attempt's."""
        with self.tries() as tries:
            while True:
                put, _ = await self.put_new(path, data, tries)
                stored = None if put is Put.CREATED else await self.read(path)
                verdict = ledger.settle(put, None if stored is None else holder_of(stored.data), own)
                if verdict is not Verdict.AGAIN:
                    return verdict is Verdict.WON
                if not await tries.pause():
                    raise tries.given_up(path)

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        with self.tries() as tries:
            while True:
                try:
                    return await call()
                except ObjectsError as error:
                    if _hopeless(error):
                        raise
                    tries.failed(error)
                    if not await tries.pause():
                        raise

    async def _put_new_or_there(self, path: str, data: bytes) -> None:
        try:
            await self.objects.put_new(path, data)
        except AlreadyThere:
            return

    @contextlib.contextmanager
    def tries(self) -> Iterator[Tries]:
        """For one call, until it has its answer or raises."""
        tries = Tries(self, self._patience_s, self._rng)
        try:
            yield tries
        except BaseException:
            self._failing.discard(tries)
            raise
        self._answered(tries)

    def failed(self, tries: Tries, error: ObjectsError) -> None:
        """Of all calls that fail in one outage the first is told, and not each: there may be hundreds."""
        now = asyncio.get_running_loop().time()
        if not self._failing:
            self._failed_at, self._told = now, False
        self._failing.add(tries)
        if not self._told and now - self._told_at >= TOLD_EVERY_S:
            self._told, self._told_at = True, now
            logger.warning("trying again, for %.0f s at most: %s", self._patience_s, error)

    def _answered(self, tries: Tries) -> None:
        if tries not in self._failing:
            return
        self._failing.remove(tries)
        if self._told and not self._failing:
            for_s = asyncio.get_running_loop().time() - self._failed_at
            logger.warning("the bucket answers again, after %.0f s", for_s)

    def look_for_stop(self, asked_at: float | None, now: float) -> float | None:
        """Since when a call waits though the process is to stop; raises `Stopped` when it has waited enough."""
        if not self._should_stop():
            return None
        since = now if asked_at is None else asked_at
        if self._stopped or now - since > LAST_PATIENCE_S:
            self._stopped = True
            raise Stopped
        return since


class Tries:
    """How often and how long one call is tried, and what the store said last."""

    def __init__(self, calls: Calls, patience_s: float, rng: random.Random) -> None:
        self._calls = calls
        self._patience_s = patience_s
        self._rng = rng
        self._now = asyncio.get_running_loop().time
        self._started = self._now()
        self._longest = PAUSE_S[0]
        self._asked_at: float | None = None
        self._error: ObjectsError | None = None

    def failed(self, error: ObjectsError) -> None:
        self._error = error
        self._calls.failed(self, error)

    async def pause(self) -> bool:
        """A little longer than the last one; False when patience is at its end.

        Raises `Stopped` when the process is asked to stop.
        """
        if self._now() - self._started > self._patience_s:
            return False
        ends = self._now() + self._rng.uniform(self._longest / 2, self._longest)
        while (left := ends - self._now()) > 0:
            self._asked_at = self._calls.look_for_stop(self._asked_at, self._now())
            await asyncio.sleep(min(left, LOOK_S))
        self._longest = min(self._longest * 2, PAUSE_S[1])
        return True

    def given_up(self, path: str) -> ObjectsError:
        """With the store's words, where it had any."""
        said = self._error or "the name is taken, and nothing is found there"
        return ObjectsError(f"{path}: could not be stored in {self._patience_s:.0f} s: {said}")


def _hopeless(error: ObjectsError) -> bool:
    """Whether asking again gives the same: a damaged object, a store that is not there or not ours."""
    return isinstance(error, Damaged | Forbidden)
