"""How a run goes is told from leases and commits: who works, who was lost, how fast, how long still."""

from __future__ import annotations

import random
import time

import pytest

from penstock.domain import ledger
from penstock.domain.ledger import Lease
from penstock.extract.claims import Claims, clock_path
from penstock.extract.status import RunView, Watcher, tokens_per_s
from penstock.extract.verify import requeue
from penstock.objects.memory import MemoryObjects
from tests.process.extraction import tokens_of
from tests.unit.extract.cheap import calls_to, finished, run


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0


def test_workers_that_hold_a_lease_work_until_it_is_old() -> None:
    clock = Clock()
    bucket = MemoryObjects(now=lambda: clock.now)
    calls, plan = finished(bucket)
    watcher = Watcher(calls, plan, lease_s=90)
    view = run(lambda: watcher.look(clock.now + 5))
    assert (view.sealed, view.committed, view.left_s) == (True, len(plan.units), 0.0)
    assert view.facts.tokens == sum(len(tokens_of(row)) for row in range(plan.rows))
    assert [(worker.worker, worker.state, worker.documents) for worker in view.workers] == [("one", "ended", plan.rows)]
    assert view.healthy == 0

    async def lose(unit: str, worker: str) -> None:
        await requeue(calls, plan, unit, force=True)
        lease = Lease(unit=unit, attempt=f"{worker}-3", fence=0)
        await bucket.put(ledger.lease_path(plan.run, unit, 0), ledger.encode(lease))

    run(lambda: lose(plan.units[0].id, "two-of-us"))
    clock.now += 60
    run(lambda: lose(plan.units[1].id, "three"))
    view = run(lambda: watcher.look(clock.now + 50))
    assert {worker.worker: (worker.state, worker.unit) for worker in view.workers} == {
        "one": ("ended", ""),
        "two-of-us": ("recovering", plan.units[0].id),
        "three": ("working", plan.units[1].id),
    }
    assert (view.sealed, view.healthy, view.working, view.recovering) == (False, 1, 1, 1)
    assert view.committed == len(plan.units) - 2
    assert view.left_s is not None
    assert view.left_s > 0


def test_whoever_gives_no_sign_for_the_length_of_its_own_lease_is_lost() -> None:
    clock = Clock()
    bucket = MemoryObjects(now=lambda: clock.now)
    calls, plan = finished(bucket)
    first, second = plan.units[0].id, plan.units[1].id

    def claims(name: str, lease_s: float) -> Claims:
        return Claims(calls, plan, name, fence=0, lease_s=lease_s, rng=random.Random(1), steady=lambda: clock.now)

    short, long, waiting = claims("short", 8), claims("long", 600), claims("waiting", 30)
    states: list[dict[str, str]] = []

    async def look() -> RunView:
        view = await Watcher(calls, plan, lease_s=90).look(clock.now)
        states.append({worker.worker: worker.state for worker in view.workers})
        return view

    async def story() -> None:
        for unit in (first, second):
            await requeue(calls, plan, unit, force=True)
        assert await short.claim(plan.units[:1]) is not None
        assert await long.claim(plan.units[1:2]) is not None
        assert await waiting.claim(plan.units[:2]) is None
        view = await look()
        assert (view.healthy, view.working, view.left_s is None) == (3, 2, False)
        assert view.tokens_per_s > 0
        # The short one is dead; its unit is free by its own lease's length, not by 90 s, and then another has it.
        clock.now += 10
        await look()
        assert await long.claim(plan.units[:1]) is None
        assert await claims("next", 8).claim(plan.units[:1]) is not None
        await look()
        # All are dead but the long one, which works on; then it is, too.
        clock.now += 100
        assert (await look()).left_s is not None
        clock.now += 500
        view = await look()
        assert (view.healthy, view.working, view.recovering, view.lost) == (0, 0, 2, 2)
        assert (view.tokens_per_s, view.left_s) == (0.0, None)
        # Who says good-bye is not lost.
        await waiting.leave()
        await look()

    run(story)
    assert states == [
        {"one": "ended", "short": "working", "long": "working", "waiting": "idle"},
        {"one": "ended", "short": "recovering", "long": "working", "waiting": "idle"},
        {"one": "ended", "short": "lost", "next": "working", "long": "working", "waiting": "idle"},
        {"one": "ended", "short": "lost", "next": "recovering", "long": "working", "waiting": "lost"},
        {"one": "ended", "short": "lost", "next": "recovering", "long": "recovering", "waiting": "lost"},
        {"one": "ended", "short": "lost", "next": "recovering", "long": "recovering"},
    ]


def test_a_lease_that_was_given_back_is_seen_with_its_next_holder() -> None:
    clock = Clock()
    bucket = MemoryObjects(now=lambda: clock.now)
    _, plan = finished(MemoryObjects(now=lambda: clock.now))
    watcher = Watcher(calls_to(bucket), plan, 90)

    async def story() -> list[str]:
        path = ledger.lease_path(plan.run, plan.units[0].id, 0)
        seen = []
        for worker in ("one", "two"):
            lease = Lease(unit=plan.units[0].id, attempt=f"{worker}-1", fence=0)
            await bucket.put(path, ledger.encode(lease))
            seen += [each.worker for each in (await watcher.look(clock.now)).workers]
        return seen

    assert run(story) == ["one", "two"]


def test_what_a_power_cut_left_of_records_is_told_and_not_raised() -> None:
    clock = Clock()
    bucket = MemoryObjects(now=lambda: clock.now)
    calls, plan = finished(bucket)
    broken = plan.units[2].id

    async def story() -> RunView:
        await bucket.put(ledger.commit_path(plan.run, broken), b"")
        await bucket.put(ledger.lease_path(plan.run, broken, 0), b"\0\0\0")
        await bucket.put(clock_path(plan.run, "dark"), b"")
        return await Watcher(calls, plan, 90).look(clock.now)

    view = run(story)
    # A sound manifest stands, workers end, and so does `watch`.
    assert (view.committed, view.sealed, view.left_s) == (len(plan.units) - 1, True, 0.0)
    assert view.damaged == (
        f"{broken}: its commit cannot be read (0 bytes); `tpu extract requeue {broken}` has it made again",
    )


def test_the_rate_is_of_the_last_minutes() -> None:
    clock = Clock()
    bucket = MemoryObjects(now=lambda: clock.now)
    calls, plan = finished(bucket)
    done = run(lambda: Watcher(calls, plan, 90).done())
    tokens = sum(each.commit.facts.tokens for each in done)
    assert tokens_per_s(done, clock.now + 100) == pytest.approx(tokens / 100, rel=0.2)
    assert tokens_per_s(done, clock.now + 10_000) == 0.0
    assert tokens_per_s([], time.monotonic()) == 0.0


def test_a_run_of_which_nothing_is_done() -> None:
    clock = Clock()
    bucket = MemoryObjects(now=lambda: clock.now)
    _, plan = finished(MemoryObjects(now=lambda: clock.now))
    view = run(lambda: Watcher(calls_to(bucket), plan, 90).look(clock.now))
    assert (view.committed, view.workers, view.tokens_per_s, view.left_s) == (0, (), 0.0, None)
