"""A worker stops when asked and gives back what it had not computed; it prepares ahead, and the device has one unit."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.domain import ledger
from penstock.domain.ledger import Unit
from penstock.extract.calls import Calls
from penstock.extract.layout import NotWhole, Piece
from penstock.extract.plan import RunPlan, publish
from penstock.extract.worker import Settings, Standing, Stopped, Worker
from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import ObjectsError
from tests.process.extraction import cheap_compute, cheap_plan, check
from tests.unit.extract.cheap import calls_to, finish, memory, run

PLAN = cheap_plan(rows=40, unit_rows=4)


def begin(calls: Calls, compute: Any, **more: Any) -> Worker:
    settings = Settings(worker="one", lease_s=30, look_s=0.01, code="test")
    return Worker(calls, PLAN, compute, settings, rng=random.Random(1), steady=time.monotonic, **more)


def kinds(bucket: MemoryObjects, what: str) -> list[str]:
    return [path for path in bucket.paths() if path.split("/")[2] == what]


def everything(bucket: MemoryObjects) -> dict[str, bytes]:
    return {path: stored.data for path in bucket.paths() if (stored := bucket.peek(path)) is not None}


def test_a_worker_that_is_asked_to_stop_gives_back_what_it_had_begun() -> None:
    bucket = memory()
    calls = calls_to(bucket)
    asked = threading.Event()

    def compute(plan: RunPlan, unit: Unit) -> Iterator[Piece]:
        for number, piece in enumerate(cheap_compute()(plan, unit)):
            if kinds(bucket, "commits") and number == 1:
                asked.set()
            yield piece

    async def story() -> None:
        await publish(calls, PLAN)
        with pytest.raises(Stopped):
            await begin(calls, compute, should_stop=asked.is_set).work()

    run(story)
    committed = len(kinds(bucket, "commits"))
    assert 1 <= committed < len(PLAN.units)
    assert kinds(bucket, "leases") == []
    assert {path.split("/")[3] for path in kinds(bucket, "data")} == {
        path.split("/")[3] for path in kinds(bucket, "commits")
    }
    run(lambda: finish(calls, PLAN, "two"))
    check(everything(bucket), PLAN)


def test_one_unit_is_prepared_while_another_is_on_the_device() -> None:
    calls = calls_to(memory())
    lock = threading.Lock()
    on_device = most_on_device = prepared = 0
    ahead: list[int] = []

    def compute(plan: RunPlan, unit: Unit) -> Iterator[Piece]:
        nonlocal prepared
        with lock:
            prepared += 1
            ahead.append(on_device)
        return pieces(plan, unit)

    def pieces(plan: RunPlan, unit: Unit) -> Iterator[Piece]:
        nonlocal on_device, most_on_device
        with lock:
            on_device += 1
            most_on_device = max(most_on_device, on_device)
        # The device works until the next unit is prepared: without preparing ahead this would only time out.
        ends = time.monotonic() + (2.0 if len(ahead) == 1 else 0.0)
        while prepared < 2 and time.monotonic() < ends:
            time.sleep(0.001)
        yield from cheap_compute()(plan, unit)
        with lock:
            on_device -= 1

    async def story() -> None:
        await publish(calls, PLAN)
        await begin(calls, compute).work()

    run(story)
    assert most_on_device == 1
    assert 1 in ahead, "no unit was prepared while another was on the device"


def test_what_is_not_the_unit_ends_the_worker_and_commits_nothing() -> None:
    bucket = memory()
    calls = calls_to(bucket)

    async def story() -> None:
        await publish(calls, PLAN)
        await begin(calls, lambda plan, unit: list(cheap_compute()(plan, unit))[1:]).work()

    with pytest.raises(NotWhole):
        run(story)
    assert kinds(bucket, "commits") == []


def test_a_unit_that_another_committed_meanwhile_is_discarded(caplog: pytest.LogCaptureFixture) -> None:
    bucket = memory()
    calls = calls_to(bucket)
    first = PLAN.units[0].id

    def compute(plan: RunPlan, unit: Unit) -> Iterator[Piece]:
        if unit.id == first and ledger.commit_path(plan.run, first) not in bucket.paths():
            # As if this worker had slept past its lease: another one finishes everything.
            for path in kinds(bucket, "leases"):
                asyncio.run(bucket.delete(path))
            asyncio.run(finish(calls_to(bucket), plan, "other"))
        return cheap_compute()(plan, unit)

    async def story() -> None:
        await publish(calls, PLAN)
        await begin(calls, compute).work()

    with caplog.at_level(logging.WARNING, "penstock.extract.worker"):
        run(story)
    assert f"{first} was committed by another worker" in caplog.text
    check(everything(bucket), PLAN)


def test_standing_is_told_after_each_unit() -> None:
    told: list[Standing] = []

    async def story() -> None:
        calls = calls_to(memory())
        await publish(calls, PLAN)
        await begin(calls, cheap_compute(), report=told.append).work()

    run(story)
    opens = [standing.open for standing in told]
    assert opens == sorted(opens, reverse=True)
    assert (opens[0], opens[-1], told[-1].documents) == (len(PLAN.units), 0, PLAN.rows)


class Outage:
    """Every call fails until it is over."""

    def __init__(self, fails: int) -> None:
        self.left = fails

    async def before(self, verb: str, path: str) -> None:
        if self.left and verb != "list":
            self.left -= 1
            raise ObjectsError(f"{verb} {path}: out of reach")

    async def after(self, verb: str, path: str) -> None:
        pass


def test_an_outage_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.extract.calls.PAUSE_S", (0.001, 0.01))
    bucket = memory()
    make: Callable[[], Calls] = lambda: calls_to(bucket.by("one", Outage(25)))  # noqa: E731
    run(lambda: finish(make(), PLAN))
    check(everything(bucket), PLAN)
