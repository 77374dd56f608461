"""Background calls: one per name, bounded, their errors kept; and the pace at which providers are asked."""

from __future__ import annotations

import asyncio

import pytest

from penstock.controller.calls import Calls, Pace
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


async def _most_at_once(limit: int, wanted: int) -> int:
    calls = Calls(limit)
    now = most = 0
    left = asyncio.Semaphore(0)

    async def call() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        left.release()

    for number in range(wanted):
        calls.start(str(number), call)
    for _ in range(wanted):
        await left.acquire()
    return most


def test_no_more_than_the_limit_run_at_once() -> None:
    assert asyncio.run(_most_at_once(3, 10)) == 3


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


def test_a_pace_allows_so_many_a_minute() -> None:
    clock = HandClock()
    pace = Pace(clock, 3)
    assert [pace.take() for _ in range(4)] == [True, True, True, False]
    clock.advance(59.9)
    assert not pace.take()
    clock.advance(0.1)
    assert [pace.take() for _ in range(4)] == [True, True, True, False]


def test_a_hold_stops_all_starts_and_the_longest_hold_wins() -> None:
    clock = HandClock()
    pace = Pace(clock, 3)
    pace.hold(20)
    pace.hold(5)
    clock.advance(19)
    assert not pace.take()
    clock.advance(1)
    assert pace.take()
