"""The way between hosts and server: lost, doubled, late and reordered requests, and agents that keep quiet."""

from __future__ import annotations

import asyncio
import itertools

from penstock.domain.custody import Phase
from tests.unit.sim.desk import Desk, exit_of, story


def test_a_lost_completion_report_is_sent_again() -> None:
    async def tell(desk: Desk) -> None:
        await desk.launch()
        desk.world.network.link("s1", 0).drop_exits = 1
        await asyncio.sleep(120.0)

    desk = story(tell)
    at, code, _, _ = exit_of(desk)
    assert code == 0
    assert 4.0 < at - desk.times("proc.exited")[0] < 11.0


def test_duplicates_and_late_requests_arrive_out_of_order() -> None:
    async def tell(desk: Desk) -> None:
        desk.forget_exits = False
        link = desk.world.network.link("s1", 0)
        link.duplicate, link.late = 0.3, 0.2
        await desk.launch()
        await asyncio.sleep(400.0)

    desk = story(tell, seed=3)
    phases = [held.phase for _, held in desk.held()]
    assert any(earlier is Phase.EXITED and later is not Phase.EXITED for earlier, later in itertools.pairwise(phases))
    assert len(desk.records("proc.started")) == 1


def test_quiet_agents_cost_nothing_until_something_happens() -> None:
    async def tell(desk: Desk) -> None:
        await asyncio.sleep(86_400.0)
        assert len(desk.requests) == 2  # each joined once
        assert desk.world.alive("s1", 0)
        desk.attempt, desk.fence = "a1", 1
        desk.world.poke("s1")
        await asyncio.sleep(3600.0)
        desk.world.network.cut("s1", 0)
        assert not desk.world.alive("s1", 0)

    desk = story(tell, hosts=2, quiet=True)
    assert 8 <= len(desk.requests) <= 14
    assert exit_of(desk)[1] == 0
    assert desk.agent().held == ()


def test_a_quiet_agent_that_was_not_heard_tries_again() -> None:
    async def tell(desk: Desk) -> None:
        desk.attempt, desk.fence = "a1", 1
        desk.world.poke("s1")
        await asyncio.sleep(10.0)
        desk.down = True
        await asyncio.sleep(200.0)
        desk.down = False
        await asyncio.sleep(10.0)

    assert exit_of(story(tell, quiet=True))[1] == 0


def test_healing_drops_what_is_late() -> None:
    async def tell(desk: Desk) -> None:
        link = desk.world.network.link("s1", 0)
        link.duplicate = 1.0
        await asyncio.sleep(60.0)
        desk.world.heal()
        desk.requests.clear()
        await asyncio.sleep(60.0)

    assert len(story(tell).requests) <= 13
