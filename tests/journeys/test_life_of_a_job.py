"""Journeys of one job: to its success, its cancel, its loss and its return; every rule checked at the end."""

from __future__ import annotations

import pytest

from penstock.domain.custody import staging_path
from penstock.domain.lifecycle import Cause, JobState, SliceState
from penstock.domain.nouns import Rule
from tests.journeys.stage import Behaviour, Stage, Try, journey


@journey(proves=("S1", "S8", "S9", "S20", "L4", "L8", "L12"))
async def test_a_plain_job_goes_from_submit_to_success_with_its_outputs(stage: Stage) -> None:
    await stage.pool(idle_s=60.0)
    outputs = ("model.bin", "metrics.json")
    job = await stage.submit(outputs=outputs, behave=Behaviour(duration_s=100.0, start_s=1.0, outputs=outputs))
    found = await stage.read(job)
    assert found is not None
    assert found.state is JobState.QUEUED
    await stage.until_running(job)
    await stage.succeeds(job, within_s=120.0)
    found = await stage.read(job)
    assert found is not None
    assert found.outputs == outputs
    attempt = stage.attempts(job)[0]
    assert stage.causes(job) == [Cause.SUCCEEDED]
    for output in outputs:
        assert await stage.world.bucket.get(staging_path(job, attempt.fence, output)) is not None
    await stage.until_gone(attempt.slices[0].slice)
    assert stage.ours() == []


@journey(proves=("S13", "L3"))
async def test_a_cancel_in_the_queue_ends_at_once_and_nothing_is_made(stage: Stage) -> None:
    await stage.pool(max=0)
    job = await stage.submit()
    await stage.sleep(20.0)
    assert await stage.cancel(job) == "cancelled"
    assert stage.job(job).state is JobState.CANCELLED
    assert await stage.cancel(job) == "already finished"
    await stage.sleep(60.0)
    assert stage.calls_made("create") == []


@journey(proves=("S13", "L3"))
async def test_a_cancel_while_slices_are_made_ends_at_once_and_the_slice_is_let_go(stage: Stage) -> None:
    await stage.pool(idle_s=60.0)
    job = await stage.submit()
    await stage.until(lambda: len(stage.ours()) == 1, 20.0)
    await stage.cancel(job)
    assert stage.job(job).state is JobState.CANCELLED
    await stage.until(lambda: not stage.slices(), 400.0, "an empty pool")
    assert stage.records("proc.started") == []


@pytest.mark.parametrize(("ignores_term", "within_s"), [(False, 15.0), (True, 45.0)])
@journey(proves=("S13", "L3", "S10"))
async def test_a_cancel_of_a_running_job_ends_its_processes_and_frees_the_slice(
    stage: Stage, ignores_term: bool, within_s: float
) -> None:
    await stage.pool()
    job = await stage.submit(behave=Behaviour(duration_s=1e6, start_s=1.0, ignores_term=ignores_term))
    await stage.until_running(job)
    slice = stage.slices_of(job)[0]
    assert await stage.cancel(job) == "cancelled"
    await stage.until_over(job, within_s=within_s)
    assert stage.job(job).state is JobState.CANCELLED
    assert stage.causes(job) == [Cause.CANCELLED]
    # Every host reported its end, so the slice serves the next job.
    other = await stage.submit()
    await stage.until_running(other, within_s=15.0)
    assert stage.slices_of(other) == [slice]
    await stage.succeeds(other)


@journey(proves=("S11", "S15"))
async def test_when_one_host_of_a_gang_fails_all_of_it_stops_and_starts_again_together(stage: Stage) -> None:
    await stage.pool(accelerator="v5e-16", max=2)

    def behave(one: Try) -> Behaviour:
        fails = one.number == 1 and one.rank == 5
        return Behaviour(duration_s=40.0, start_s=1.0, code=1 if fails else 0, log_tail="ValueError: bad batch")

    job = await stage.submit("v5e-16", slices=2, behave=behave, rule=Rule(failure_budget=1))
    await stage.succeeds(job)
    first, second = stage.attempts(job)
    assert (first.cause, second.cause) == (Cause.USER_ERROR, Cause.SUCCEEDED)
    assert len(first.exits) == 8, "all of the gang was ended and seen to end"
    assert first.slices == second.slices, "nothing was wrong with the slices"
    assert stage.job(job).chain(0).failures == 1
    assert stage.job(job).chain(0).losses == 0


@journey(proves=("S15", "L7"))
async def test_a_job_that_fails_beyond_its_budget_ends_with_its_cause(stage: Stage) -> None:
    await stage.pool()
    fails = Behaviour(
        duration_s=20.0, start_s=1.0, code=1, log_tail="Traceback (most recent call last):\nKeyError: 'x'"
    )
    job = await stage.submit(behave=fails, rule=Rule(failure_budget=2))
    await stage.until_over(job)
    assert stage.job(job).state is JobState.FAILED
    assert stage.job(job).cause is Cause.USER_ERROR
    assert stage.causes(job) == [Cause.USER_ERROR] * 3


