"""How often a project's API is asked: real controller and provider against the emulated API, by a clock of the test.

What was called, and when, is read from the emulator's own books. A minute takes a moment here.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from penstock.controller.loop import Controller
from penstock.domain import limits
from penstock.domain.ids import IdMaker
from penstock.domain.nouns import Pool, Team
from penstock.emulator.tpu_faults import TpuFault
from penstock.emulator.tpu_world import World
from penstock.objects.memory import MemoryObjects
from penstock.ports.capacity import RateLimited
from penstock.store.sqlite import SqliteStore
from tests.unit.capacity.test_tpu_vm import Scene, play

ZONES = ("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a")
ALLOWED = 91  #: creates a minute
STEP_S = 0.5


class Fleet(Scene):
    """A controller with one fleet in four zones, at an API that counts."""

    def __init__(self, per_zone: int, *faults: TpuFault) -> None:
        super().__init__(World(create_calls_per_minute=ALLOWED, retry_after_s=30, faults=faults))
        self.per_zone = per_zone
        self.store = SqliteStore.inline(self.clock)
        self.controller = self.new_controller()

    def new_controller(self) -> Controller:
        """As after a restart: nothing is known but what the store holds."""
        return Controller(
            store=self.store,
            capacities={"tpu_vm": self.capacity},
            objects=MemoryObjects(),
            clock=self.clock,
            ids=IdMaker(lambda: 0),
            label="house",
            holder="server",
        )

    async def set_up(self) -> None:
        commands = self.controller.commands
        await commands.put_team(Team(name="t"))
        await commands.put_pool(
            Pool(
                name="p", team="t", provider="tpu_vm", accelerator="v5e-8", chips=0, hosts=0, zones=ZONES,
                per_zone=self.per_zone, max=4 * self.per_zone,
            )
        )  # fmt: skip

    async def live(self, seconds: float) -> None:
        """Ticks, with all calls answered before time goes on."""
        until = self.clock.at + seconds
        while self.clock.at < until:
            assert await self.controller._leadership.lead()
            await self.controller.tick()
            await asyncio.gather(*self.controller._calls._running.values())
            self.clock.at += STEP_S

    @property
    def creates(self) -> list[tuple[float, str]]:
        """When a create was granted, and where."""
        history = self.tpu.cloud.books.history
        return [(each.t, each.zone) for each in history if each.what == "node.CREATING"]

    @property
    def busiest(self) -> int:
        times = [t for t, _ in self.creates]
        return max(sum(1 for t in times if first <= t < first + 60.0) for first in times)

    def answers(self, method: str, status: int) -> int:
        return sum(
            each["calls"] for each in self.tpu._rest.calls() if (each["method"], each["status"]) == (method, status)
        )


def test_one_pace_serves_all_zones_and_no_minute_has_too_many() -> None:
    fleet = Fleet(per_zone=60)

    async def story() -> None:
        await fleet.set_up()
        await fleet.live(150.0)
        first = Counter(zone for _, zone in fleet.creates[: limits.CREATES_AT_ONCE])
        assert first == dict.fromkeys(ZONES[:3], 4) | {ZONES[3]: 3}, "zones take turns"
        assert fleet.busiest <= limits.CREATES_PER_MINUTE < ALLOWED
        assert len(fleet.creates) >= 150, "and it is no slower than that"
        assert fleet.answers("nodes.create", 429) == 0

    play(fleet, story())


@pytest.mark.parametrize("after_s", [5.0, 30.0, 59.0])
def test_a_restart_within_the_minute_stays_under_the_limit(after_s: float) -> None:
    fleet = Fleet(per_zone=60)

    async def story() -> None:
        await fleet.set_up()
        await fleet.live(after_s)
        await fleet.controller._calls.stop()
        fleet.controller = fleet.new_controller()
        await fleet.live(90.0)
        assert limits.CREATES_PER_MINUTE < fleet.busiest <= ALLOWED
        assert fleet.answers("nodes.create", 429) == 0

    play(fleet, story())


@pytest.mark.parametrize(("said_s", "rest_s"), [(40, 40.0), (None, 10.0)])
def test_told_to_wait_it_asks_no_zone_until_then(said_s: int | None, rest_s: float) -> None:
    fault = TpuFault(
        kind="refuse", call="nodes.create", zone=ZONES[1], status=429, retry_after_s=said_s,
        message="Quota exceeded: CreateNode requests per minute",
    )  # fmt: skip
    fleet = Fleet(60, fault)

    async def story() -> None:
        await fleet.set_up()
        began = fleet.clock.at
        await fleet.live(STEP_S)
        granted = len(fleet.creates)
        assert fleet.answers("nodes.create", 429) == 1
        await fleet.live(rest_s - 2 * STEP_S)
        assert len(fleet.creates) == granted
        await fleet.live(10.0)
        assert fleet.creates[granted][0] >= rest_s
        assert fleet.answers("nodes.create", 429) == 1
        assert began + rest_s <= fleet.clock.at

    play(fleet, story())


def test_told_to_wait_it_lists_no_zone_until_then() -> None:
    fleet = Fleet(1, TpuFault(kind="refuse", call="nodes.list", zone=ZONES[0], status=429, retry_after_s=100))

    async def story() -> None:
        await fleet.set_up()
        await fleet.live(STEP_S)
        assert fleet.answers("nodes.list", 429) == 1
        before = fleet.answers("nodes.list", 200)
        await fleet.live(98.0)
        assert fleet.answers("nodes.list", 200) == before
        await fleet.live(20.0)
        assert fleet.answers("nodes.list", 200) >= before + len(ZONES)

    play(fleet, story())


def test_an_operation_that_may_not_be_asked_about_now_is_asked_about_later() -> None:
    """Else a stockout that is told there, and nowhere else, would never be known."""
    fault = TpuFault(kind="refuse", call="operations.get", status=429, retry_after_s=20)
    fleet = Fleet(1, fault)

    async def story() -> None:
        await fleet.set_up()
        await fleet.live(STEP_S)
        began = fleet.clock.at
        async with asyncio.timeout(10), fleet.following():
            while len(fleet.told) < len(ZONES):
                fleet.heard.clear()
                await fleet.heard.wait()
        assert sorted(fleet.told) == sorted(ZONES)
        assert fleet.clock.at - began >= 20.0
        assert fleet.answers("operations.get", 429) == 1

    play(fleet, story())


def test_told_to_wait_nobody_asks_that_zone_the_same_until_then_and_others_are_asked() -> None:
    """Whoever it is that asks: the controller keeps its own holds, others may not."""
    fault = TpuFault(kind="refuse", call="nodes.get", zone=ZONES[0], status=429, retry_after_s=40)
    fleet = Fleet(1, fault)

    async def story() -> None:
        capacity = fleet.capacity
        refused: list[float | None] = []
        for _ in range(8):
            for ask in (capacity.addresses, capacity.inspect, capacity.get, capacity.clear_token):
                try:
                    await ask("s1", ZONES[0])
                except RateLimited as error:
                    refused.append(error.retry_after_s)
            fleet.clock.at += 4.0
        assert refused[:5] == [40.0, 40.0, 40.0, 40.0, 36.0]
        assert len(refused) == 32
        assert fleet.answers("nodes.get", 429) == 1
        assert fleet.answers("nodes.get", 404) == 0
        await capacity.list(ZONES[0])
        assert await capacity.get("s1", ZONES[1]) is None
        fleet.clock.at += 8.0
        assert await capacity.get("s1", ZONES[0]) is None
        assert fleet.answers("nodes.get", 429) == 1

    play(fleet, story())


def test_a_controller_in_doubt_asks_once_and_then_waits_as_long_as_it_was_told() -> None:
    fault = TpuFault(kind="refuse", call="nodes.get", status=429, retry_after_s=150)
    fleet = Fleet(2, fault)

    async def story() -> None:
        await fleet.set_up()
        await fleet.live(STEP_S)
        for slice in (await fleet.capacity.list(ZONES[0])).slices:
            await fleet.rest.call("DELETE", f"{fleet.rest.zone(ZONES[0])}/nodes/{slice.name}")
        await fleet.live(200.0)
        assert fleet.answers("nodes.get", 429) == 1
        assert fleet.answers("nodes.get", 404) == 0
        await fleet.live(60.0)
        assert fleet.answers("nodes.get", 404) >= 1

    play(fleet, story())
