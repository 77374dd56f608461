"""A worker stops when asked and gives back what it had begun; it prepares ahead, and has two units at most."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NoReturn

import pytest

from penstock.domain import ledger
from penstock.domain.ledger import Unit
from penstock.extract.calls import Calls, Stopped
from penstock.extract.claims import Claim, Claims
from penstock.extract.layout import Course, NotWhole, Piece
from penstock.extract.plan import RunPlan, publish
from penstock.extract.worker import Settings, Standing, Worker
from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import Damaged, ObjectsError
from tests.process.extraction import cheap_compute, cheap_plan, check
from tests.unit.extract.cheap import calls_to, finish, memory, run

PLAN = cheap_plan(rows=40, unit_rows=4)


def begin(calls: Calls, compute: Any, storing_max: int = 1, look_s: float = 0.01, **more: Any) -> Worker:
    settings = Settings(worker="one", lease_s=30, look_s=look_s, storing_max=storing_max, code="test")
    return Worker(calls, PLAN, compute, settings, rng=random.Random(1), steady=time.monotonic, **more)


def kinds(bucket: MemoryObjects, what: str) -> list[str]:
    return [path for path in bucket.paths() if path.split("/")[2] == what]


def held(bucket: MemoryObjects) -> int:
    """Leases that hold something: those of a committed unit go a little later, and nobody looks at them."""
    committed = {path.split("/")[3] for path in kinds(bucket, "commits")}
    return sum(path.split("/")[3] not in committed for path in kinds(bucket, "leases"))


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
        course = Course(self._pieces(plan, unit, lambda: course))
        return course if self._course else iter(course)

    def _pieces(self, plan: RunPlan, unit: Unit, course: Callable[[], Course]) -> Generator[Piece, None, None]:
        self.note("begun", unit.id)
        begun = {each for what, each in self.said if what == "begun"}
        committed = {path.split("/")[3] for path in kinds(self._bucket, "commits")}
        self.uncommitted.append(len(begun - committed))
        self.leases.append(held(self._bucket))
        if self._course and len(begun) == 1:
            time.sleep(0.2)  # for a worker that would not wait
            self.note("read", unit.id)
        course().was_read()
        if len(begun) == 1:
            # Without a next unit that is prepared meanwhile this would end in a timeout, and the order be another.
            self.wait(lambda: self.count("prepared") > 1)
        course().on_fed()
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
    assert said[: said.index("read")].count("prepared") == 1, "what tokenises is for the unit that is on the device"
    assert said[: said.index("computed")].count("begun") == 2
    assert max(compute.uncommitted) <= 2
    assert max(compute.leases) <= 2


def test_a_unit_that_fails_leaves_the_device_at_once() -> None:
    """Its error holds all that it knows, places on the device too, and is told when the next unit is begun."""
    bucket = memory()
    calls = calls_to(bucket)
    left: list[str] = []

    def compute(plan: RunPlan, unit: Unit) -> Course:
        return Course(pieces(plan, unit))

    def pieces(plan: RunPlan, unit: Unit) -> Generator[Piece, None, None]:
        try:
            for piece in cheap_compute()(plan, unit):
                yield piece._replace(row=10_000)
        finally:
            left.append(unit.id)

    async def story() -> None:
        await publish(calls, PLAN)
        with pytest.raises(NotWhole) as told:
            await begin(calls, compute).work()
        assert left, "while the error is held"
        assert told.value is not None

    run(story)


@pytest.mark.parametrize("course", [False, True])
def test_a_worker_can_be_told_to_have_one_unit_only(course: bool) -> None:
    bucket = memory()
    calls = calls_to(bucket)
    begun: list[int] = []

    def compute(plan: RunPlan, unit: Unit) -> Course | Iterator[Piece]:
        made = Course(pieces(plan, unit))
        return made if course else iter(made)

    def pieces(plan: RunPlan, unit: Unit) -> Generator[Piece, None, None]:
        begun.append(len(kinds(bucket, "commits")))
        assert held(bucket) == 1
        yield from cheap_compute()(plan, unit)

    async def story() -> None:
        await publish(calls, PLAN)
        # When its last unit is committed it must not sit and wait for something to change.
        await asyncio.wait_for(begin(calls, compute, storing_max=0, look_s=3600).work(), 300)

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


@pytest.mark.parametrize("where", ["computing", "preparing", "writing", "storing"])
def test_a_worker_that_ends_by_an_error_gives_its_leases_back(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever starts it again waits for leases of a process that ended in order."""
    bucket = memory()
    calls = calls_to(bucket)
    seen: list[int] = []

    def fail(*_: object, **__: object) -> NoReturn:
        seen.append(len(kinds(bucket, "leases")))
        raise ValueError(where)

    def compute(plan: RunPlan, unit: Unit) -> Iterator[Piece]:
        if where == "preparing" and kinds(bucket, "leases"):
            fail()
        return pieces(plan, unit)

    def pieces(plan: RunPlan, unit: Unit) -> Iterator[Piece]:
        for number, piece in enumerate(cheap_compute()(plan, unit)):
            if where == "computing" and number:
                fail()
            yield piece

    async def story() -> None:
        await publish(calls, PLAN)
        if where == "writing":
            monkeypatch.setattr("penstock.extract.worker.UnitWriter.finish", fail)
        if where == "storing":
            monkeypatch.setattr("penstock.extract.worker.publish", fail)
        await begin(calls, compute).work()

    with pytest.raises(ValueError, match=where):
        run(story)
    assert max(seen) >= 1, "it had a lease"
    assert kinds(bucket, "leases") == []
    monkeypatch.undo()
    run(lambda: finish(calls, PLAN, "two"))
    check(everything(bucket), PLAN)


