"""Object calls that fail and are tried again, and create-if-absent whose answer can be lost.

Everything in `extract` that talks to a bucket goes through here. The adapters retry what is quick to retry; this waits
out an outage, up to `PATIENCE_S`, and then gives up with the store's own words. `domain.ledger.settle` decides who won
a create-if-absent, never the answer alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from penstock.domain import ledger
from penstock.domain.ledger import Put, Verdict
from penstock.objects.drafts import MemoryDraft
from penstock.ports.objects import AlreadyThere, Damaged, Draft, Drafting, Kept, ObjectsError, Ranged, Stored

T = TypeVar("T")

#: A worker that cannot reach its bucket for this long ends; whoever started it starts it again.
PATIENCE_S: Final = 900.0
PAUSE_S: Final = (0.2, 10.0)  #: the first pause at most, and the longest


class Calls:
    """One process's way to the objects of a root."""

    def __init__(self, objects: Ranged, rng: random.Random, patience_s: float = PATIENCE_S) -> None:
        self.objects = objects
        self._rng = rng
        self._patience_s = patience_s

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

    def draft(self, *, in_memory: bool = False, synced: bool = True) -> Draft:
        """An object that is written before it gets its name; in memory where the store has no such thing."""
        if isinstance(self.objects, Drafting) and not in_memory:
            return self.objects.draft(synced=synced)
        return MemoryDraft(self.objects)

    async def put_new(self, path: str, data: bytes | Draft) -> tuple[Put, int]:
        """One try, and the generation if it was created."""
        try:
            if isinstance(data, bytes):
                return Put.CREATED, await self.objects.put_new(path, data)
            return Put.CREATED, await data.name(path)
        except AlreadyThere:
            return Put.TAKEN, 0
        except ObjectsError as error:
            if _hopeless(error):
                raise
            return Put.UNKNOWN, 0

    async def create_own(self, path: str, data: bytes, own: str, holder_of: Callable[[bytes], str]) -> bool:
        """Create if absent and find out whether the record that stands is this attempt's."""
        pauses = self.pauses()
        while True:
            put, _ = await self.put_new(path, data)
            stored = None if put is Put.CREATED else await self.read(path)
            verdict = ledger.settle(put, None if stored is None else holder_of(stored.data), own)
            if verdict is not Verdict.AGAIN:
                return verdict is Verdict.WON
            if not await pauses():
                raise ObjectsError(f"{path}: no answer in {self._patience_s:.0f} s")

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        pauses = self.pauses()
        while True:
            try:
                return await call()
            except ObjectsError as error:
                if _hopeless(error) or not await pauses():
                    raise

    async def _put_new_or_there(self, path: str, data: bytes) -> None:
        try:
            await self.objects.put_new(path, data)
        except AlreadyThere:
            return

    def pauses(self) -> Callable[[], Awaitable[bool]]:
        """Each call waits, a little longer than the last one; False when patience is at its end."""
        started = asyncio.get_running_loop().time()
        longest = PAUSE_S[0]

        async def pause() -> bool:
            nonlocal longest
            if asyncio.get_running_loop().time() - started > self._patience_s:
                return False
            await asyncio.sleep(self._rng.uniform(longest / 2, longest))
            longest = min(longest * 2, PAUSE_S[1])
            return True

        return pause


def _hopeless(error: ObjectsError) -> bool:
    """Whether asking again gives the same: a damaged object, a bucket that is not there or not ours."""
    from penstock.objects.bucket import NoBucket

    return isinstance(error, Damaged | NoBucket)