@pytest.mark.parametrize("notice_s", [0.0, 30.0])
@journey(proves=("S5", "S14", "S15"))
async def test_a_preempted_job_goes_on_one_stage_further(stage: Stage, notice_s: float) -> None:
    await stage.pool()
    outputs = ("model.bin",)
    behave = Behaviour(duration_s=300.0, start_s=1.0, stop_s=5.0, outputs=outputs)
    job = await stage.submit(behave=behave, outputs=outputs)
    await stage.until_running(job)
    lost = stage.slices_of(job)[0]
    stage.cloud.preempt(lost, notice_s=notice_s)
    if notice_s:
        await stage.until(lambda: stage.causes(job) == [Cause.PREEMPTED], 20.0, "its end before the machines go")
        assert stage.attempts(job)[0].exits[0].notice, "it was asked to save, and did"
        assert stage.slice(lost).state is not SliceState.READY
    await stage.until(lambda: len(stage.attempts(job)) == 2, 120.0, "the next attempt")
    await stage.succeeds(job)
    assert [(each.stage, each.cause) for each in stage.attempts(job)] == [(0, Cause.PREEMPTED), (1, Cause.SUCCEEDED)]
    assert stage.job(job).outputs == outputs
    assert stage.job(job).chain(0).failures == 0


@journey(proves=("L2", "S5", "S6"))
async def test_a_zombie_that_wakes_after_its_successor_started_can_commit_nothing(stage: Stage) -> None:
    await stage.pool(max=2)
    outputs = ("model.bin",)
    job = await stage.submit(outputs=outputs, behave=Behaviour(duration_s=200.0, start_s=1.0, outputs=outputs))
    await stage.until_running(job)
    first = stage.live_attempt(job)
    agent = stage.world.agent(first.slices[0].slice)
    assert agent is not None
    agent.pause(120.0)
    await stage.until(lambda: len(stage.attempts(job)) == 2, 120.0, "the next attempt")
    await stage.succeeds(job, within_s=900.0)
    first, second = stage.attempts(job)
    assert (first.cause, second.cause) == (Cause.LOST, Cause.SUCCEEDED)
    committed = stage.events("job.output_committed")
    assert [event.fence for event in committed] == [second.fence]


@journey(proves=("S5", "S15"))
async def test_a_host_heard_again_after_it_was_fenced_off_is_a_loss_and_no_failure_of_the_job(stage: Stage) -> None:
    """It is told to kill what it holds; that SIGKILL is ours, and must not be taken for an out-of-memory kill."""
    await stage.pool(max=2)
    job = await stage.submit(behave=Behaviour(duration_s=200.0, start_s=1.0))
    await stage.until_running(job)
    stage.world.network.cut(stage.slices_of(job)[0], 0, bucket=True)
    await stage.until(lambda: bool(stage.events("attempt.fencing")), 40.0, "the fence")
    stage.world.network.heal()
    await stage.until(lambda: stage.causes(job)[0] is not None, 30.0, "the end of the attempt")
    assert stage.causes(job)[0] is Cause.LOST, stage.attempts(job)[0].evidence
    await stage.succeeds(job)
    assert stage.job(job).chain(0).failures == 0


@journey(proves=("S3",))
async def test_a_chain_of_jobs_runs_in_order_and_a_broken_link_ends_the_rest(stage: Stage) -> None:
    await stage.pool(max=4)
    first = await stage.submit()
    second = await stage.submit(after=(first,))
    third = await stage.submit(after=(first, second))
    await stage.succeeds(first, second, third)
    started = [stage.attempts(job)[0].started_at or 0.0 for job in (first, second, third)]
    ended = [stage.job(job).finished_at or 0.0 for job in (first, second, third)]
    assert started[1] >= ended[0]
    assert started[2] >= ended[1]
    bad = await stage.submit(behave=Behaviour(duration_s=30.0, start_s=1.0, code=3))
    waits = await stage.submit(after=(bad,))
    last = await stage.submit(after=(waits,))
    await stage.until_over(bad, waits, last)
    assert [stage.job(job).state for job in (bad, waits, last)] == [
        JobState.FAILED, JobState.CANCELLED, JobState.CANCELLED,
    ]  # fmt: skip
    assert stage.attempts(waits) == []


@pytest.mark.parametrize("skew_s", [600.0, -600.0])
@journey(proves=("S14", "L8", "L12"))
async def test_a_clock_that_jumps_ten_minutes_changes_nothing(stage: Stage, skew_s: float) -> None:
    await stage.pool("pool", max=3, idle_s=3600.0)
    jobs = [await stage.submit(behave=Behaviour(duration_s=400.0, start_s=1.0)) for _ in range(3)]
    await stage.until_running(*jobs)
    before = {slice.id for slice in stage.slices()}
    stage.clock.skew_s = skew_s
    await stage.sleep(100.0)
    stage.clock.skew_s = 0.0
    await stage.sleep(100.0)
    assert [stage.causes(job) for job in jobs] == [[None]] * 3, "nobody was given up"
    assert {slice.id for slice in stage.slices()} == before
    await stage.succeeds(*jobs)
    assert stage.events("attempt.fencing", "slice.failed") == []
    # A loss is noticed as soon as ever, whatever the wall clock says.
    stage.clock.skew_s = skew_s
    job = await stage.submit(behave=Behaviour(duration_s=400.0, start_s=1.0))
    await stage.until_running(job)
    stage.cloud.preempt(stage.slices_of(job)[0])
    await stage.until(lambda: stage.causes(job)[0] is Cause.PREEMPTED, 35.0, "the loss noticed")
    stage.clock.skew_s = 0.0
    stage.heal()
    await stage.succeeds(job, within_s=900.0)


@journey(proves=("L7",))
async def test_a_job_no_pool_can_hold_says_so_and_ends(stage: Stage) -> None:
    await stage.pool()
    job = await stage.submit("v5e-16")
    await stage.sleep(30.0)
    found = await stage.leader().why(job)
    assert found is not None
    assert found[0].code == "infeasible"
    assert "v5e-16" in found[0].sentence
    await stage.until_over(job, within_s=700.0)
    assert stage.job(job).state is JobState.FAILED