def test_what_may_still_be_committed_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = memory()
    calls = calls_to(bucket)
    committing: list[str] = []

    async def story() -> None:
        await publish(calls, PLAN)
        reached, both = asyncio.Event(), asyncio.Event()

        async def hang(
            _calls: Calls, _plan: RunPlan, claim: Claim, *_: object, on_commit: Callable[[], object], **__: object
        ) -> bool:
            """The second is at its commit, the first not yet."""
            if reached.is_set():
                on_commit()
                committing.append(claim.unit.id)
                both.set()
            reached.set()
            await asyncio.sleep(600)
            raise AssertionError("it was not cancelled")

        monkeypatch.setattr("penstock.extract.worker.publish", hang)
        work = asyncio.create_task(begin(calls, cheap_compute()).work())
        await asyncio.wait_for(both.wait(), 60)
        assert len(kinds(bucket, "leases")) == 2
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    run(story)
    assert [path.split("/")[3] for path in kinds(bucket, "leases")] == committing


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


class Keeping:
    """A store that lets nothing be removed: at all, or once the run is sealed."""

    def __init__(self, bucket: MemoryObjects, *, sealed: bool) -> None:
        self._bucket, self._sealed = bucket, sealed

    async def before(self, verb: str, path: str) -> None:
        if verb == "delete" and (not self._sealed or kinds(self._bucket, "manifest")):
            raise Damaged(f"{path}: 403, may not be removed")

    async def after(self, verb: str, path: str) -> None:
        pass


def test_a_store_that_lets_nothing_be_removed_is_told_of_before_the_run_is_done() -> None:
    bucket = memory()
    run(lambda: publish(calls_to(bucket), PLAN))
    with pytest.raises(Damaged, match="may not be removed"):
        run(lambda: finish(calls_to(bucket.by("one", Keeping(bucket, sealed=False))), PLAN))
    assert 0 < len(kinds(bucket, "commits")) < len(PLAN.units)


def test_a_sealed_run_does_not_fail_for_what_cannot_be_removed(caplog: pytest.LogCaptureFixture) -> None:
    bucket = memory()
    with caplog.at_level(logging.WARNING, "penstock.extract.worker"):
        run(lambda: finish(calls_to(bucket.by("one", Keeping(bucket, sealed=True))), PLAN))
    assert "the run is sealed, and what nobody needs any more is left" in caplog.text
    assert len(kinds(bucket, "manifest")) == 1


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


def test_whether_a_unit_is_in_hand_is_told_with_it() -> None:
    """Nobody stops a worker for want of work that has a unit; one that finds none says that it has none."""
    bucket = memory()
    calls = calls_to(bucket)
    told: list[Standing] = []
    others = threading.Event()

    def report(standing: Standing) -> None:
        told.append(standing)
        if standing.open == 1 and not standing.holding:
            others.set()

    async def story() -> None:
        await publish(calls, PLAN)
        claims = Claims(calls, PLAN, "other", fence=0, lease_s=30, rng=random.Random(2), steady=time.monotonic)
        claim = await claims.claim(PLAN.units[-1:])
        assert claim is not None
        work = asyncio.create_task(begin(calls, cheap_compute(), report=report).work())
        await asyncio.to_thread(others.wait, 60)
        await claims.release(claim, done=False)
        await work

    run(story)
    assert [each.holding for each in told[:2]] == [False, True]
    alone = [each.holding for each in told if each.open == 1]
    assert False in alone, "it had none while another had the last one"
    assert (told[-1].open, told[-1].holding) == (0, False)
    assert all(each.holding for each in told if 1 < each.open < len(PLAN.units))


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


def test_an_outage_is_waited_out_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.extract.calls.PAUSE_S", (0.001, 0.01))
    bucket = memory()
    make: Callable[[], Calls] = lambda: calls_to(bucket.by("one", Outage(25)))  # noqa: E731
    with caplog.at_level(logging.WARNING, "penstock.extract.calls"):
        run(lambda: finish(make(), PLAN))
    check(everything(bucket), PLAN)
    first, *more = [record.getMessage() for record in caplog.records]
    assert first.startswith("trying again, for 30 s at most: ")
    assert first.endswith("out of reach")
    assert [line.rpartition(",")[0] for line in more] == ["the bucket answers again"]


def test_whoever_waits_for_a_bucket_stops_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it holds: it cannot give it back, and does not try for long."""
    monkeypatch.setattr("penstock.extract.calls.PAUSE_S", (0.001, 0.01))
    monkeypatch.setattr("penstock.extract.calls.LAST_PATIENCE_S", 0.05)
    bucket = memory()
    run(lambda: publish(calls_to(bucket), PLAN))
    outage = Outage(0)
    asked = threading.Event()

    def compute(plan: RunPlan, unit: Unit) -> Iterator[Piece]:
        if len(kinds(bucket, "commits")) >= 2:
            outage.left = 10**9
            asked.set()
        yield from cheap_compute()(plan, unit)

    async def story() -> None:
        calls = Calls(bucket.by("one", outage), random.Random(1), patience_s=600, should_stop=asked.is_set)
        with pytest.raises(Stopped):
            await asyncio.wait_for(begin(calls, compute, should_stop=asked.is_set).work(), 120)

    run(story)
    assert len(kinds(bucket, "commits")) < len(PLAN.units)
    assert kinds(bucket, "leases")


def test_a_bucket_that_only_stumbles_does_not_cost_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.extract.calls.PAUSE_S", (0.001, 0.01))
    outage = Outage(3)
    calls = Calls(memory().by("one", outage), random.Random(1), patience_s=600, should_stop=lambda: True)
    run(lambda: calls.put("a", b"x"))
    assert outage.left == 0
