"""Incidents of other systems that begin in the control plane itself: gangs, snapshots, stalls, rations and backlogs.

Each `test_incident_NN_…` is one row of docs/explanation/incidents.md; what happened elsewhere is told there.
"""

from __future__ import annotations

import asyncio

import pytest

from penstock.capacity.fakecloud import FaultKind
from penstock.domain import limits
from penstock.domain.lifecycle import Cause, JobState, SliceState
from penstock.domain.nouns import Rule
from penstock.planner.actions import Place
from penstock.sim.processes import ECHO
from tests.journeys.stage import Behaviour, Stage, Try, journey

LONG = Behaviour(duration_s=300.0, start_s=1.0)


@pytest.mark.parametrize("siblings", ["hang in a collective", "end with a coordination error first"])
@journey(proves=("L2", "S11", "S15"))
async def test_incident_04_a_dead_host_takes_its_gang_with_it_and_the_job_is_not_to_blame(
    stage: Stage, siblings: str
) -> None:
    await stage.pool(accelerator="v5e-16", max=2)
    echo_s = None if siblings == "hang in a collective" else 2.0
    behave = Behaviour(duration_s=300.0, start_s=1.0, echo_s=echo_s)
    job = await stage.submit("v5e-16", behave=behave)
    await stage.until_running(job)
    slice = stage.slices_of(job)[0]
    stage.cloud.stop_host(slice, 2)
    await stage.until(lambda: stage.causes(job)[0] is not None, 90.0, "the end of the attempt")
    first = stage.attempts(job)[0]
    assert first.cause in (Cause.LOST, Cause.INFRA)
    if echo_s is not None:
        assert any(ECHO in exit.log_tail for exit in first.exits), "the siblings did speak first"
    await stage.succeeds(job)
    assert stage.job(job).chain(0).failures == 0, "no failure budget was needed"
    second = stage.attempts(job)[1]
    assert second.slices[0].slice != slice, "a slice with a dead host is not used again"
    assert second.stage == 1


@pytest.mark.parametrize("slices", [1, 2])
@journey(proves=("S10",))
async def test_incident_06_a_stale_snapshot_cannot_put_two_gangs_on_one_set_of_hosts(stage: Stage, slices: int) -> None:
    """The leader goes on planning from a view in which the slices are still free; every commit looks again."""
    await stage.pool(accelerator="v5e-16", max=slices, min=slices)
    await stage.until(lambda: sum(one.usable for one in stage.slices()) == slices, 60.0)
    stage.fates.when("a", "commit.carry_out", "before", lambda: stage.fates.blind(30.0))
    jobs = [await stage.submit("v5e-16", slices=slices) for _ in range(2)]
    await stage.sleep(25.0)
    placed = [action for plan in stage.plans for action in plan.actions if isinstance(action, Place)]
    assert len(placed) > 2, "it planned the same placement again and again"
    assert [len(stage.attempts(job)) for job in jobs] == [1, 0]
    await stage.succeeds(*jobs)
    assert [len(stage.attempts(job)) for job in jobs] == [1, 1]


@journey(controllers=("a", "b"), proves=("S10", "S16"))
async def test_incident_06_two_loops_with_different_views_cannot_share_a_slice(stage: Stage) -> None:
    """One loop stands still with its placement in hand; the other places another job there; the first wakes."""
    await stage.pool(min=1)
    await stage.until(lambda: any(one.usable for one in stage.slices()), 60.0)
    old = stage.leader_name()
    stage.fates.when(old, "store.read", "after", lambda: stage.freeze(old, 30.0))
    first = await stage.submit()
    await stage.sleep(2.0)
    second = await stage.submit(priority=10)
    await stage.until(lambda: stage.running(second), 60.0, "the other loop at work")
    assert stage.attempts(first) == []
    await stage.succeeds(first, second)
    assert [len(stage.attempts(job)) for job in (first, second)] == [1, 1]


