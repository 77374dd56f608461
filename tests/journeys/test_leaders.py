"""Journeys with two controllers, or with a store that is away for a while: one leads, and nothing is done twice."""

from __future__ import annotations

import pytest

from penstock.domain import limits
from penstock.domain.lifecycle import JobState
from penstock.ports.store import StaleLeader
from tests.journeys.stage import Behaviour, Stage, journey


def _elected_at(stage: Stage) -> list[float]:
    return [event.at - stage.clock.epoch for event in stage.events("leader.elected")]


@pytest.mark.parametrize("when", ["intended", "creating", "running"])
@journey(controllers=("a", "b"), proves=("S16", "S9", "S10"))
async def test_a_killed_leader_is_replaced_in_ten_seconds_and_nothing_is_launched_twice(
    stage: Stage, when: str
) -> None:
    await stage.pool()
    if when == "intended":
        stage.fates.crash_at("capacity.create", "before")
    job = await stage.submit(behave=Behaviour(duration_s=200.0, start_s=1.0))
    stage.back_after_s.update(a=None, b=None)
    if when == "intended":
        await stage.until(lambda: len(stage.controllers) == 1, 30.0, "the leader's death")
    else:
        await stage.until(lambda: bool(stage.ours()) if when == "creating" else stage.running(job), 120.0)
        stage.kill(stage.leader_name(), back_after_s=None)
    killed_at = stage.now
    await stage.until(lambda: len(_elected_at(stage)) == 2, 10.0, "a new leader")
    assert _elected_at(stage)[-1] - killed_at <= 10.0
    await stage.succeeds(job)
    assert len(stage.attempts(job)) == 1
    assert len(stage.records("proc.started")) == 1
    assert len(stage.calls_made("create", "ok")) == 1


@pytest.mark.parametrize(("point", "side"), [("store.read", "after"), ("commit.carry_out", "after")])
@journey(controllers=("a", "b"), proves=("S16", "S9", "S10"))
async def test_a_frozen_leader_that_comes_back_can_do_nothing(stage: Stage, point: str, side: str) -> None:
    """It stands still with a plan in hand, or between an intent and its create; meanwhile the other has done it all."""
    await stage.pool(max=4)
    old = stage.leader_name()
    stage.fates.when(old, point, side, lambda: stage.freeze(old, 60.0))
    jobs = [await stage.submit(behave=Behaviour(duration_s=120.0, start_s=1.0)) for _ in range(3)]
    await stage.until(lambda: len(_elected_at(stage)) == 2, 12.0, "a new leader")
    new = stage.leader_name()
    assert new != old
    frozen = stage.controllers[old]
    assert frozen.leading, "it still believes"
    await stage.until_running(*jobs, within_s=120.0)
    await stage.until(lambda: not frozen.leading, 60.0, "the old leader's insight")
    taken_over = stage.events("leader.elected")[-1]
    late = [event for event in stage.events() if event.seq > taken_over.seq and event.epoch == taken_over.epoch - 1]
    assert late == [], "nothing of the old epoch was committed after the new one began"
    await stage.succeeds(*jobs)
    assert [len(stage.attempts(job)) for job in jobs] == [1, 1, 1]
    assert len(stage.calls_made("create", "ok")) == 3, "no slice was made twice"


@journey()
async def test_an_effect_of_an_old_epoch_is_refused_by_the_store(stage: Stage) -> None:
    from penstock.controller.execute import carry_out

    stage.kill("a", back_after_s=0.5)
    await stage.until(lambda: len(_elected_at(stage)) == 2, 15.0, "a new leader")
    with pytest.raises(StaleLeader):
        await stage.store.bound(actor="ghost", epoch=1).transact(carry_out, [])


@journey(proves=("L9", "S1", "S2"))
async def test_a_minute_without_the_store_costs_nobody_anything(stage: Stage) -> None:
    await stage.pool(max=3)
    ends_meanwhile = await stage.submit(behave=Behaviour(duration_s=50.0, start_s=1.0))
    goes_on = await stage.submit(behave=Behaviour(duration_s=300.0, start_s=1.0))
    await stage.until_running(ends_meanwhile, goes_on)
    stage.store_outage(60.0)
    down_at = stage.now
    comes = await stage.submit()  # repeats until the store is back
    assert stage.now - down_at >= 60.0
    assert any(record.body.get("error") == "unavailable" for record in stage.history.clients)
    found = await stage.read(comes)
    assert found is not None
    await stage.succeeds(ends_meanwhile, goes_on, comes)
    assert [len(stage.attempts(job)) for job in (ends_meanwhile, goes_on, comes)] == [1, 1, 1]
    assert stage.events("attempt.fencing") == []


@journey(proves=("L4", "S14"))
async def test_maintenance_stops_creating_and_placing_and_keeps_cleaning(stage: Stage) -> None:
    await stage.pool(max=3, min=2, idle_s=3600.0)
    await stage.until(lambda: sum(one.usable for one in stage.slices()) == 2, 60.0, "two idle slices")
    running = await stage.submit(behave=Behaviour(duration_s=200.0, start_s=1.0))
    await stage.until_running(running)
    await stage.insist(lambda each: each.set_maintenance(True))
    idle = next(one.id for one in stage.slices() if one.usable)
    stage.cloud.preempt(idle)
    waits = await stage.submit()
    creates = len(stage.calls_made("create"))
    await stage.until_gone(idle, within_s=300.0)
    assert stage.cloud.vm(idle) is None, "what broke was cleaned up"
    assert len(stage.calls_made("create")) == creates, "and nothing was made in its place"
    await stage.succeeds(running)
    found = await stage.leader().why(waits)
    assert found is not None
    assert found[0].code == "maintenance"
    assert stage.job(waits).state is JobState.QUEUED
    await stage.insist(lambda each: each.set_maintenance(False))
    await stage.until(lambda: bool(stage.attempts(waits)), 2 * limits.TICK_S, "its start on the slice that is free")
    await stage.succeeds(waits)
