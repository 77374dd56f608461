"""Place, stop, fence and close: what each commits as a whole, and how a job goes on by its rule."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.controller import attempts, settings, slices
from penstock.controller.attempts import used_now
from penstock.controller.verbs import Outdated
from penstock.domain import limits
from penstock.domain.lifecycle import (
    FAILURE_CAUSES,
    INFRASTRUCTURE_CAUSES,
    AttemptState,
    Cause,
    JobState,
    SliceState,
)
from penstock.domain.nouns import Bound, Queue, Replicas, Rule, Team
from penstock.domain.policies import PRESETS, Go
from penstock.ports.capacity import PREEMPTED
from penstock.ports.store import QuotaFull
from tests.unit.controller.stage import Stage


def unchanged(stage: Stage, call: Any, error: type[Exception], match: str) -> None:
    """The call is refused and leaves no trace."""
    before = stage.look(lambda reader: reader.last_seq())
    with pytest.raises(error, match=match):
        call()
    assert stage.look(lambda reader: reader.last_seq()) == before
    stage.check_counters()


# --- place ---
def test_a_gang_is_placed_as_a_whole(stage: Stage) -> None:
    job = stage.submit(accelerator="v5e-16", gang=2, timeout_s=60)
    first, second = stage.ready("big"), stage.ready("big")
    attempt = stage.attempt(stage.place(job, first, second, band=3, borrowed=True))
    assert attempt.slices == (Bound(first, f"vm-{first}"), Bound(second, f"vm-{second}"))
    assert (attempt.hosts, attempt.chips, attempt.fence, attempt.timeout_s) == (8, 32, 1, 60)
    assert (attempt.band, attempt.borrowed, attempt.state) == (3, True, AttemptState.ASSIGNED)
    placed = stage.job(job)
    assert (placed.state, placed.fence, placed.chain(0).live) == (JobState.PROVISIONING, 1, True)
    assert placed.chain(0).attempts == 1
    for id in (first, second):
        assert (stage.slice(id).attempt, stage.slice(id).idle_since) == (attempt.id, None)
    assert (stage.used("queue", "main"), stage.used("cohort", "lab")) == (32, 32)
    event = stage.events(job, "job.placed")[0]
    assert (event.fence, event.body["waiting"], event.body["attempt"]) == (1, -1, attempt.id)


def test_a_gang_with_one_bad_slice_is_not_placed_at_all(stage: Stage) -> None:
    job = stage.submit(accelerator="v5e-16", gang=2)
    good, lost = stage.ready("big"), stage.ready("big")
    stage.see(lost, PREEMPTED)
    unchanged(stage, lambda: stage.place(job, good, lost), Outdated, "is not free")
    unchanged(stage, lambda: stage.place(job, good), Outdated, "needs 2 slices")
    unchanged(stage, lambda: stage.place(job, good, good), Outdated, "needs 2 slices")
    unchanged(stage, lambda: stage.place(job, good, "s-none", chips=32), Outdated, "needs 2 slices")
    assert stage.slice(good).usable


def test_the_slices_of_a_gang_are_in_one_zone(stage: Stage) -> None:
    job = stage.submit(gang=2)
    here, there = stage.ready(zone="z1"), stage.ready(zone="z2")
    unchanged(stage, lambda: stage.place(job, here, there), Outdated, "the slices of a gang differ")


def test_a_slice_in_use_or_of_another_kind_is_refused(stage: Stage) -> None:
    _, _, slice = stage.started()
    job = stage.submit()
    big = stage.ready("big")
    unchanged(stage, lambda: stage.place(job, slice), Outdated, "is not free")
    unchanged(stage, lambda: stage.place(job, big), Outdated, "is a v5e-16")
    free = stage.ready()
    unchanged(stage, lambda: stage.place(job, free, chips=4), Outdated, "not what was planned")


def test_a_slice_of_another_team_is_never_used(stage: Stage) -> None:
    stage.wait(stage.commands.put_team(Team(name="other")))
    stage.pool("shared", teams=("other",))
    job = stage.submit()
    theirs = stage.ready("shared", team="other")
    unchanged(stage, lambda: stage.place(job, theirs), Outdated, "belongs to another team")


def test_a_dirty_slice_is_never_used_again(stage: Stage) -> None:
    _, attempt, slice = stage.started()
    stage.close(attempt, Cause.PREEMPTED, clean=False)
    assert stage.slice(slice).dirty
    job = stage.submit()
    unchanged(stage, lambda: stage.place(job, slice), Outdated, "is not free")


def test_what_is_not_ready_is_not_used(stage: Stage) -> None:
    job = stage.submit()
    (intended,) = stage.intend()
    drained = stage.ready()
    stage.do(slices.drain, drained, "test")
    for id in (intended, drained):
        unchanged(stage, lambda id=id: stage.place(job, id), Outdated, "is not free")


def test_a_cancelled_finished_blocked_or_unknown_job_is_not_placed(stage: Stage) -> None:
    first, second, live = stage.ready(), stage.ready(), stage.submit()
    stage.place(live, first)
    cancelled = stage.submit()
    stage.wait(stage.commands.cancel(cancelled, live))
    other = stage.submit()
    blocked = stage.submit(after=(other,))
    unchanged(stage, lambda: stage.place(cancelled, second), Outdated, "job is cancelled")
    unchanged(stage, lambda: stage.place(live, second, replica=0), Outdated, "job is provisioning, on its way")
    unchanged(stage, lambda: stage.place(blocked, second), Outdated, "waits for others")
    unchanged(stage, lambda: stage.place("j-none", second), Outdated, "job j-none is gone")


def test_a_live_replica_and_one_too_many_are_refused(stage: Stage) -> None:
    job, _, _ = stage.started()
    slice = stage.ready()
    unchanged(stage, lambda: stage.place(job, slice), Outdated, "replica 0 is live or done")
    unchanged(stage, lambda: stage.place(job, slice, replica=1), Outdated, "replica 1 is live or done")


def test_nothing_is_placed_in_maintenance(stage: Stage) -> None:
    job, slice = stage.submit(), stage.ready()
    stage.wait(stage.commands.set_maintenance(True))
    unchanged(stage, lambda: stage.place(job, slice), Outdated, "maintenance")
    stage.wait(stage.commands.set_maintenance(False))
    stage.place(job, slice)


def test_a_queue_holds_its_quota_and_what_it_may_borrow(stage: Stage) -> None:
    stage.wait(stage.commands.put_queue(Queue(name="main", team="lab", quota_chips=8, borrow_chips=8)))
    stage.wait(stage.commands.put_queue(Queue(name="idle", team="lab", quota_chips=100)))
    for _ in range(2):
        stage.place(stage.submit(), stage.ready())
    job, slice = stage.submit(), stage.ready()
    unchanged(stage, lambda: stage.place(job, slice), QuotaFull, "queue main: 16 of 16 chips used, 8 more asked")


def test_the_queues_of_a_team_hold_no_more_than_their_quotas_together(stage: Stage) -> None:
    stage.wait(stage.commands.put_queue(Queue(name="main", team="lab", quota_chips=8)))
    stage.wait(stage.commands.put_queue(Queue(name="two", team="lab", quota_chips=8)))
    stage.place(stage.submit(), stage.ready())
    last = stage.place(stage.submit(), stage.ready())
    job, slice = stage.submit(queue="two"), stage.ready()
    unchanged(stage, lambda: stage.place(job, slice), QuotaFull, "cohort lab: 16 of 16 chips used")
    assert stage.used("queue", "two") == 0
    stage.close(last)
    stage.place(job, slice)


# --- stop and fence ---
def test_a_cancel_overrides_another_stop_order_and_nothing_else_does(stage: Stage) -> None:
    _, attempt, _ = stage.started()
    stage.do(attempts.stop, attempt, "reclaimed")
    for why in ("timeout", "reclaimed"):
        unchanged(stage, lambda why=why: stage.do(attempts.stop, attempt, why), Outdated, "stopping already")
    stage.do(attempts.stop, attempt, "cancelled")
    ordered = stage.attempt(attempt).stop
    assert ordered is not None
    assert ordered.why == "cancelled"
    unchanged(stage, lambda: stage.do(attempts.stop, attempt, "cancelled"), Outdated, "stopping already")


def test_a_fence_is_raised_once_and_asked_for_again_is_the_same(stage: Stage) -> None:
    job, attempt, _ = stage.started()
    first = stage.do(attempts.raise_fence, attempt)
    assert (first.job, first.replica, first.fence) == (job, 0, 2)
    assert stage.do(attempts.raise_fence, attempt) == first
    assert stage.job(job).chain(0).fence == 2
    assert [event.fence for event in stage.events(job, "job.fence_raised")] == [2]
    stage.do(attempts.fenced, attempt)
    stage.do(attempts.fenced, attempt)
    assert [event.fence for event in stage.events(attempt, "attempt.fenced")] == [2]
    stage.close(attempt, Cause.LOST)
    successor = stage.attempt(stage.place(job, stage.ready()))
    assert successor.fence == 3


@pytest.mark.parametrize("verb", [attempts.raise_fence, attempts.fenced])
def test_a_closed_attempt_takes_no_orders(stage: Stage, verb: Any) -> None:
    _, attempt, _ = stage.started()
    stage.close(attempt)
    unchanged(stage, lambda: stage.do(verb, attempt), Outdated, "is closed")
    unchanged(stage, lambda: stage.do(attempts.stop, attempt, "timeout"), Outdated, "is closed")
    unchanged(stage, lambda: stage.close(attempt), Outdated, "is closed")


# --- close ---
def test_closing_frees_slice_and_quota_and_charges_the_queue(stage: Stage) -> None:
    job, attempt, slice = stage.started(environment="jax-1")
    stage.clock.advance(100)
    stage.close(attempt, Cause.PREEMPTED, clean=True)
    freed = stage.slice(slice)
    assert (freed.attempt, freed.idle_since, freed.warm, freed.usable) == (None, stage.clock.now(), "jax-1", True)
    assert (stage.used("queue", "main"), stage.used("cohort", "lab")) == (0, 0)
    queue = stage.look(lambda reader: reader.queue("main"))
    assert queue is not None
    assert queue.used_chip_s == pytest.approx(8 * 100)
    assert used_now(queue, stage.clock.now() + limits.SHARE_HALF_LIFE_S) == pytest.approx(400)
    closed = stage.attempt(attempt)
    assert (closed.state, closed.cause, closed.evidence) == (AttemptState.CLOSED, Cause.PREEMPTED, ("test",))
    assert stage.events(job, "job.requeued")[0].body["reason"] == "resume after preempted"


def test_a_slice_that_broke_meanwhile_stays_broken(stage: Stage) -> None:
    _, attempt, slice = stage.started()
    stage.see(slice, PREEMPTED)
    stage.close(attempt, Cause.PREEMPTED)
    after = stage.slice(slice)
    assert (after.state, after.attempt, after.idle_since) == (SliceState.PREEMPTED, None, None)


def test_a_success_needs_the_hosts_own_word(stage: Stage) -> None:
    _, attempt, _ = stage.started()
    unchanged(stage, lambda: stage.close(attempt, Cause.SUCCEEDED), Outdated, "only the hosts' reports")


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("cause", sorted(FAILURE_CAUSES | INFRASTRUCTURE_CAUSES))
def test_each_preset_does_for_each_cause_what_it_says(stage: Stage, preset: str, cause: Cause) -> None:
    rule = Rule(preset=preset, failure_budget=5, infra_budget=5)
    job, attempt, slice = stage.started(rule=rule)
    stage.clock.advance(100)
    stage.close(attempt, cause, clean=True)
    go = PRESETS[preset].on[cause]
    after = stage.job(job)
    chain = after.chain(0)
    assert chain.last_cause is cause
    assert (chain.failures, chain.losses) == ((1, 0) if cause in FAILURE_CAUSES else (0, 1))
    if go is Go.STOP:
        assert (after.state, after.cause) == (JobState.FAILED, cause)
        assert after.reason == f"rule {preset} stops after {cause.value}"
        return
    assert after.state is JobState.QUEUED
    assert chain.stage == (1 if go is Go.RESUME else 0)
    wait = chain.not_before - stage.clock.now()
    assert wait == 0 if cause is Cause.PREEMPTED else 0 < wait <= 2 * limits.BACKOFF_FIRST_S
    fresh = preset in ("reapply", "rerun") and cause in (Cause.INFRA, Cause.LOST)
    assert stage.slice(slice).usable is not fresh


def test_a_job_without_a_failure_budget_fails_at_its_first_failure(stage: Stage) -> None:
    job, attempt, _ = stage.started()
    stage.close(attempt, Cause.OOM)
    assert (stage.job(job).state, stage.job(job).reason) == (JobState.FAILED, "oom: failure budget of 0 spent")


@pytest.mark.parametrize(
    ("causes", "reason"),
    [
        ([Cause.USER_ERROR, Cause.TIMEOUT, Cause.OOM], "oom: failure budget of 2 spent"),
        ([Cause.PREEMPTED, Cause.INFRA, Cause.LOST, Cause.PREEMPTED], "infrastructure budget of 3 spent"),
        (
            [Cause.USER_ERROR, Cause.LOST, Cause.TIMEOUT, Cause.INFRA, Cause.PREEMPTED, Cause.INFRA],
            "infrastructure budget",
        ),
    ],
)
def test_the_two_budgets_are_spent_apart(stage: Stage, causes: list[Cause], reason: str) -> None:
    job, slice = stage.submit(rule=Rule(failure_budget=2, infra_budget=3)), stage.ready()
    for cause in causes:
        assert stage.job(job).state is JobState.QUEUED
        attempt = stage.start(job, slice)
        stage.clock.advance(1000)
        stage.close(attempt, cause, clean=True)
    assert stage.job(job).state is JobState.FAILED
    assert stage.job(job).reason.startswith(reason)


def test_a_job_that_breaks_its_slices_is_stopped_long_before_its_budget(stage: Stage) -> None:
    job, slice = stage.submit(), stage.ready()
    for _ in range(limits.POISON_LOSSES):
        assert stage.job(job).state is JobState.QUEUED
        attempt = stage.start(job, slice)
        stage.clock.advance(5)
        stage.close(attempt, Cause.LOST, clean=True)
        stage.clock.advance(limits.BACKOFF_MAX_S)
    assert stage.job(job).state is JobState.FAILED
    assert "the job breaks its slices" in stage.job(job).reason


def test_a_long_run_in_between_calms_the_breaker(stage: Stage) -> None:
    job, slice = stage.submit(), stage.ready()
    for number in range(2 * limits.POISON_LOSSES):
        attempt = stage.start(job, slice)
        stage.clock.advance(limits.POISON_RUN_S + 1 if number == limits.POISON_LOSSES - 1 else 5)
        stage.close(attempt, Cause.LOST, clean=True)
        assert stage.job(job).state is (JobState.FAILED if number == 2 * limits.POISON_LOSSES - 1 else JobState.QUEUED)


# --- replicas ---
def elastic(stage: Stage, count: int, **changes: Any) -> tuple[str, list[str], list[str]]:
    job = stage.submit(replicas=Replicas(1, count), **changes)
    on = [stage.ready() for _ in range(count)]
    return job, [stage.start(job, slice, replica) for replica, slice in enumerate(on)], on


def test_replicas_have_their_own_fences_and_chains(stage: Stage) -> None:
    job, made, _ = elastic(stage, 3)
    assert [stage.attempt(each).fence for each in made] == [1, 2, 3]
    stage.close(made[1], Cause.PREEMPTED)
    after = stage.job(job)
    assert after.state is JobState.RUNNING
    assert [chain.live for chain in after.chains] == [True, False, True]
    assert stage.kinds(job)[-1] == "job.replica_closed"
    again = stage.attempt(stage.place(job, stage.ready(), replica=1))
    assert (again.fence, again.stage) == (4, 1)


def test_a_job_succeeds_when_its_last_live_replica_closes(stage: Stage) -> None:
    job, made, on = elastic(stage, 3)
    stage.end(on[0], made[0])
    stage.close(made[1], Cause.PREEMPTED)
    assert stage.job(job).state is JobState.RUNNING
    stage.end(on[2], made[2])
    assert (stage.job(job).state, stage.job(job).cause) == (JobState.SUCCEEDED, Cause.SUCCEEDED)


def test_a_done_replica_does_not_start_again(stage: Stage) -> None:
    job, made, on = elastic(stage, 2)
    stage.end(on[0], made[0])
    unchanged(stage, lambda: stage.place(job, on[0], replica=0), Outdated, "is live or done")


def test_a_failing_replica_stops_the_others_and_then_the_job_fails(stage: Stage) -> None:
    job, made, on = elastic(stage, 3)
    stage.do(attempts.stop, made[2], "reclaimed")
    stage.close(made[0], Cause.USER_ERROR, clean=True)
    failing = stage.job(job)
    assert (failing.state, failing.cause) == (JobState.RUNNING, Cause.USER_ERROR)
    orders = [stage.attempt(each).stop for each in made[1:]]
    assert [order.why for order in orders if order] == ["replica", "reclaimed"]
    unchanged(stage, lambda: stage.place(job, on[0], replica=0), Outdated, "on its way to its end")
    stage.close(made[1], Cause.PREEMPTED)
    assert stage.attempt(made[1]).cause is Cause.CANCELLED
    stage.end(on[2], made[2])  # a late success of another replica saves nothing
    assert (stage.job(job).state, stage.job(job).cause) == (JobState.FAILED, Cause.USER_ERROR)


def test_a_surplus_replica_taken_back_costs_no_budget_and_fails_nobody(stage: Stage) -> None:
    job, made, on = elastic(stage, 2, rule=Rule(preset="pass"))
    stage.do(attempts.stop, made[1], "replica")
    stage.close(made[1], Cause.PREEMPTED, clean=True)
    after = stage.job(job)
    assert (after.state, after.cause, after.chain(1).losses) == (JobState.RUNNING, None, 0)
    stage.end(on[0], made[0])
    assert stage.job(job).state is JobState.SUCCEEDED


def test_a_cancelled_job_with_replicas_ends_with_the_last_of_them(stage: Stage) -> None:
    job, made, on = elastic(stage, 2)
    stage.wait(stage.commands.cancel(job))
    stage.end(on[0], made[0])
    assert stage.attempt(made[0]).cause is Cause.CANCELLED
    assert stage.job(job).state is JobState.RUNNING
    stage.close(made[1], Cause.PREEMPTED)
    assert stage.job(job).state is JobState.CANCELLED


def test_all_replicas_lost_queue_the_job_again_outside_the_heads(stage: Stage) -> None:
    job, made, _ = elastic(stage, 2)
    for each in made:
        stage.close(each, Cause.PREEMPTED)
    after = stage.job(job)
    assert (after.state, after.waiting, len(after.chains)) == (JobState.QUEUED, False, 2)


def test_a_lowered_limit_evicts_nobody(stage: Stage) -> None:
    job, attempt, slice = stage.started()
    stage.do(settings.limit, "queue", "main", 0)
    assert stage.job(job).state is JobState.RUNNING
    stage.close(attempt, Cause.PREEMPTED, clean=True)
    unchanged(stage, lambda: stage.place(job, slice), QuotaFull, "queue main: 0 of 0 chips used, 8 more asked")


def test_an_attempt_that_never_ran_does_not_count_as_a_stage(stage: Stage) -> None:
    job, slice = stage.submit(rule=Rule(preset="pre")), stage.ready()
    stage.close(stage.place(job, slice), Cause.INFRA, clean=True)
    assert stage.job(job).chain(0).stage == 0
    stage.clock.advance(limits.BACKOFF_MAX_S)
    stage.close(stage.start(job, stage.ready()), Cause.INFRA, clean=True)
    assert stage.job(job).chain(0).stage == 1
