"""Storing a unit and committing it: data under the attempt's own name, then the record that the first writer wins.

`worker` calls it with a unit's content. Until the record is there the data count for nothing; when another's record is
there, this attempt's data are removed again. A data object is believed to be stored when the store says so, because the
bucket adapters compare what arrived with what was sent; `read_back` reads it as well. It must never replace an object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from penstock.domain import ledger
from penstock.domain.ledger import DataObject, Put
from penstock.extract.calls import Calls
from penstock.extract.claims import Claim
from penstock.extract.layout import Content, Made, UnitCommit, decode_commit
from penstock.extract.plan import RunPlan
from penstock.ports.objects import Damaged, ObjectsError

#: Names under which one object of one attempt is tried: a name that got damaged bytes is not used again.
NAMES_MAX: Final = 4
#: Objects on their way at the same time: on a bucket each is one request of a bounded time, and a copy in memory.
SENT_AT_ONCE: Final = 4


async def publish(
    calls: Calls,
    plan: RunPlan,
    claim: Claim,
    content: Content,
    *,
    fence: int = 0,
    read_back: bool = False,
    on_commit: Callable[[], object] = lambda: None,
) -> bool:
    """Store and commit; False when another attempt's commit stands and nothing of this one is left.

    `on_commit` is called when all is stored, before the record is.
    """
    places = asyncio.Semaphore(SENT_AT_ONCE)

    async def store(name: str, made: Made) -> DataObject:
        async with places:
            return await _store(calls, plan.run, claim, name, made, read_back=read_back)

    objects = await asyncio.gather(*(store(name, made) for name, made in content.objects.items()))
    record = UnitCommit(
        unit=claim.unit.id,
        attempt=claim.attempt,
        fence=fence,
        start=claim.unit.start,
        stop=claim.unit.stop,
        objects=tuple(objects),
        edition=claim.edition,
        facts=content.facts,
    )
    path = ledger.commit_path(plan.run, claim.unit.id, claim.edition)
    on_commit()
    won = await calls.create_own(path, ledger.encode(record), claim.attempt, _holder)
    if not won:
        await discard(calls, plan.run, claim)
    return won


async def discard(calls: Calls, run: str, claim: Claim) -> None:
    """Remove what an attempt stored that lost, or was given up before its commit was tried."""
    for path in await calls.list(ledger.data_path(run, claim.unit.id, claim.attempt, "")):
        await calls.delete(path)


def _holder(stored: bytes) -> str:
    """The attempt of a commit; one that a power cut has damaged is nobody's, and stands until it is made void."""
    try:
        return decode_commit(stored).attempt
    except Damaged:
        return ""


async def _store(calls: Calls, run: str, claim: Claim, name: str, made: Made, *, read_back: bool) -> DataObject:
    path = ""
    for number in range(NAMES_MAX):
        path = ledger.data_path(run, claim.unit.id, claim.attempt, name if not number else f"{name}.{number}")
        generation = await _put(calls, path, made, read_back=read_back)
        if generation is not None:
            return DataObject(path=path, generation=generation, checksum=made.checksum)
    raise ObjectsError(f"{path}: {NAMES_MAX} times other bytes were stored than were sent")


async def _put(calls: Calls, path: str, made: Made, *, read_back: bool) -> int | None:
    """The generation of the object as it was sent; None when other bytes lie there now."""
    with calls.tries() as tries:
        while True:
            put, generation = await calls.put_new(path, made.data, tries)
            if put is Put.CREATED and not read_back:
                return generation
            # Taken means taken by this attempt, whose earlier answer was lost: nobody else uses its names.
            try:
                stored = await calls.read(path)
            except Damaged:
                return None
            if stored is not None:
                same = await asyncio.to_thread(ledger.matches, stored.data, made.checksum)
                return stored.generation if same else None
            if not await tries.pause():
                raise tries.given_up(path)