@pytest.mark.parametrize("how", ["stall", "restart", "store away"])
@journey(proves=("S14",))
async def test_incident_07_a_stall_of_the_controller_is_not_the_silence_of_its_hosts(stage: Stage, how: str) -> None:
    await stage.pool(max=20)
    jobs = [await stage.submit(behave=Behaviour(duration_s=600.0, start_s=1.0)) for _ in range(20)]
    await stage.until_running(*jobs, within_s=200.0)
    if how == "stall":
        stage.freeze("a", 120.0)
    elif how == "restart":
        stage.kill("a", back_after_s=120.0)
    else:
        stage.store_outage(120.0)
    await stage.sleep(150.0)
    stage.heal()
    assert stage.events("attempt.fencing", "attempt.closed", "slice.failed", "slice.deleting") == []
    # It has not gone deaf either: a host that really died meanwhile is found.
    dead = stage.slices_of(jobs[0])[0]
    stage.cloud.die_unseen(dead)
    await stage.until(lambda: stage.causes(jobs[0])[0] is Cause.LOST, 60.0, "the one true loss")
    await stage.succeeds(*jobs, within_s=2000.0)
    assert [len(stage.attempts(job)) for job in jobs[1:]] == [1] * 19


@journey(proves=("S9", "S12"))
async def test_incident_10_a_fan_out_over_pools_stays_under_the_projects_create_rate(stage: Stage) -> None:
    for number in range(4):
        await stage.pool(
            f"pool-{number}", accelerator=("v5e-8", "v4-8", "v6e-8", "v5e-16")[number], max=40, idle_s=60.0
        )
    jobs = [
        await stage.submit(
            ("v5e-8", "v4-8", "v6e-8", "v5e-16")[number % 4], behave=Behaviour(duration_s=30.0, start_s=1.0)
        )
        for number in range(140)
    ]
    await stage.succeeds(*jobs, within_s=1800.0)
    called = [call.t for call in stage.calls_made("create")]
    busiest = max(sum(1 for t in called if start <= t < start + 60.0) for start in called)
    assert len(called) >= 100
    assert busiest <= limits.CREATES_PER_MINUTE


@journey(proves=("S9",))
async def test_incident_10_when_told_to_slow_down_it_does(stage: Stage) -> None:
    await stage.pool(max=10)
    stage.calls.add("create", FaultKind.RATE_LIMIT, seconds=30.0, times=1)
    jobs = [await stage.submit() for _ in range(10)]
    await stage.succeeds(*jobs)
    refused = stage.calls_made("create", "RateLimited")
    assert len(refused) == 1
    after = [call.t for call in stage.calls_made("create") if call.t > refused[0].t + 1.0]
    assert min(after) - refused[0].t >= 29.0


@journey(proves=("S11", "L2"))
async def test_incident_13_a_bounced_gang_keeps_its_place_before_smaller_jobs(stage: Stage) -> None:
    await stage.pool(max=2)
    gang = await stage.submit(slices=2, behave=LONG)
    await stage.until_running(gang)
    small = [await stage.submit() for _ in range(6)]
    stage.cloud.preempt(stage.slices_of(gang)[0])
    await stage.until(lambda: len(stage.attempts(gang)) == 2, 300.0, "the gang's return")
    assert [len(stage.attempts(job)) for job in small] == [0] * 6, "nobody slipped in"
    await stage.succeeds(gang, *small, within_s=2000.0)


@journey(proves=("S11", "S15"))
async def test_incident_13_slices_a_gang_freed_for_a_moment_are_kept_for_it(stage: Stage) -> None:
    """Its own process broke on the platform's account: the gang waits out its back-off beside free slices."""
    await stage.pool(max=2)

    def behave(one: Try) -> Behaviour:
        broken = one.number == 1 and one.rank == 1
        return Behaviour(
            duration_s=60.0, start_s=1.0, code=None if broken else 0, agent="process_lost" if broken else None
        )

    gang = await stage.submit(slices=2, behave=behave, rule=Rule(infra_budget=5))
    await stage.until_running(gang)
    small = [await stage.submit() for _ in range(6)]
    await stage.until(lambda: len(stage.attempts(gang)) == 2, 120.0, "the gang's return")
    first, second = stage.attempts(gang)
    assert first.slices == second.slices, "nothing was wrong with the slices, and nobody took them"
    assert [len(stage.attempts(job)) for job in small] == [0] * 6
    await stage.succeeds(gang, *small, within_s=2000.0)


@journey(proves=("S11", "L2"))
async def test_incident_14_an_endless_stream_of_low_work_does_not_starve_a_bounced_production_gang(
    stage: Stage,
) -> None:
    await stage.queue("production", band=1)
    await stage.queue("children", band=0)
    await stage.pool(max=4)
    child = Behaviour(duration_s=90.0, start_s=1.0, stop_s=5.0)
    children = [await stage.submit(queue="children", behave=child) for _ in range(10)]
    gang = await stage.submit(queue="production", slices=2, behave=LONG)
    await stage.until_running(gang, within_s=200.0)
    lost = stage.slices_of(gang)[0]
    stage.cloud.preempt(lost)
    for _ in range(12):
        children.append(await stage.submit(queue="children", behave=child))
        await stage.sleep(10.0)
    await stage.until(lambda: len(stage.attempts(gang)) == 2, 60.0, "the gang's return among the children")
    await stage.succeeds(gang, *children, within_s=4000.0)


