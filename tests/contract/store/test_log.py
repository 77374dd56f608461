"""The event log: order, cursor, wake-up, on every store."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.ports.store import Store, Transaction
from tests.contract.store.examples import a_job, submit
from tests.contract.store.harness import Harness

#: Far above what a wake-up takes (a millisecond), far below the time-out the waiter would otherwise sleep out.
PROMPT_S = 20.0  #: what is not prompt waits for thirty


def test_a_cursor_reads_every_event_once_in_order(on: Harness) -> None:
    for start in range(0, 30, 3):
        on.transact(submit, *(a_job(start + n) for n in range(3)))
    seen, cursor = [], 0
    while page := on.read(lambda r, after: r.events(after, 7), cursor):
        seen += page
        cursor = page[-1].seq
    assert [event.seq for event in seen] == list(range(1, 31))
    assert [event.id for event in seen] == [f"j{n:04}" for n in range(30)]
    assert on.read(lambda r: r.last_seq()) == 30


def test_seq_has_no_holes_where_verbs_failed(on: Harness) -> None:
    def doomed(tx: Transaction) -> None:
        submit(tx, a_job(99))
        raise ZeroDivisionError

    for n in range(3):
        on.transact(submit, a_job(n))
        with pytest.raises(ZeroDivisionError):
            on.transact(doomed)
    assert [event.seq for event in on.read(lambda r: r.events(0, 9))] == [1, 2, 3]


async def _woken_after(store: Store, writer: Store, number: int) -> float:
    """Seconds from the commit to the end of a wait."""
    cursor = await store.read(lambda r: r.last_seq())
    waiting = asyncio.create_task(store.wait(cursor, 30.0))
    await asyncio.sleep(0)
    await writer.transact(submit, a_job(number))
    committed = time.monotonic()
    await waiting
    return time.monotonic() - committed


def test_a_commit_wakes_who_waits(on: Harness) -> None:
    bound = on.store.bound(actor="other")
    slowest = max(on.run(_woken_after(on.store, bound, number)) for number in range(20))
    assert slowest < PROMPT_S


def test_a_wait_that_is_behind_returns_at_once(on: Harness) -> None:
    on.transact(submit, a_job(1), a_job(2))
    started = time.monotonic()
    on.run(on.store.wait(1, 30.0))
    assert time.monotonic() - started < PROMPT_S


def test_a_wait_ends_by_its_time_out(on: Harness) -> None:
    on.transact(submit, a_job(1))
    started = time.monotonic()
    on.run(on.store.wait(1, 0.05))
    assert 0.04 < time.monotonic() - started < PROMPT_S


def test_a_store_opened_later_knows_where_the_log_stands(threaded: Harness) -> None:
    threaded.transact(submit, a_job(1), a_job(2))
    later = threaded.open_another()
    started = time.monotonic()
    threaded.run(later.wait(1, 30.0))
    assert time.monotonic() - started < PROMPT_S


@pytest.mark.postgres
def test_another_process_is_woken_too(postgres: Harness) -> None:
    other = postgres.open_another()
    slowest = max(postgres.run(_woken_after(other, postgres.store, number)) for number in range(20))
    assert slowest < PROMPT_S


def test_many_waiters_are_all_told_and_a_cancelled_one_is_forgotten(on: Harness) -> None:
    async def story() -> None:
        waiting = [asyncio.create_task(on.store.wait(0, 30.0)) for _ in range(50)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await on.store.transact(submit, a_job(1))
        async with asyncio.timeout(PROMPT_S):
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert outcomes[1:] == [None] * 49

    on.run(story())
