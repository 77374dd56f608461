"""A hint that a zone changed makes the controller list it at once, once more if it was being listed already."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from penstock.controller.calls import Calls, Pace
from penstock.controller.observe import Observer
from penstock.controller.witness import Evidence
from penstock.ports.capacity import Listing
from tests.unit.controller.stage import HandClock


class SlowZone:
    """Listings that end when the test says so."""

    name = "local"

    def __init__(self) -> None:
        self.begun = 0
        self.go_on = asyncio.Event()

    async def list(self, zone: str) -> Listing:
        self.begun += 1
        await self.go_on.wait()
        return Listing(zone=zone, slices=())


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_hint_lists_now_and_none_is_lost() -> None:
    async def story() -> None:
        clock = HandClock()
        zone, calls = SlowZone(), Calls(4)
        snapshot = cast("Any", SimpleNamespace(slices={}))
        observer = Observer(
            cast("Any", None),
            {"local": cast("Any", zone)},
            clock,
            Evidence(clock),
            calls,
            {"local": Pace(clock, 60, 10)},
            "ours",
            lambda: snapshot,
        )
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
