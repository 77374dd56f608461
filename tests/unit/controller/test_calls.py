"""Background calls: one per name, lanes for zones, their errors kept; and the pace at which providers are asked."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from penstock.controller.calls import Calls, Pace
from penstock.domain import limits
from penstock.ports.store import Unavailable
from tests.unit.controller.stage import HandClock


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def _two_of_one_name() -> tuple[bool, bool]:
    calls = Calls(2)
    gate = asyncio.Event()

    async def call() -> None:
        await gate.wait()

    first, second = calls.start("a", call), calls.start("a", call)
    await settle()
    assert calls.running("a")
    gate.set()
    await settle()
    assert not calls.running("a")
    return first, second


def test_a_name_runs_once_at_a_time() -> None:
    assert asyncio.run(_two_of_one_name()) == (True, False)


async def _through_lanes(width: int, wanted: int) -> tuple[int, int]:
    """Of calls in a lane that hangs and in another: how many of each got through."""
    calls = Calls(width)
    begun = {"dead": 0, "alive": 0}
    never = asyncio.Event()

    async def call(lane: str) -> None:
        async with calls.lane(lane):
            begun[lane] += 1
            if lane == "dead":
                await never.wait()

    for lane in begun:
        for number in range(wanted):
            calls.start(f"{lane} {number}", partial(call, lane))
    await settle()
    await calls.stop()
    return begun["dead"], begun["alive"]


def test_a_lane_that_hangs_takes_its_width_and_delays_no_other() -> None:
    assert asyncio.run(_through_lanes(3, 10)) == (3, 10)


async def _failing(error: Exception) -> list[BaseException]:
    calls = Calls(2)

    async def call() -> None:
        raise error

    calls.start("a", call)
    await settle()
    return list(calls.failures)


def test_an_unexpected_error_is_kept_for_the_loop() -> None:
    error = KeyError("bug")
    assert asyncio.run(_failing(error)) == [error]


def test_a_store_that_is_away_is_no_bug() -> None:
    assert asyncio.run(_failing(Unavailable("away"))) == []


async def _stopped(begun: bool) -> None:
    calls = Calls(1)

    async def call() -> None:
        await asyncio.Event().wait()

    for name in "abc":
        calls.start(name, call)
    if begun:
        await settle()
    await calls.stop()
    assert not any(calls.running(name) for name in "abc")
    assert not calls.failures


@pytest.mark.parametrize("begun", [False, True])
def test_stopping_ends_calls_that_run_wait_or_never_began(begun: bool) -> None:
    """Warnings are errors here: a coroutine that was never awaited would fail this test."""
    asyncio.run(_stopped(begun))


def starts(pace: Pace, clock: HandClock, seconds: float, step_s: float = 0.25) -> list[float]:
    """When creates started, if somebody always wants one."""
    begun: list[float] = []
    until = clock.steady() + seconds
    while clock.steady() < until:
        while pace.take():
            begun.append(clock.steady())
        clock.advance(step_s)
    return begun


def busiest(begun: list[float]) -> int:
    return max(sum(1 for at in begun if first <= at < first + 60.0) for first in begun)


def test_a_pace_allows_so_many_in_any_minute_few_of_them_together() -> None:
    clock = HandClock()
    begun = starts(Pace(clock, per_minute=75, at_once=15), clock, 600.0)
    assert len([at for at in begun if at == 0.0]) == 15
    assert busiest(begun) <= 75
    assert len(begun) == 15 + 599, "then one a second"


def test_what_a_restart_forgets_stays_under_the_providers_limit() -> None:
    """The Cloud TPU API allows 91 creates a minute. A server that starts again knows nothing of the last minute."""
    clock = HandClock()
    pace = Pace(clock, limits.CREATES_PER_MINUTE, limits.CREATES_AT_ONCE)
    begun = starts(pace, clock, 45.0)
    again = Pace(clock, limits.CREATES_PER_MINUTE, limits.CREATES_AT_ONCE)
    begun += starts(again, clock, 90.0)
    assert 85 <= busiest(begun) <= 91


def test_an_idle_pace_saves_up_no_more_than_comes_together() -> None:
    clock = HandClock()
    pace = Pace(clock, per_minute=75, at_once=15)
    clock.advance(3600.0)
    assert sum(pace.take() for _ in range(100)) == 15


def test_a_hold_is_for_its_kind_of_call_and_the_longest_wins() -> None:
    clock = HandClock()
    pace = Pace(clock, per_minute=13, at_once=3)
    pace.hold("create", 20.0)
    pace.hold("create", 5.0)
    pace.hold("list", None)
    assert pace.held("list")
    assert not pace.held("delete")
    clock.advance(limits.RATE_REST_S)
    assert not pace.held("list")
    clock.advance(19 - limits.RATE_REST_S)
    assert not pace.take()
    clock.advance(1)
    assert pace.take()


def test_no_rest_lasts_for_ever_whatever_a_provider_asks_for() -> None:
    clock = HandClock()
    pace = Pace(clock, 60, 10)
    pace.hold("delete", 86_400.0)
    assert pace.left_s("delete") == limits.RATE_REST_S_MAX
    clock.advance(limits.RATE_REST_S_MAX)
    assert not pace.held("delete")
    assert pace.left_s("delete") == 0.0
