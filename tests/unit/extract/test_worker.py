"""A worker stops when asked and gives back what it had begun; it prepares ahead, and has two units at most."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from penstock.domain import ledger
from penstock.domain.ledger import Unit
from penstock.extract.calls import Calls
from penstock.extract.layout import Course, NotWhole, Piece
from penstock.extract.plan import RunPlan, publish
from penstock.extract.worker import Settings, Standing, Stopped, Worker
from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import ObjectsError
from tests.process.extraction import cheap_compute, cheap_plan, check
from tests.unit.extract.cheap import calls_to, finish, memory, run

PLAN = cheap_plan(rows=40, unit_rows=4)


def begin(calls: Calls, compute: Any, storing_max: int = 1, **more: Any) -> Worker:
    settings = Settings(worker="one", lease_s=30, look_s=0.01, storing_max=storing_max, code="test")
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


class Noted:
    """Computes cheaply, and notes what happens to which unit in which order."""

    def __init__(self, bucket: MemoryObjects, course: bool) -> None:
        self.said: list[tuple[str, str]] = []
        self.uncommitted: list[int] = []  #: units on the device or computed, without a commit, whenever one is begun
        self.leases: list[int] = []  #: then, that of the unit itself among them
        self._bucket = bucket
        self._course = course
        self._changed = threading.Condition()

    def __call__(self, plan: RunPlan, unit: Unit) -> Course | Iterator[Piece]:
        self.note("prepared", unit.id)
        course = Course(self._pieces(plan, unit, lambda: course.on_fed()))  # noqa: PLW0108 (it is set later)
        return course if self._course else iter(course)

    def _pieces(self, plan: RunPlan, unit: Unit, on_fed: Callable[[], object]) -> Iterator[Piece]:
        self.note("begun", unit.id)
        begun = {each for what, each in self.said if what == "begun"}
        committed = {path.split("/")[3] for path in kinds(self._bucket, "commits")}
        self.uncommitted.append(len(begun - committed))
        self.leases.append(len(kinds(self._bucket, "leases")))
        if len(begun) == 1:
            # Without a next unit that is prepared meanwhile this would end in a timeout, and the order be another.
            self.wait(lambda: self.count("prepared") > 1)
        on_fed()
        if self._course and len(begun) == 1:
            self.wait(lambda: self.count("begun") > 1)
        yield from cheap_compute()(plan, unit)
        self.note("computed", unit.id)

    def note(self, what: str, unit: str) -> None:
        with self._changed:
            self.said.append((what, unit))
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(until, 60)

    def count(self, what: str) -> int:
        return sum(each == what for each, _ in self.said)

    def order(self) -> list[str]:
        return [what for what, _ in self.said]


def noted(*, course: bool, **settings: Any) -> Noted:
    bucket = memory()
    calls = calls_to(bucket)
    compute = Noted(bucket, course)

    async def story() -> None:
        await publish(calls, PLAN)
        await begin(calls, compute, **settings).work()

    run(story)
    check(everything(bucket), PLAN)
    return compute


def test_the_next_unit_is_prepared_while_one_is_on_the_device_and_needs_no_lease() -> None:
    compute = noted(course=False)
    said = compute.order()
    assert said[: said.index("computed")].count("prepared") == 2
    assert max(compute.uncommitted) <= 2
    assert max(compute.leases) <= 2


def test_the_next_unit_is_begun_when_the_device_has_the_last_batch_of_this_one() -> None:
    compute = noted(course=True)
    said = compute.order()
    assert said[: said.index("computed")].count("begun") == 2
    assert max(compute.uncommitted) <= 2
    assert max(compute.leases) <= 2


@pytest.mark.parametrize("course", [False, True])
def test_a_worker_can_be_told_to_have_one_unit_only(course: bool) -> None:
    bucket = memory()
    calls = calls_to(bucket)
    begun: list[int] = []

    def compute(plan: RunPlan, unit: Unit) -> Course | Iterator[Piece]:
        made = Course(pieces(plan, unit))
        return made if course else iter(made)

    def pieces(plan: RunPlan, unit: Unit) -> Iterator[Piece]:
        begun.append(len(kinds(bucket, "commits")))
        assert len(kinds(bucket, "leases")) == 1
        yield from cheap_compute()(plan, unit)

    async def story() -> None:
        await publish(calls, PLAN)
        await begin(calls, compute, storing_max=0).work()

    run(story)
    assert begun == list(range(len(PLAN.units)))


def test_what_is_not_the_unit_ends_the_worker_and_commits_nothing() -> None:
    bucket = memory()
    calls = calls_to(bucket)

    async def story() -> None:
        await publish(calls, PLAN)
        await begin(calls, lambda plan, unit: list(cheap_compute()(plan, unit))[1:]).work()

    with pytest.raises(NotWhole):
        run(story)
    assert kinds(bucket, "commits") == []


def test_a_store_that_takes_no_draft_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not wait for ever for a device that was never given anything, and hold its unit meanwhile."""
    calls = calls_to(memory())

    def full(**_: object) -> NoReturn:
        raise ObjectsError("a draft: no space left on device")

    async def story() -> None:
        await publish(calls, PLAN)
        monkeypatch.setattr(calls, "draft", full)
        await asyncio.wait_for(begin(calls, cheap_compute()).work(), 60)

    with pytest.raises(ObjectsError, match="no space left"):
        run(story)


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
        yield from cheap_compute()(plan, unit)

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
