"""Leases: one holder at a time by the store's clock, renewed while held, taken over when old, gone after the commit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from penstock.domain import ledger
from penstock.extract.claims import Claim, Claims, clock_path
from penstock.objects.memory import MemoryObjects
from tests.process.extraction import cheap_plan
from tests.unit.extract.cheap import calls_to, run

PLAN = cheap_plan(rows=4, unit_rows=2)
LEASE_S = 100.0


class Clocks:
    """The store's clock, and a worker's, which began anywhere."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def store(self) -> float:
        return self.now


def claims(bucket: MemoryObjects, clocks: Clocks, name: str, began: float = 0.0, lease_s: float = LEASE_S) -> Claims:
    return Claims(
        calls_to(bucket if bucket.faults else bucket.by(name)),
        PLAN,
        name,
        fence=0,
        lease_s=lease_s,
        rng=random.Random(name),
        steady=lambda: clocks.now - began,
    )


def test_each_unit_has_one_holder_until_its_lease_is_old() -> None:
    clocks = Clocks()
    bucket = MemoryObjects(now=clocks.store)
    one, other = claims(bucket, clocks, "one"), claims(bucket, clocks, "other", began=999_999.0)

    async def story() -> None:
        first, second = await one.claim(PLAN.units), await other.claim(PLAN.units)
        assert first is not None
        assert second is not None
        assert {first.unit.id, second.unit.id} == {unit.id for unit in PLAN.units}
        assert await one.claim(PLAN.units) is None
        clocks.now += LEASE_S - 1
        assert await other.claim((first.unit,)) is None
        clocks.now += 2
        taken = await other.claim((first.unit,))
        assert taken is not None
        assert (taken.number, taken.attempt != second.attempt) == (1, True)
        assert await one.claim((first.unit,)) is None

    run(story)


async def outlive_a_lease(bucket: MemoryObjects, clocks: Clocks, one: Claims, claim: Claim) -> None:
    """Until a claim was renewed though its first lease has run out."""
    clocks.now += LEASE_S + 1
    keeping = asyncio.create_task(one.keep())
    path = ledger.lease_path(PLAN.run, claim.unit.id, claim.number)
    async with asyncio.timeout(60):
        while (await bucket.survey(path))[0].written_at < clocks.now:  # noqa: ASYNC110 (it waits for a real timer)
            await asyncio.sleep(0.01)
    keeping.cancel()


def test_a_held_lease_is_renewed_and_a_released_one_is_free_at_once() -> None:
    clocks = Clocks()
    bucket = MemoryObjects(now=clocks.store)
    one, other = claims(bucket, clocks, "one", lease_s=0.03), claims(bucket, clocks, "other")

    async def story() -> None:
        claim = await one.claim(PLAN.units[:1])
        assert claim is not None
        await outlive_a_lease(bucket, clocks, one, claim)
        assert await other.claim(PLAN.units[:1]) is None
        await one.release(claim, done=False)
        assert await other.claim(PLAN.units[:1]) is not None

    run(story)


