"""A hint that a zone changed makes the controller list it at once, once more if it was being listed already.

Unless its provider asked for a rest: then it is listed when that is over. And what is known of a zone that does not
answer, or refuses.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from penstock.controller.calls import Calls, Pace
from penstock.controller.observe import Observer
from penstock.controller.settings import reopen_zone
from penstock.controller.witness import Evidence
from penstock.planner.snapshot import Mute, Snapshot
from penstock.ports.capacity import Listing, PermissionDenied, RateLimited, Transient
from tests.unit.controller.stage import HandClock, seen


class SlowZone:
    """Listings that end when the test says so."""

    name = "local"

    def __init__(self) -> None:
        self.begun = 0
        self.go_on = asyncio.Event()
        self.held_s: float | None = None
        self.error: Exception | None = None

    async def list(self, zone: str) -> Listing:
        self.begun += 1
        await self.go_on.wait()
        if self.held_s is not None:
            raise RateLimited("too often", retry_after_s=self.held_s)
        if self.error is not None:
            raise self.error
        return Listing(zone=zone, slices=())


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def watching(
    zone: object, calls: Calls, clock: HandClock, evidence: Evidence | None = None, store: Any = None
) -> Observer:
    """Of a pool with that one zone, in which nothing is."""
    pool = SimpleNamespace(provider="local", zones=("z",))
    snapshot = cast("Any", SimpleNamespace(slices={}, pools={"p": pool}, zones={}, unsettled={}))
    capacities, paces = {"local": cast("Any", zone)}, {"local": Pace(clock, 60, 10)}
    seen = evidence or Evidence(clock)
    return Observer(store, capacities, clock, seen, calls, paces, "ours", lambda: snapshot)


def test_a_hint_lists_now_and_none_is_lost() -> None:
    async def story() -> None:
        zone, calls = SlowZone(), Calls(4)
        observer = watching(zone, calls, HandClock())
        observer.look("local", "z")
        await settled()
        assert zone.begun == 1
        observer.look("local", "z")
        observer.look("local", "z")
        await settled()
        assert zone.begun == 1, "one listing of a zone at a time"
        zone.go_on.set()
        await settled()
        assert zone.begun == 2, "what changed while it was listed is looked at again, once"
        assert not calls.running("list local z")

    asyncio.run(story())


def test_hints_wait_for_the_end_of_a_hold() -> None:
    async def story() -> None:
        clock = HandClock()
        zone, calls = SlowZone(), Calls(4)
        observer = watching(zone, calls, clock)
        zone.held_s = 20.0
        observer.look("local", "z")
        await settled()
        observer.look("local", "z")  # missed by the listing under way, which is refused
        zone.go_on.set()
        await settled()
        assert zone.begun == 1
        zone.held_s = None
        for _ in range(40):
            observer.look("local", "z")
            observer.start_due()
            await settled()
            assert zone.begun == 1
            clock.advance(0.5)
        observer.start_due()
        await settled()
        assert zone.begun == 2, "at the end of the hold, although its turn is ten seconds later"
        await calls.stop()

    asyncio.run(story())


class Verbs:
    """A store that writes down which verbs were committed."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []

    async def transact(self, verb: Any, *arguments: object) -> None:
        self.done.append((verb, *arguments))


def mute(evidence: Evidence, clock: HandClock) -> Mute | None:
    """What is known of the zone, after a tick."""
    empty = Snapshot()
    return evidence.take(empty, clock.now()).mute.get(("local", "z"))


def test_a_zone_that_hangs_is_told_of_until_it_answers() -> None:
    async def story() -> None:
        clock, zone, calls = HandClock(), SlowZone(), Calls(4)
        evidence, store = Evidence(clock), Verbs()
        observer = watching(zone, calls, clock, evidence, store)
        observer.start_due()
        await settled()
        assert mute(evidence, clock) is None, "it was asked a moment ago"
        for _ in range(3):
            clock.advance(5.0)
            mute(evidence, clock)
        assert mute(evidence, clock) == Mute(seconds=15.0)
        clock.advance(1000.0)
        assert mute(evidence, clock) is None, "it was us who stood still"
        for _ in range(4):
            clock.advance(5.0)
            mute(evidence, clock)
        assert mute(evidence, clock) == Mute(seconds=20.0)
        zone.go_on.set()
        await settled()
        assert mute(evidence, clock) is None
        assert store.done == [], "nothing was refused, so nothing rests for it"

    asyncio.run(story())