@journey(proves=("L1",))
async def test_incident_14_waiting_raises_the_chance_and_never_lowers_it(stage: Stage) -> None:
    """In one queue a job that was there first starts first, even after it was lost and came back."""
    await stage.pool(max=1)
    first = await stage.submit(behave=LONG)
    await stage.until_running(first)
    later = [await stage.submit() for _ in range(5)]
    stage.cloud.preempt(stage.slices_of(first)[0])
    await stage.succeeds(first, *later, within_s=3000.0)
    order = [str(event.body["job"]) for event in stage.events("attempt.created")]
    assert order == [first, first, *later]


@journey(proves=("S1",))
async def test_incident_17_a_controller_comes_back_quickly_with_a_backlog_behind_it(stage: Stage) -> None:
    """Twenty thousand jobs wait; a restart reads what lives and the heads of the queue, not the backlog."""
    await stage.pool(max=2)
    first = await stage.submit(name="backlog", behave=Behaviour(duration_s=30.0, start_s=1.0))
    spec = stage.job(first).spec
    backlog: list[str] = []
    for _ in range(2):
        commands = stage.commands()
        assert commands is not None
        backlog += [answer.id for answer in await commands.submit_many([(spec, None)] * 10_000)]
    stage.kill("a")
    await stage.until(lambda: not stage.controllers, 5.0)
    await stage.until(lambda: bool(stage.controllers) and stage.controllers["a"].leading, 15.0, "the lead taken again")
    await stage.until(lambda: len(stage.records("tick")) > 0 and stage.leader().cursor > 20_000, 10.0, "a tick")
    view = stage.leader().snapshot.queues["main"]
    assert len(view.waiting) <= limits.WINDOW_JOBS
    assert view.waiting_total >= 19_990
    assert len(stage.leader().snapshot.jobs) <= 4, "only what was placed is held"
    await stage.until(lambda: stage.over(*backlog[:6]), 400.0, "work going on")
    found = await stage.read(first)
    assert found is not None
    commands = stage.commands()
    assert commands is not None
    for start in range(0, len(backlog), 10_000):
        await commands.cancel(*backlog[start : start + 10_000])
    await stage.until_over(first, *backlog[:10], within_s=120.0)


@journey(proves=("S1", "S2"))
async def test_incident_19_thousands_of_submits_at_once_are_each_taken_once(stage: Stage) -> None:
    """A thousand users, each sending twice because the first answer seemed lost."""
    await stage.pool(max=0)
    submits = [
        stage.submit(name=f"burst-{number}", key=f"burst-{number}", user=f"user-{number}")
        for number in range(1000)
        for _ in range(2)
    ]
    answers = await asyncio.gather(*submits)
    assert [answers[2 * n] == answers[2 * n + 1] for n in range(1000)] == [True] * 1000
    assert len(set(answers)) == 1000
    assert len(stage.events("job.created")) == 1000
    for number in range(0, 1000, 100):
        found = await stage.read(answers[2 * number], f"user-{number}")
        assert found is not None
    await stage.until(lambda: stage.leader().snapshot.queues["main"].waiting_total == 1000, 10.0, "the planner to know")
    commands = stage.commands()
    assert commands is not None
    cancelled = await commands.cancel(*sorted(set(answers)))
    assert {answer.answer for answer in cancelled} == {"cancelled"}
    assert all(stage.job(answer.id).state is JobState.CANCELLED for answer in cancelled[:5])


@journey(controllers=("a", "b"), proves=("S16", "S2"))
async def test_incident_20_a_client_cut_off_in_mid_submit_finds_its_job_when_it_asks_again(stage: Stage) -> None:
    """The part of a disconnect that is control's: the answer is lost, the work is not, and it is not done twice."""
    await stage.pool()
    stage.fates.crash_at("commit.submit", "after")
    job = await stage.submit(key="once")
    assert any(record.kind == "submit.unknown" for record in stage.history.clients)
    assert len(stage.events("job.created")) == 1
    await stage.succeeds(job)
    assert stage.slices(SliceState.READY)
