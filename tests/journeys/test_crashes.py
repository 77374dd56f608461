"""Journeys in which the controller dies at one named point of its work, before or after it, and all still ends well.

The life told here passes every port call and every commit but `purge` (which waits for the retention of a month); a
test says so, so that a new point cannot be forgotten.
"""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.capacity.fakecloud import FaultKind
from penstock.domain.lifecycle import JobState
from penstock.domain.nouns import Slice
from penstock.sim.loop import run
from penstock.sim.points import all_points
from tests.journeys.house import LABEL
from tests.journeys.stage import Behaviour, Stage, play

NOT_PASSED = {"commit.purge"}
POINTS = [point for point in all_points() if point not in NOT_PASSED]
STRANGER = "somebody-else"


def machine(name: str, zone: str = "zone-a") -> Slice:
    """What somebody makes by hand."""
    return Slice(
        id=name, team="", pool="", provider="fake", zone=zone, accelerator="v5e-8", chips=8, hosts=1, intended_at=0.0
    )


async def eventful(stage: Stage) -> None:
    """A stockout, a stolen name, a dead host, a cancel, an orphan, maintenance and the end of the pool."""
    await stage.set_up()
    await stage.pool(max=3, idle_s=60.0, zones=("zone-a", "zone-b"))
    await stage.insist(lambda each: each.limit_provider("fake", 64))
    stage.calls.add("create", FaultKind.STOCKOUT)
    stolen: list[str] = []
    stage.calls.add("create", None, times=20, once_struck=lambda name: _steal(stage, name, stolen))
    outputs = ("model.bin",)
    job = await stage.submit(outputs=outputs, behave=Behaviour(duration_s=120.0, start_s=1.0, outputs=outputs))
    other = await stage.submit(behave=Behaviour(duration_s=1e6, start_s=1.0))
    await stage.insist(lambda each: each.set_priority(job, 5))
    await stage.until_running(job, other, within_s=400.0)
    stage.cloud.die_unseen(stage.slices_of(job)[0])
    stage.cloud.create_outside(machine("orphan"), LABEL)
    await stage.cancel(other)
    await stage.insist(lambda each: each.set_maintenance(True))
    await stage.sleep(10.0)
    await stage.insist(lambda each: each.set_maintenance(False))
    await stage.succeeds(job, within_s=900.0)
    assert stage.job(job).outputs == outputs
    assert len(stage.events("job.output_committed")) == 1
    await stage.until_over(other)
    assert stage.job(other).state is JobState.CANCELLED
    await stage.until(lambda: stage.cloud.vm("orphan") is None, 600.0, "the orphan swept")
    await stage.insist(lambda each: each.delete_pool("pool"))
    await stage.until(lambda: not stage.slices(), 900.0, "an empty pool")
    assert [vm.label for vm in stage.cloud.vms()] == [STRANGER], "only what is not ours is left"


def _steal(stage: Stage, name: str, stolen: list[str]) -> None:
    """Somebody else takes the name right before our create, once."""
    if stolen or stage.cloud.vm(name) is not None:
        return
    stolen.append(name)
    stage.cloud.create_outside(machine(name, stage.slice(name).zone), STRANGER)


def test_the_eventful_life_passes_every_point() -> None:
    stage = run(play(eventful))
    passed = {point for point, _ in stage.fates.passed}
    assert set(all_points()) - passed == NOT_PASSED


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_point_of_an_eventful_life_still_ends_well(point: str, side: str) -> None:
    async def story(stage: Stage) -> None:
        if point == "commit.elect":
            stage.kill("a")  # so that there is an election to die in
        stage.fates.crash_at(point, side)
        await eventful(stage)

    stage = run(play(story))
    assert stage.fates.struck == 1
    assert len(stage.records("controller.crashed")) >= 2


async def plain(stage: Stage) -> None:
    """One job with an output, from an empty pool to an empty pool."""
    await stage.pool(idle_s=60.0)
    outputs = ("model.bin",)
    job = await stage.submit(outputs=outputs, behave=Behaviour(duration_s=60.0, start_s=1.0, outputs=outputs))
    await stage.succeeds(job)
    assert len(stage.attempts(job)) == 1, "a crash of ours costs the job no attempt"
    assert stage.job(job).outputs == outputs
    await stage.until(lambda: not stage.slices(), 600.0, "an empty pool")


#: How often a plain life passes each of the points where something is decided or done.
PLAIN_PASSES = {
    "commit.carry_out": 4,
    "commit.hear": 6,
    "commit.observe": 3,
    "capacity.create": 1,
    "capacity.delete": 1,
}


def test_a_plain_life_passes_each_deciding_point_so_often() -> None:
    stage = run(play(plain))
    passed = Counter({point: count for (point, side), count in stage.fates.passed.items() if side == "after"})
    assert {point: passed[point] for point in PLAIN_PASSES} == PLAIN_PASSES


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize(
    ("point", "nth"), [(point, n + 1) for point, times in PLAIN_PASSES.items() for n in range(times)]
)
def test_a_crash_at_each_step_of_a_plain_life_costs_the_job_nothing(point: str, nth: int, side: str) -> None:
    async def story(stage: Stage) -> None:
        stage.fates.crash_at(point, side, nth)
        await plain(stage)

    stage = run(play(story))
    assert stage.fates.struck == 1
