"""Incidents of other systems that begin at a provider: slices lost, left over, refused, rationed or let go too soon.

Each `test_incident_NN_…` is one row of docs/explanation/incidents.md; what happened elsewhere is told there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from penstock.capacity.fakecloud import FakeCloud, FaultKind
from penstock.domain import limits
from penstock.domain.invariants.liveness import LOST_CLOSES_S, SILENT_CLOSES_S
from penstock.domain.lifecycle import Cause, JobState, SliceState
from penstock.domain.nouns import Rule
from tests.journeys.stage import Behaviour, Stage, Try, journey

LONG = Behaviour(duration_s=300.0, start_s=1.0)

LOSSES: dict[str, tuple[Callable[[FakeCloud, str], None], Cause]] = {
    "shown as ready": (lambda cloud, name: cloud.die_unseen(name), Cause.LOST),
    "in a state nobody expects": (lambda cloud, name: cloud.maintain(name, 1e6), Cause.LOST),
    "not found": (lambda cloud, name: cloud.delete_outside(name), Cause.PREEMPTED),
}


@pytest.mark.parametrize("how", LOSSES)
@journey(proves=("L2", "S5", "S14"))
async def test_incident_01_a_lost_slice_is_noticed_whatever_the_provider_shows(stage: Stage, how: str) -> None:
    await stage.pool()
    job = await stage.submit(behave=LONG)
    await stage.until_running(job)
    lost = stage.slices_of(job)[0]
    lose, cause = LOSSES[how]
    lose(stage.cloud, lost)
    await stage.until(lambda: stage.causes(job) == [cause], SILENT_CLOSES_S, "the loss noticed")
    await stage.succeeds(job)
    assert len(stage.attempts(job)) == 2
    await stage.until_gone(lost)
    assert stage.cloud.vm(lost) is None, "what nobody showed as lost is deleted all the same"


@journey(proves=("S9",))
async def test_incident_01_a_slice_missing_from_listings_but_alive_is_left_alone(stage: Stage) -> None:
    """The other half: "not found in zone" is no proof while its agents talk and the provider knows its name."""
    await stage.pool()
    job = await stage.submit(behave=LONG)
    await stage.until_running(job)
    slice = stage.slices_of(job)[0]
    stage.calls.add("list", FaultKind.EMPTY_PAGE, times=20)
    await stage.succeeds(job)
    assert len(stage.attempts(job)) == 1
    assert stage.slice(slice).state is SliceState.READY


@journey(proves=("S12", "S14", "L2"))
async def test_incident_02_a_preempted_slice_is_deleted_before_its_quota_is_used_again(stage: Stage) -> None:
    stage.cloud.set_quota(8)
    await stage.insist(lambda each: each.limit_provider("fake", 8))
    await stage.pool(max=2)
    job = await stage.submit(behave=LONG)
    await stage.until_running(job)
    lost = stage.slices_of(job)[0]
    stage.cloud.preempt(lost)
    await stage.until(lambda: len(stage.attempts(job)) == 2, 300.0, "the next attempt")
    assert stage.slices_of(job) != [lost], "a name is never used twice, so there cannot be two of it"
    assert stage.cloud.vm(lost) is None
    await stage.succeeds(job)
    assert [call.body["outcome"] for call in stage.calls_made("create")] == ["ok", "ok"], "it never asked in vain"


async def _until_unready(stage: Stage, job: str) -> str:
    await stage.until(lambda: bool(stage.ours()), 20.0)
    return stage.ours()[0].name


async def _until_unjoined(stage: Stage, job: str) -> str:
    name = await _until_unready(stage, job)
    stage.world.network.cut(name, 0, seconds=200.0)
    await stage.until(lambda: stage.slice(name).provider_state == "READY", 60.0, "ready, and its agent not heard")
    return name


async def _until_starting(stage: Stage, job: str) -> str:
    await stage.until(lambda: stage.job(job).state is JobState.PROVISIONING, 60.0)
    await stage.until(lambda: bool(stage.live_attempt(job).launched), 20.0)
    assert stage.job(job).state is JobState.PROVISIONING
    return stage.slices_of(job)[0]


async def _until_leaving(stage: Stage, job: str) -> str:
    await stage.succeeds(job)
    name = stage.ours()[0].name
    await stage.until(lambda: stage.slice(name).state is SliceState.DELETING, 200.0)
    await stage.until(lambda: stage.ours()[0].state == "DELETING", 20.0)
    return name


PHASES = {
    "provisioning": _until_unready,
    "waiting for its agents": _until_unjoined,
    "set-up": _until_starting,
    "teardown": _until_leaving,
}


@pytest.mark.parametrize("phase", PHASES)
@journey(proves=("S9", "S14", "L4"))
async def test_incident_03_a_preemption_in_any_phase_is_survived(stage: Stage, phase: str) -> None:
    await stage.pool(idle_s=60.0)
    job = await stage.submit(behave=Behaviour(duration_s=100.0, start_s=25.0 if phase == "set-up" else 1.0))
    lost = await PHASES[phase](stage, job)
    stage.cloud.preempt(lost, undo_delete=True)
    await stage.succeeds(job)
    assert stage.job(job).chain(0).failures == 0
    await stage.until_gone(lost, within_s=900.0)
    assert stage.cloud.vm(lost) is None


@journey(proves=("S10", "S15"))
async def test_incident_05_a_slice_whose_device_is_busy_is_not_tried_again_and_again(stage: Stage) -> None:
    await stage.pool(max=2)
    haunted: list[str] = []

    def behave(one: Try) -> Behaviour:
        here = one.attempt.slices[0].slice
        if not haunted:
            haunted.append(here)
        if here in haunted:
            return Behaviour(
                duration_s=5.0, start_s=1.0, code=1, agent="device_busy", log_tail="The TPU is already in use"
            )
        return Behaviour(duration_s=60.0, start_s=1.0)

    job = await stage.submit(behave=behave)
    await stage.succeeds(job)
    causes = stage.causes(job)
    assert set(causes[:-1]) == {Cause.INFRA}, "the slice's fault, not the job's"
    assert len(causes) <= 3, "a slice that says busy is given up, not tried until the breaker stops the job"
    assert stage.job(job).chain(0).failures == 0


@journey(proves=("S10", "S14"))
async def test_incident_05_a_host_that_was_replaced_takes_no_part_in_the_old_slice(stage: Stage) -> None:
    await stage.pool(accelerator="v5e-16")
    job = await stage.submit("v5e-16", behave=LONG)
    await stage.until_running(job)
    name = stage.slices_of(job)[0]
    stage.cloud.replace_host(name, 2)
    await stage.until(lambda: stage.causes(job)[0] is not None, SILENT_CLOSES_S, "the end of the attempt")
    await stage.succeeds(job)
    assert stage.attempts(job)[1].slices[0].slice != name, "nothing is launched beside a stranger"
    await stage.until_gone(name)


@journey(proves=("L2", "S15"))
async def test_incident_08_slices_that_live_ten_to_twenty_five_minutes_still_get_the_job_done(stage: Stage) -> None:
    """Seven hours of work, a checkpoint every two minutes, and no slice that lives half an hour."""
    lives_s = [60.0 * minutes for minutes in (10, 25, 12, 18, 10, 22, 15, 11, 24, 13)]
    await stage.pool(idle_s=600.0)

    def behave(one: Try) -> Behaviour:
        stage.loop.call_later(lives_s[one.number % len(lives_s)], stage.cloud.preempt, one.attempt.slices[0].slice)
        return Behaviour(duration_s=7 * 3600.0 - _saved_s(stage, one.job), start_s=1.0)

    job = await stage.submit(behave=behave)
    await stage.succeeds(job, within_s=14 * 3600.0)
    attempts = stage.attempts(job)
    assert len(attempts) >= 25
    assert {attempt.cause for attempt in attempts[:-1]} == {Cause.PREEMPTED}
    assert [attempt.stage for attempt in attempts] == list(range(len(attempts))), "each goes on where the last one was"
    assert stage.job(job).chain(0).failures == 0


def _saved_s(stage: Stage, job: str) -> float:
    """Work that earlier attempts have saved: whole checkpoints of two minutes before their slice was lost."""
    ran_s = [
        attempt.closed_at - attempt.started_at - LOST_CLOSES_S
        for attempt in stage.attempts(job)
        if attempt.closed_at is not None and attempt.started_at is not None
    ]
    return sum(max(0.0, each) // 120.0 * 120.0 for each in ran_s)


@journey(proves=("L2",))
async def test_incident_09_one_unlucky_preemption_does_not_close_a_healthy_zone(stage: Stage) -> None:
    await stage.pool(max=2)
    job = await stage.submit(behave=LONG)
    await stage.until_running(job)
    stage.cloud.preempt(stage.slices_of(job)[0])
    preempted_at = stage.now
    await stage.until(lambda: len(stage.calls_made("create", "ok")) == 2, 30.0, "a new try in the same zone")
    assert stage.now - preempted_at <= 30.0
    # A slice taken back before it was ready counts as one refusal: the zone rests for seconds, not minutes.
    other = await stage.submit(behave=LONG)
    await stage.until(lambda: len(stage.calls_made("create", "ok")) == 3, 15.0)
    unready = stage.ours()[-1]
    assert unready.state == "CREATING"
    stage.cloud.preempt(unready.name)
    await stage.until(lambda: len(stage.calls_made("create", "ok")) == 4, limits.ZONE_BACKOFF_FIRST_S + 20.0)
    await stage.succeeds(job, other)


REFUSALS = {
    "the region's quota is zero": FaultKind.QUOTA,
    "no reservation": FaultKind.STOCKOUT,
    "the type is not in this zone": FaultKind.PERMISSION,
}


@pytest.mark.parametrize("why", REFUSALS)
@journey(proves=("S9",))
async def test_incident_11_a_zone_that_always_refuses_is_passed_over_and_seldom_asked(stage: Stage, why: str) -> None:
    await stage.pool(zones=("zone-a", "zone-b"), max=8, idle_s=30.0)
    stage.calls.add("create", REFUSALS[why], where="zone-a", times=100_000)
    first = await stage.submit()
    await stage.until_running(first, within_s=90.0)
    jobs = [first]
    for _ in range(20):
        await stage.sleep(180.0)
        jobs.append(await stage.submit())
    await stage.succeeds(*jobs, within_s=900.0)
    assert {stage.slice(stage.attempts(job)[0].slices[0].slice).zone for job in jobs} == {"zone-b"}
    asked = [call for call in stage.calls_made("create") if call.body["zone"] == "zone-a"]
    assert 1 <= len(asked) <= 8, "an hour of refusals costs a handful of tries"


@journey(proves=("S9", "L12"))
async def test_incident_11_with_nowhere_left_to_go_the_job_says_when_it_will_try_again(stage: Stage) -> None:
    await stage.pool()
    stage.calls.add("create", FaultKind.QUOTA, times=1)
    job = await stage.submit()
    await stage.sleep(20.0)
    found = await stage.leader().why(job)
    assert found is not None
    assert found[0].code == "zone_backoff"
    assert found[0].numbers["seconds"] > 0
    await stage.succeeds(job, within_s=900.0)


@journey(proves=("S11", "L4"))
async def test_incident_12_part_of_a_gang_is_not_let_go_while_the_rest_is_made(stage: Stage) -> None:
    """The pool lets idle slices go after a minute; the second slice takes twenty to come."""
    stage.cloud.schedule("zone-a", [(0.0, 8), (1200.0, 1000)])
    await stage.sleep(1.0)
    await stage.pool(max=2, idle_s=60.0)
    job = await stage.submit(slices=2)
    await stage.until(lambda: any(one.usable for one in stage.slices()), 60.0, "the first slice")
    first = next(one.id for one in stage.slices() if one.usable)
    await stage.until_running(job, within_s=2400.0)
    assert stage.now > 1200.0
    assert first in stage.slices_of(job), "it waited for the other"
    await stage.succeeds(job)
    assert len(stage.calls_made("create", "ok")) == 2


@journey(proves=("L2", "S15"))
async def test_incident_18_five_maintenance_events_in_a_day_cost_five_stages_and_no_failure(stage: Stage) -> None:
    await stage.pool(spot=False)

    def behave(one: Try) -> Behaviour:
        return Behaviour(duration_s=4000.0 - _saved_s(stage, one.job), start_s=1.0)

    def tries(count: int) -> bool:
        return len(stage.attempts(job)) == count

    job = await stage.submit(behave=behave, rule=Rule(infra_budget=10))
    for events in range(5):
        await stage.until(functools.partial(tries, events + 1), 300.0, "the next attempt")
        await stage.until_running(job)
        await stage.sleep(600.0)
        stage.cloud.maintain(stage.slices_of(job)[0], 120.0)
    await stage.succeeds(job, within_s=4000.0)
    assert [attempt.stage for attempt in stage.attempts(job)] == [0, 1, 2, 3, 4, 5]
    assert stage.job(job).chain(0).losses == 5
    assert stage.job(job).chain(0).failures == 0
