"""A hint that a zone changed makes the controller list it at once, once more if it was being listed already.

Unless its provider asked for a rest: then it is listed when that is over.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from penstock.controller.calls import Calls, Pace
from penstock.controller.observe import Observer
from penstock.controller.witness import Evidence
from penstock.ports.capacity import Listing, RateLimited
from tests.unit.controller.stage import HandClock


class SlowZone:
    """Listings that end when the test says so."""

    name = "local"

    def __init__(self) -> None:
        self.begun = 0
        self.go_on = asyncio.Event()
        self.held_s: float | None = None

    async def list(self, zone: str) -> Listing:
        self.begun += 1
        await self.go_on.wait()
        if self.held_s is not None:
            raise RateLimited("too often", retry_after_s=self.held_s)
        return Listing(zone=zone, slices=())


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def watching(zone: SlowZone, calls: Calls, clock: HandClock) -> Observer:
    """Of a pool with that one zone, in which nothing is."""
    pool = SimpleNamespace(provider="local", zones=("z",))
    snapshot = cast("Any", SimpleNamespace(slices={}, pools={"p": pool}, zones={}, unsettled={}))
    capacities, paces = {"local": cast("Any", zone)}, {"local": Pace(clock, 60, 10)}
    return Observer(cast("Any", None), capacities, clock, Evidence(clock), calls, paces, "ours", lambda: snapshot)


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
