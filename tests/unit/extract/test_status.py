"""How a run goes is told from leases and commits: who works, who was lost, how fast, how long still."""

from __future__ import annotations

import time

import pytest

from penstock.domain import ledger
from penstock.domain.ledger import Lease
from penstock.extract.status import Watcher, tokens_per_s
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
    assert [(worker.worker, worker.state, worker.documents) for worker in view.workers] == [("one", "idle", plan.rows)]

    async def lose(unit: str, worker: str) -> None:
        await requeue(calls, plan, unit, force=True)
        lease = Lease(unit=unit, attempt=f"{worker}-3", fence=0)
        await bucket.put(ledger.lease_path(plan.run, unit, 0), ledger.encode(lease))

    run(lambda: lose(plan.units[0].id, "two-of-us"))
    clock.now += 60
    run(lambda: lose(plan.units[1].id, "three"))
    view = run(lambda: watcher.look(clock.now + 50))
    assert {worker.worker: (worker.state, worker.unit) for worker in view.workers} == {
        "one": ("idle", ""),
        "two-of-us": ("recovering", plan.units[0].id),
        "three": ("working", plan.units[1].id),
    }
    assert (view.sealed, view.healthy, view.working, view.recovering) == (False, 2, 1, 1)
    assert view.committed == len(plan.units) - 2
    assert view.left_s is not None
    assert view.left_s > 0


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
