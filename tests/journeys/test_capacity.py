"""Journeys of slices: pools that grow, shrink and end, fleets that are repaired, races, leaks and stolen names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.capacity.fakecloud import FakeCloud, FaultKind, ZoneModel
from penstock.domain import limits
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Slice, Team
from tests.journeys.house import LABEL
from tests.journeys.stage import TEAM, Behaviour, Stage, journey

LONG = Behaviour(duration_s=300.0, start_s=1.0)
STRANGER = "somebody-else"


def machine(name: str, zone: str = "zone-a") -> Slice:
    """What somebody makes by hand."""
    return Slice(
        id=name, team="", pool="", provider="fake", zone=zone, accelerator="v5e-8", chips=8, hosts=1, intended_at=0.0
    )


@pytest.mark.parametrize("least", [0, 1])
@journey(proves=("L4", "S14", "L8"))
async def test_a_pool_without_work_shrinks_to_its_minimum_and_not_below(stage: Stage, least: int) -> None:
    await stage.pool(max=3, min=least, idle_s=120.0)
    jobs = [await stage.submit() for _ in range(3)]
    await stage.succeeds(*jobs)
    idle_from = stage.now
    assert len(stage.slices(SliceState.READY)) == 3
    await stage.sleep(110.0)
    assert len(stage.slices(SliceState.READY)) == 3, "kept warm for as long as the pool says"
    await stage.until(lambda: len(stage.slices(SliceState.READY)) == least, 20.0, "slices let go")
    assert stage.now - idle_from <= 120.0 + 3 * limits.TICK_S
    await stage.sleep(600.0)
    assert len(stage.ours()) == least
    assert len(stage.calls_made("create", "ok")) == 3, "none was let go and made again"


@journey(proves=("S14",))
async def test_a_smaller_pool_drains_what_is_busy_and_kills_nobody(stage: Stage) -> None:
    await stage.pool(max=3, idle_s=60.0)
    jobs = [await stage.submit(behave=LONG) for _ in range(3)]
    await stage.until_running(*jobs)
    await stage.pool(max=1, idle_s=60.0)
    await stage.until(lambda: len(stage.slices(SliceState.DRAINING)) == 2, 15.0, "two slices draining")
    waits = await stage.submit()
    await stage.succeeds(*jobs)
    assert [len(stage.attempts(job)) for job in jobs] == [1, 1, 1]
    await stage.succeeds(waits)
    assert len(stage.calls_made("create", "ok")) == 3
    await stage.pool(max=3, idle_s=60.0)
    again = [await stage.submit() for _ in range(3)]
    await stage.succeeds(*again)


@journey(proves=("S14", "L4"))
async def test_a_deleted_pool_lets_its_jobs_finish_and_leaves_nothing_behind(stage: Stage) -> None:
    await stage.pool(max=3, min=2, idle_s=3600.0)
    await stage.pool("other", zones=("zone-b",), max=1)
    await stage.until(lambda: len(stage.slices(SliceState.READY)) == 2, 60.0)
    job = await stage.submit(behave=LONG)
    await stage.until_running(job)
    await stage.insist(lambda each: each.delete_pool("pool"))
    await stage.until(
        lambda: len([one for one in stage.slices() if one.pool == "pool"]) == 1, 300.0, "the idle one gone"
    )
    await stage.succeeds(job)
    assert len(stage.attempts(job)) == 1
    later = await stage.submit()
    await stage.succeeds(later)
    assert [vm.zone for vm in stage.ours()] == ["zone-b"]


BREAKS: dict[str, Callable[[FakeCloud, str], None]] = {
    "preempted": lambda cloud, name: cloud.preempt(name),
    "failed": lambda cloud, name: cloud.fail(name),
    "deleted by hand": lambda cloud, name: cloud.delete_outside(name),
    "dead and shown as ready": lambda cloud, name: cloud.die_unseen(name),
    "a host replaced": lambda cloud, name: cloud.replace_host(name, 0),
}


@pytest.mark.parametrize("how", BREAKS)
@journey(proves=("S9", "S14", "L4"))
async def test_a_fleet_is_repaired_exactly_where_it_is_broken(stage: Stage, how: str) -> None:
    await stage.pool("fleet", zones=("zone-a", "zone-b", "zone-c"), per_zone=2, max=6, spot=False, idle_s=60.0)
    await stage.until(lambda: len(stage.slices(SliceState.READY)) == 6, 60.0, "a whole fleet")
    before = {one.id: one.provider_id for one in stage.slices()}
    broken = next(one for one in stage.slices() if one.zone == "zone-b")
    BREAKS[how](stage.cloud, broken.id)
    await stage.until(
        lambda: broken.id not in {one.id for one in stage.slices(SliceState.READY)}, 300.0, "the damage seen"
    )
    await stage.until(lambda: len(stage.slices(SliceState.READY)) == 6, 300.0, "a whole fleet again")
    after = {one.id: one.provider_id for one in stage.slices(SliceState.READY)}
    assert before.items() - after.items() == {(broken.id, broken.provider_id)}
    (new,) = after.keys() - before.keys()
    assert stage.slice(new).zone == "zone-b"
    assert stage.slice(new).title == broken.title == f"tpu-zone-b-{broken.number}"
    await stage.until_gone(broken.id)
    assert len(stage.calls_made("create", "ok")) == 7
    assert len(stage.ours()) == 6


@journey(proves=("S12", "L4"))
async def test_racing_zones_count_once_and_the_losers_go(stage: Stage) -> None:
    for zone, ready_s in (("zone-a", 90.0), ("zone-b", 30.0), ("zone-c", 60.0)):
        stage.cloud.set_zone(zone, ZoneModel(ready_s=(ready_s, ready_s), delete_s=(10.0, 10.0)))
    await stage.insist(lambda each: each.put_team(Team(name=TEAM, chip_limit=8)))
    await stage.pool(zones=("zone-a", "zone-b", "zone-c"), race=3)
    job = await stage.submit(behave=LONG)
    await stage.until(lambda: len(stage.ours()) == 3, 20.0, "a race")
    await stage.until_running(job)
    winner = stage.slices_of(job)[0]
    assert stage.slice(winner).zone == "zone-b"
    losers = [one.id for one in stage.slices() if one.id != winner]
    await stage.until_gone(*losers, within_s=300.0)
    await stage.succeeds(job)
    assert [vm.name for vm in stage.ours()] == [winner]


@journey(proves=("S12", "L4"))
async def test_a_create_that_hangs_is_raced_in_another_zone_and_goes(stage: Stage) -> None:
    """The pool asks one zone at a time. What never gets ready there costs minutes, not the half hour until given up."""
    await stage.insist(lambda each: each.put_team(Team(name=TEAM, chip_limit=8)))
    await stage.pool(zones=("zone-a", "zone-b"), max=1)
    stage.calls.add("create", FaultKind.NEVER_READY, times=1)
    begun = stage.now
    job = await stage.submit(behave=LONG)
    await stage.until(lambda: len(stage.ours()) == 1, 20.0, "the one that hangs")
    stuck = stage.ours()[0]
    await stage.until_running(job, within_s=limits.SLOW_UNKNOWN_S + 120.0)
    assert stage.now - begun >= limits.SLOW_UNKNOWN_S
    (winner,) = stage.slices_of(job)
    assert (stuck.zone, stage.slice(winner).zone) == ("zone-a", "zone-b")
    await stage.until_gone(stuck.name, within_s=300.0)
    await stage.succeeds(job)
    assert [vm.name for vm in stage.ours()] == [winner]
    assert len(stage.events("slice.raced")) == 1


@journey(proves=("L4", "S9", "S14"))
async def test_a_create_that_lands_after_its_slice_is_buried_is_swept(stage: Stage) -> None:
    await stage.pool()
    stage.calls.add("create", FaultKind.LATE_CREATE, seconds=500.0, times=1)
    stage.calls.add("create", FaultKind.TRANSIENT, times=1000)
    job = await stage.submit()
    await stage.until(lambda: len(stage.slices()) == 1, 15.0)
    late = stage.slices()[0].id
    await stage.sleep(10.0)
    await stage.insist(lambda each: each.delete_pool("pool"))
    await stage.cancel(job)
    await stage.until_gone(late, within_s=300.0)
    assert stage.cloud.vm(late) is None
    await stage.until(lambda: stage.cloud.vm(late) is not None, 600.0, "the late machine")
    landed_at = stage.now
    await stage.until(lambda: stage.cloud.vm(late) is None, limits.ORPHAN_S, "the leak swept")
    assert stage.now - landed_at < limits.ORPHAN_S
    assert len(stage.events("slice.swept")) == 1


@journey(proves=("L4", "L2", "S14"))
async def test_slices_in_zones_that_the_pool_no_longer_names_are_still_watched(stage: Stage) -> None:
    for zone in ("zone-a", "zone-b"):
        stage.cloud.set_zone(zone, ZoneModel(chips=8, ready_s=(30.0, 30.0), delete_s=(10.0, 10.0)))
    await stage.pool(zones=("zone-a", "zone-b"), max=3, idle_s=60.0)
    jobs = [await stage.submit(behave=LONG) for _ in range(2)]
    await stage.until_running(*jobs)
    assert {vm.zone for vm in stage.ours()} == {"zone-a", "zone-b"}
    await stage.pool(zones=("zone-c",), max=3, idle_s=60.0)
    for job in jobs:
        stage.cloud.preempt(stage.slices_of(job)[0])
    await stage.succeeds(*jobs)
    assert [len(stage.attempts(job)) for job in jobs] == [2, 2]
    await stage.until(lambda: {vm.zone for vm in stage.ours()} <= {"zone-c"}, 300.0, "the old zones empty")


@journey(proves=("L4",))
async def test_a_machine_with_our_label_that_nobody_intended_is_swept(stage: Stage) -> None:
    await stage.pool(min=1)
    await stage.until(lambda: len(stage.slices(SliceState.READY)) == 1, 60.0)
    stage.cloud.create_outside(machine("left-over"), LABEL)
    await stage.until(lambda: stage.cloud.vm("left-over") is None, limits.ORPHAN_S, "the orphan swept")
    await stage.until_gone("left-over")
    assert len(stage.slices(SliceState.READY)) == 1, "what is owned stays"


@journey(proves=("S9", "S14"))
async def test_a_name_that_belongs_to_somebody_else_is_never_deleted(stage: Stage) -> None:
    await stage.pool(max=2)
    stolen: list[str] = []

    def steal(name: str) -> None:
        stolen.append(name)
        stage.cloud.create_outside(machine(name), STRANGER)

    stage.calls.add("create", None, once_struck=steal)
    job = await stage.submit()
    await stage.succeeds(job)
    (name,) = stolen
    await stage.until_gone(name, within_s=300.0)
    vm = stage.cloud.vm(name)
    assert vm is not None
    assert (vm.label, vm.state) == (STRANGER, "READY")
    assert [call.subject for call in stage.calls_made("delete") if call.subject == name] == []
    assert stage.attempts(job)[0].slices[0].slice != name


@pytest.mark.parametrize(
    "kind", [FaultKind.EMPTY_PAGE, FaultKind.UNREACHABLE, FaultKind.PARTIAL_PAGE, FaultKind.STALE_LIST]
)
@journey(proves=("S9", "L4"))
async def test_lying_listings_take_nothing_from_anybody(stage: Stage, kind: FaultKind) -> None:
    await stage.pool(max=2, min=2, idle_s=3600.0)
    await stage.until(lambda: len(stage.slices(SliceState.READY)) == 2, 60.0)
    job = await stage.submit(behave=Behaviour(duration_s=400.0, start_s=1.0))
    await stage.until_running(job)
    before = {one.id for one in stage.slices()}
    stage.calls.add("list", kind, seconds=200.0, times=12)
    await stage.succeeds(job)
    assert len(stage.attempts(job)) == 1
    assert {one.id for one in stage.slices()} == before
    assert stage.calls_made("delete") == []