def test_a_zone_that_refuses_is_told_of_at_once_and_tried_again_when_it_does_not() -> None:
    async def story() -> None:
        clock, zone, calls = HandClock(), SlowZone(), Calls(4)
        evidence, store = Evidence(clock), Verbs()
        observer = watching(zone, calls, clock, evidence, store)
        zone.error = PermissionDenied("no such right")
        zone.go_on.set()
        observer.start_due()
        await settled()
        clock.advance(4.0)
        assert mute(evidence, clock) == Mute(seconds=4.0, said="no such right", denied=True)
        zone.error = None
        observer.look("local", "z")
        await settled()
        assert mute(evidence, clock) is None
        assert store.done == [(reopen_zone, "local", "z")]
        observer.look("local", "z")
        await settled()
        assert len(store.done) == 1

    asyncio.run(story())


def failing() -> tuple[HandClock, SlowZone, Evidence, Observer]:
    """A zone that has no listing to show, whoever asks."""
    clock, zone = HandClock(), SlowZone()
    evidence = Evidence(clock)
    zone.error = Transient("503: later")
    zone.go_on.set()
    return clock, zone, evidence, watching(zone, Calls(4), clock, evidence, Verbs())


def test_errors_of_a_moment_are_not_told_of_and_what_was_said_last_is() -> None:
    async def story() -> None:
        clock, zone, evidence, observer = failing()
        for _ in range(3):
            observer.look("local", "z")
            await settled()
            assert mute(evidence, clock) is None
            clock.advance(5.0)
        assert mute(evidence, clock) == Mute(seconds=15.0, said="503: later")
        zone.error = RateLimited("too often")
        observer.look("local", "z")
        await settled()
        assert mute(evidence, clock) is None, "that is an answer"

    asyncio.run(story())


def test_a_zone_that_is_not_asked_because_its_provider_rests_is_not_called_silent() -> None:
    async def story() -> None:
        clock, _, evidence, observer = failing()
        observer.start_due()
        await settled()
        observer._paces["local"].hold("list", 100.0)  # as another zone's listing was told
        for _ in range(10):
            clock.advance(5.0)
            observer.start_due()
            assert mute(evidence, clock) is None

    asyncio.run(story())


def test_a_zone_that_refused_and_was_then_asked_too_often_is_forgiven_all_the_same() -> None:
    async def story() -> None:
        clock, zone, calls = HandClock(), SlowZone(), Calls(4)
        evidence, store = Evidence(clock), Verbs()
        observer = watching(zone, calls, clock, evidence, store)
        zone.go_on.set()
        for error in (PermissionDenied("no such right"), RateLimited("too often", retry_after_s=5.0)):
            zone.error = error
            observer.look("local", "z")
            await settled()
            found = mute(evidence, clock)
            assert found is not None
            assert found.denied
        zone.error = None
        clock.advance(6.0)
        observer.look("local", "z")
        await settled()
        assert mute(evidence, clock) is None
        assert store.done == [(reopen_zone, "local", "z")]

    asyncio.run(story())


class Strays:
    """A zone that is full of things with our label that nobody owns, and tired of deletes."""

    name = "local"

    def __init__(self, clock: HandClock) -> None:
        self.clock = clock
        self.deletes: list[tuple[float, str]] = []
        self.tired = True

    async def list(self, zone: str) -> Listing:
        return Listing(zone=zone, slices=tuple(seen(f"s{number}", zone=zone) for number in range(5)))

    async def delete(self, name: str, zone: str) -> None:
        self.deletes.append((self.clock.steady(), name))
        if self.tired:
            raise RateLimited("too often", retry_after_s=100.0)


class Sweeping:
    """A store that agrees to every sweep."""

    def __init__(self) -> None:
        self.swept = 0

    async def transact(self, verb: object, *arguments: object) -> bool:
        self.swept += 1
        return True


def test_a_sweep_that_is_told_to_wait_deletes_nothing_until_then() -> None:
    async def story() -> None:
        clock, calls, store = HandClock(), Calls(4), Sweeping()
        zone = Strays(clock)
        observer = watching(zone, calls, clock, store=store)
        while clock.steady() < 230.0:
            observer.look("local", "z")
            await settled()
            zone.tired = clock.steady() < 100.0
            clock.advance(10.0)
        assert zone.deletes[0] == (60.0, "s0"), "two listings far enough apart showed it"
        assert {at for at, _ in zone.deletes[1:6]} == {160.0}
        assert [name for _, name in zone.deletes[1:6]] == [f"s{number}" for number in range(5)]
        assert store.swept == len(zone.deletes), "nothing is written down that is not tried"

    asyncio.run(story())
