"""Journeys of fleets and of single slices: one that somebody wants replaced, a dry zone beside others, adoption."""

from __future__ import annotations

import pytest

from penstock.capacity.fakecloud import ZoneModel
from penstock.domain.lifecycle import Cause, SliceState
from tests.journeys.stage import Behaviour, Stage, journey

LONG = Behaviour(duration_s=300.0, start_s=1.0)


@pytest.mark.parametrize("now", [False, True])
@journey(proves=("S9", "S14", "L4"))
async def test_a_slice_in_use_is_replaced_after_its_job_or_at_once(stage: Stage, now: bool) -> None:
    await stage.pool("fleet", per_zone=1, max=1, spot=False)
    job = await stage.submit(behave=LONG)
    await stage.until_running(job)
    (old,) = stage.slices_of(job)
    title = stage.slice(old).title
    began = stage.now
    await stage.insist(lambda each: each.replace_slice(old, "ada wants another", now=now))
    assert stage.slice(old).state is SliceState.DRAINING
    if now:
        await stage.until(lambda: len(stage.attempts(job)) == 2, 120.0, "the job on another slice")
        assert stage.causes(job)[0] is not Cause.SUCCEEDED
    await stage.succeeds(job)
    assert (stage.now - began < 330.0) is (not now)
    assert len(stage.attempts(job)) == (2 if now else 1)
    await stage.until_gone(old)
    await stage.until(lambda: len(stage.slices(SliceState.READY)) == 1, 120.0, "a whole fleet")
    (new,) = stage.slices(SliceState.READY)
    assert (new.id != old, new.title) == (True, title)


@journey(proves=("S14", "L4"))
async def test_a_dry_zone_delays_no_other(stage: Stage) -> None:
    usual = ZoneModel(ready_s=(30.0, 30.0))
    for zone in ("zone-b", "zone-c"):
        stage.cloud.set_zone(zone, usual)
    stage.cloud.set_zone("zone-a", ZoneModel(chips=0))
    await stage.pool("fleet", zones=("zone-a", "zone-b", "zone-c"), per_zone=2, max=6, spot=False)
    await stage.until(lambda: len(stage.slices(SliceState.READY)) == 4, 60.0, "the other zones whole")
    await stage.sleep(600.0)
    titles = {one.title for one in stage.slices(SliceState.READY)}
    assert titles == {f"tpu-zone-{zone}-{number}" for zone in "bc" for number in (0, 1)}
    stage.cloud.set_zone("zone-a", usual)
    assert await stage.insist(lambda each: each.recreate("fleet")) == ("zone-a",)
    await stage.until(lambda: len(stage.slices(SliceState.READY)) == 6, 60.0, "a whole fleet, without waiting")
    assert len(stage.calls_made("create", "ok")) == 6


@journey(proves=("L4",))
async def test_places_stay_with_their_fleet_through_loss_resize_and_restart(stage: Stage) -> None:
    """Two fleets in one zone. What is lost while the zone is dry comes back in its own place, also when the other fleet
    grows meanwhile and the controller is killed; and the highest places go first."""
    usual = ZoneModel(ready_s=(30.0, 30.0))
    stage.cloud.set_zone("zone-a", usual)

    def in_place(pool: str) -> dict[str, str]:
        return {one.title: one.id for one in stage.slices(SliceState.READY) if one.pool == pool}

    async def resized(name: str, count: int, ready: int) -> None:
        await stage.pool(name, zones=("zone-a",), per_zone=count, max=count, spot=False)
        await stage.until(lambda: len(stage.slices(SliceState.READY)) == ready, 300.0, f"{count} in {name}")

    await resized("zoo", 3, 3)
    await resized("ark", 2, 5)
    before = in_place("zoo")
    assert set(before) == {f"tpu-zone-a-{number}" for number in (0, 1, 2)}
    assert set(in_place("ark")) == {f"tpu-zone-a-{number}" for number in (3, 4)}
    stage.cloud.set_zone("zone-a", ZoneModel(chips=0))
    lost = before["tpu-zone-a-1"]
    await stage.insist(lambda each: each.replace_slice(lost, "ada wants another", now=True))
    await stage.until_gone(lost)
    await stage.pool("ark", zones=("zone-a",), per_zone=3, max=3, spot=False)
    await stage.sleep(60.0)
    stage.kill("a")
    stage.cloud.set_zone("zone-a", usual)
    await stage.insist(lambda each: each.recreate("ark"))
    await stage.until(lambda: len(stage.slices(SliceState.READY)) == 6, 900.0, "both whole")
    after = in_place("zoo")
    assert {title for title in before if before[title] != after[title]} == {"tpu-zone-a-1"}
    assert set(in_place("ark")) == {f"tpu-zone-a-{number}" for number in (3, 4, 5)}
    await resized("zoo", 1, 4)
    assert in_place("zoo") == {"tpu-zone-a-0": before["tpu-zone-a-0"]}


@journey()
async def test_nothing_is_made_for_a_pool_that_holds_what_was_adopted(stage: Stage) -> None:
    await stage.pool("mine", adopted=True, idle_s=10.0)
    job = await stage.submit()
    await stage.sleep(120.0)
    assert stage.calls_made("create") == []
    await stage.cancel(job)


@journey(proves=("L4",))
async def test_a_slow_zone_of_a_fleet_is_waited_for(stage: Stage) -> None:
    """A race would put one slice too many in the other zone, which is let go, and so on for ever."""
    stage.cloud.set_zone("zone-a", ZoneModel(ready_s=(1500.0, 1500.0)))
    await stage.pool("fleet", zones=("zone-a", "zone-b"), per_zone=1, max=2, spot=False)
    jobs = [await stage.submit(behave=Behaviour(duration_s=2000.0, start_s=1.0)) for _ in range(2)]
    await stage.succeeds(*jobs, within_s=4000.0)
    assert len(stage.calls_made("create", "ok")) == 2
    await stage.insist(lambda each: each.delete_pool("fleet"))