class Slow:
    """Lets nothing be removed before it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()

    async def before(self, verb: str, path: str) -> None:
        if verb == "delete":
            await self.may.wait()

    async def after(self, verb: str, path: str) -> None:
        pass


def test_what_is_held_is_renewed_while_the_store_is_slow_to_remove_another() -> None:
    clocks = Clocks()
    bucket = MemoryObjects(now=clocks.store)

    async def story() -> None:
        slow = Slow()
        one = claims(bucket.by("one", slow), clocks, "one", lease_s=0.03)
        first, second = await one.claim(PLAN.units[:1]), await one.claim(PLAN.units[1:])
        assert first is not None
        assert second is not None
        leaving = asyncio.create_task(one.release(first, done=True))
        await outlive_a_lease(bucket, clocks, one, second)
        assert not leaving.done()
        slow.may.set()
        await leaving
        assert await claims(bucket, clocks, "other").claim(PLAN.units[1:]) is None

    run(story)


def test_a_unit_that_was_committed_meanwhile_is_not_begun_again() -> None:
    clocks = Clocks()
    bucket = MemoryObjects(now=clocks.store)

    async def story() -> None:
        await bucket.put(ledger.commit_path(PLAN.run, PLAN.units[0].id), b"{}")
        assert await claims(bucket, clocks, "late").claim(PLAN.units[:1]) is None
        assert [path for path in bucket.paths() if "/leases/" in path] == []

    run(story)


def test_a_unit_whose_commit_is_void_is_claimed_for_its_next_edition() -> None:
    clocks = Clocks()
    bucket = MemoryObjects(now=clocks.store)
    unit = PLAN.units[0].id

    async def story() -> None:
        for edition in range(3):
            claim = await claims(bucket, clocks, f"w{edition}").claim(PLAN.units[:1])
            assert claim is not None
            assert claim.edition == edition
            await bucket.put(ledger.commit_path(PLAN.run, unit, edition), b"{}")
            clocks.now += LEASE_S + 1
            assert await claims(bucket, clocks, f"late{edition}").claim(PLAN.units[:1]) is None
            await bucket.put(ledger.void_path(PLAN.run, unit, edition), b"")

    run(story)


def test_whoever_holds_nothing_gives_a_sign_until_it_leaves() -> None:
    clocks = Clocks()
    bucket = MemoryObjects(now=clocks.store)
    one = claims(bucket, clocks, "one", lease_s=0.03)
    sign = clock_path(PLAN.run, "one")

    async def until(done: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not done():  # noqa: ASYNC110 (it waits for a real timer)
                await asyncio.sleep(0.01)

    async def story() -> None:
        claim = await one.claim(PLAN.units[:1])
        assert claim is not None
        await one.release(claim, done=False)
        await bucket.delete(sign)
        keeping = asyncio.create_task(one.keep())
        await until(lambda: sign in bucket.paths())
        await one.leave()
        # It is claimed and renewed once more, to see that the loop has gone round.
        claim = await one.claim(PLAN.units[:1])
        assert claim is not None
        lease = ledger.lease_path(PLAN.run, claim.unit.id, claim.number)
        before = bucket.peek(lease)
        await until(lambda: bucket.peek(lease) != before)
        keeping.cancel()
        assert bucket.paths() == (lease,)

    run(story)


class CutOff:
    """Whoever claims finds that another was faster, whose record a power cut has emptied."""

    def __init__(self, bucket: MemoryObjects) -> None:
        self._bucket = bucket

    async def before(self, verb: str, path: str) -> None:
        if verb == "put_new" and path.endswith("/000000"):
            await self._bucket.put(path, b"")

    async def after(self, verb: str, path: str) -> None:
        pass


def test_a_lease_says_how_long_it_is_and_one_that_is_damaged_gets_old_as_any() -> None:
    clocks = Clocks()
    bucket = MemoryObjects(now=clocks.store)
    path = ledger.lease_path(PLAN.run, PLAN.units[0].id, 1)

    async def story() -> None:
        one = claims(bucket.by("one", CutOff(bucket)), clocks, "one")
        assert await one.claim(PLAN.units[:1]) is None
        clocks.now += LEASE_S + 1
        assert await one.claim(PLAN.units[:1]) is not None
        stored = bucket.peek(path)
        assert stored is not None
        assert ledger.decode_lease(stored.data).lease_s == LEASE_S

    run(story)


@pytest.mark.parametrize("ahead_s", [-5000.0, 0.0, 5000.0])
def test_only_the_stores_clock_counts(ahead_s: float) -> None:
    """A worker whose own clock is hours off neither takes over early nor waits for ever."""
    clocks = Clocks()
    bucket = MemoryObjects(now=clocks.store)

    async def story() -> None:
        assert await claims(bucket, clocks, "one").claim(PLAN.units[:1]) is not None
        odd = claims(bucket, clocks, "odd", began=-ahead_s)
        clocks.now += LEASE_S - 1
        assert await odd.claim(PLAN.units[:1]) is None
        clocks.now += 2
        assert await odd.claim(PLAN.units[:1]) is not None

    run(story)
