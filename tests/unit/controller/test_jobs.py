"""Submit, cancel, edit, end, unblock and purge: one transaction each, decided from what is committed."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.controller import jobs
from penstock.controller.jobs import KeyReused, NotFound
from penstock.controller.verbs import Outdated
from penstock.domain import limits
from penstock.domain.admission import BadInput, body_hash
from penstock.domain.lifecycle import Cause, JobState
from penstock.domain.nouns import JobSpec, Member, Queue, Resources, Rule, Snippet, Team
from tests.unit.controller.stage import Stage


# --- submit ---
def test_a_submitted_job_waits_and_says_so(stage: Stage) -> None:
    job = stage.job(stage.submit(priority=7, tags=("a",), payload=Snippet("print(1)")))
    assert (job.state, job.priority, job.tags, job.version) == (JobState.QUEUED, 7, ("a",), 1)
    assert job.spec.payload == Snippet("print(1)")
    assert job.spec.resources.chips == 8
    (event,) = stage.events(job.id)
    assert (event.kind, event.actor) == ("job.created", "api")
    assert event.body["waiting"] == 1
    assert (event.body["queue"], event.body["priority"]) == ("main", 7)


def test_the_same_key_and_request_answer_the_same_job(stage: Stage) -> None:
    first = stage.wait(stage.commands.submit(stage.spec(), "k"))
    again = stage.wait(stage.commands.submit(stage.spec(), "k"))
    assert first.created
    assert not again.created
    assert again.id == first.id
    assert len(stage.events(kind="job.created")) == 1


def test_the_same_key_with_another_request_is_a_conflict(stage: Stage) -> None:
    job = stage.submit("k")
    with pytest.raises(KeyReused) as caught:
        stage.submit("k", name="other")
    assert caught.value.job == job
    assert str(caught.value) == f"idempotency_key: 'k' was used for {job} with another request; use a new key"


def test_keys_of_two_teams_are_apart(stage: Stage) -> None:
    stage.wait(stage.commands.put_team(Team(name="other")))
    stage.wait(stage.commands.put_queue(Queue(name="theirs", team="other")))
    assert stage.submit("k") != stage.submit("k", team="other", queue="theirs")


def test_a_key_twice_in_one_batch_is_one_job(stage: Stage) -> None:
    first, second = stage.wait(stage.commands.submit_many([(stage.spec(), "k"), (stage.spec(), "k")]))
    assert (first.created, second.created) == (True, False)
    assert first.id == second.id


@pytest.mark.parametrize("bad", ["queue", "key", "after"])
def test_one_bad_member_refuses_the_whole_batch(stage: Stage, bad: str) -> None:
    stage.submit("taken")
    last = {
        "queue": (stage.spec(queue="nowhere"), None),
        "key": (stage.spec(name="other"), "taken"),
        "after": (stage.spec(after=("j-none",)), None),
    }[bad]
    with pytest.raises((NotFound, KeyReused, BadInput)):
        stage.wait(stage.commands.submit_many([(stage.spec(), None), (stage.spec(), "new"), last]))
    assert len(stage.events(kind="job.created")) == 1


def test_a_batch_over_the_limit_is_refused_before_the_store(stage: Stage) -> None:
    with pytest.raises(BadInput, match=r"jobs: 10001 are more than 10000; split the batch"):
        stage.wait(stage.commands.submit_many([(stage.spec(), None)] * (limits.BATCH_JOBS_MAX + 1)))


def test_a_queue_of_another_team_is_refused(stage: Stage) -> None:
    stage.wait(stage.commands.put_team(Team(name="other")))
    with pytest.raises(BadInput, match=r"queue: 'main' belongs to another team than 'other'"):
        stage.submit(team="other")


# --- cancel ---
def cancel(stage: Stage, id: str) -> str:
    (answer,) = stage.wait(stage.commands.cancel(id))
    assert answer.version == stage.job(id).version
    return answer.answer


def test_a_waiting_job_is_cancelled_at_once(stage: Stage) -> None:
    job = stage.submit()
    assert cancel(stage, job) == "cancelled"
    after = stage.job(job)
    assert (after.state, after.cause, after.fence) == (JobState.CANCELLED, Cause.CANCELLED, 1)
    assert after.finished_at == stage.clock.now()
    requested = stage.events(job)[1]
    assert (requested.kind, requested.fence, requested.body["waiting"]) == ("job.cancel_requested", 1, -1)


def test_cancelling_twice_changes_nothing(stage: Stage) -> None:
    job, _, _ = stage.started()
    assert cancel(stage, job) == "cancelled"
    version = stage.job(job).version
    assert cancel(stage, job) == "cancelled"
    assert stage.job(job).version == version


@pytest.mark.parametrize("run", [False, True])
def test_a_live_job_is_fenced_and_ends_when_its_attempt_does(stage: Stage, run: bool) -> None:
    job = stage.submit()
    slice = stage.ready()
    attempt = stage.start(job, slice) if run else stage.place(job, slice)
    assert cancel(stage, job) == "cancelled"
    requested = stage.job(job)
    assert requested.state is (JobState.RUNNING if run else JobState.PROVISIONING)
    assert requested.fence == requested.chain(0).fence == stage.attempt(attempt).fence + 1
    stage.close(attempt, Cause.CANCELLED)
    assert stage.job(job).state is JobState.CANCELLED


def test_a_job_queued_again_is_cancelled_at_once(stage: Stage) -> None:
    job, attempt, _ = stage.started()
    stage.close(attempt, Cause.PREEMPTED)
    assert stage.job(job).state is JobState.QUEUED
    assert cancel(stage, job) == "cancelled"
    assert stage.job(job).state is JobState.CANCELLED


@pytest.mark.parametrize(("cause", "state"), [(Cause.USER_ERROR, JobState.FAILED), (None, JobState.SUCCEEDED)])
def test_a_finished_job_stays_as_it_is(stage: Stage, cause: Cause | None, state: JobState) -> None:
    job, attempt, slice = stage.started()
    if cause is None:
        stage.end(slice, attempt)
    else:
        stage.close(attempt, cause)
    assert cancel(stage, job) == "already finished"
    assert stage.job(job).state is state
    assert "job.cancel_requested" not in stage.kinds(job)


def test_cancelling_what_does_not_exist_says_so(stage: Stage) -> None:
    job = stage.submit()
    with pytest.raises(NotFound, match=r"job 'j-none' does not exist"):
        stage.wait(stage.commands.cancel(job, "j-none"))
    assert stage.job(job).state is JobState.QUEUED  # all or none


# --- dependants ---
def test_a_job_that_waits_for_others_is_freed_by_the_last(stage: Stage) -> None:
    first, attempt, slice = stage.started()
    second = stage.submit()
    waiting = stage.submit(after=(first, second, first))
    assert stage.job(waiting).blocked == 2
    stage.end(slice, attempt)
    assert (stage.job(waiting).blocked, stage.job(waiting).waiting) == (1, False)
    stage.end(slice, stage.start(second, slice))
    assert (stage.job(waiting).blocked, stage.job(waiting).waiting) == (0, True)
    freed = stage.events(waiting, "job.unblocked")
    assert [event.body["by"] for event in freed] == [first, second]
    assert [event.body.get("waiting") for event in freed] == [None, 1]


def test_what_waits_for_a_failed_job_is_cancelled_all_the_way_down(stage: Stage) -> None:
    first, attempt, _ = stage.started()
    second = stage.submit(after=(first,))
    third = stage.submit(after=(second, first))
    stage.close(attempt, Cause.USER_ERROR)
    assert stage.job(first).state is JobState.FAILED
    for id in (second, third):
        assert (stage.job(id).state, stage.job(id).cause) == (JobState.CANCELLED, Cause.CANCELLED)
    assert stage.job(second).reason == f"{first}, which it waits for, failed"
    assert stage.kinds(third) == ["job.created", "job.cancelled"]


# --- arrays ---
def member(stage: Stage, index: int, at_most: int | None = 2, **changes: Any) -> str:
    return stage.submit(member=Member(array="sweep", index=index, at_most=at_most), **changes)


def held(stage: Stage, *ids: str) -> list[bool]:
    assert all(stage.job(id).waiting != stage.job(id).held for id in ids if stage.job(id).state is JobState.QUEUED)
    return [stage.job(id).held for id in ids]


def test_an_array_lets_in_as_many_as_may_run_at_once_in_one_batch_or_many(stage: Stage) -> None:
    spec = stage.spec(member=Member(array="sweep", index=0, at_most=3))
    ids = [one.id for one in stage.wait(stage.commands.submit_many([(spec, None)] * 2))]
    ids += [one.id for one in stage.wait(stage.commands.submit_many([(spec, None)] * 3))]
    assert held(stage, *ids) == [False, False, False, True, True]
    assert held(stage, member(stage, 5, None), stage.submit()) == [False, False]
    assert [event.body.get("waiting") for event in stage.events(ids[4])] == [None]
    assert (stage.events(ids[4])[0].body["array"], stage.events(ids[4])[0].body["at_most"]) == ("lab/sweep", 3)


def test_an_end_of_any_kind_lets_the_next_in(stage: Stage) -> None:
    first, second, third, urgent, fifth, sixth = (
        member(stage, index, priority=9 if index == 3 else 0) for index in range(6)
    )
    slice = stage.ready("small")
    stage.end(slice, stage.start(first, slice))
    assert held(stage, second, third, urgent, fifth, sixth) == [False, True, False, True, True], "the urgent one first"
    attempt = stage.start(second, slice)
    assert held(stage, third) == [True], "one that runs keeps its place"
    stage.close(attempt, Cause.USER_ERROR)
    assert held(stage, third, fifth, sixth) == [False, True, True]
    stage.wait(stage.commands.cancel(fifth))
    assert held(stage, sixth) == [True], "one that was held leaves no place"
    stage.wait(stage.commands.cancel(third))
    assert held(stage, urgent, sixth) == [False, False]
    assert stage.kinds(sixth) == ["job.created", "job.released"]
    stage.check_projection()


def test_a_preempted_member_keeps_its_place(stage: Stage) -> None:
    first, second = member(stage, 0, 1), member(stage, 1, 1)
    slice = stage.ready("small")
    stage.close(stage.start(first, slice), Cause.PREEMPTED)
    assert stage.job(first).state is JobState.QUEUED
    assert held(stage, second) == [True]


def test_who_waits_for_another_job_takes_no_place_until_that_has_ended(stage: Stage) -> None:
    """Else a member could wait for one that waits for its place."""
    last = member(stage, 1, 1)
    first, third = member(stage, 0, 1, after=(last,)), member(stage, 2, 1)
    assert (stage.job(first).blocked, stage.job(first).held) == (1, False)
    assert held(stage, third) == [True]
    slice = stage.ready("small")
    stage.end(slice, stage.start(last, slice))
    assert (stage.job(first).blocked, stage.job(first).held, stage.job(third).held) == (0, True, False)
    assert stage.events(first, "job.unblocked")[0].body["held"] is True
    stage.end(slice, stage.start(third, slice))
    assert held(stage, first) == [False]
    stage.check_projection()


def test_a_held_job_cannot_be_placed(stage: Stage) -> None:
    member(stage, 0, 1)
    second = member(stage, 1, 1)
    with pytest.raises(Outdated):
        stage.place(second, stage.ready("small"))


def test_a_whole_array_can_be_cancelled_at_once(stage: Stage) -> None:
    ids = [member(stage, index) for index in range(20)]
    stage.wait(stage.commands.cancel(*ids))
    assert {stage.job(id).state for id in ids} == {JobState.CANCELLED}
    assert not any(stage.job(id).held for id in ids)
    assert stage.look(lambda reader: reader.under_way("lab/sweep")) == 0


@pytest.mark.parametrize("at_most", [0, -1, limits.ARRAY_MEMBERS_MAX + 1])
def test_a_limit_that_means_nothing_is_refused(stage: Stage, at_most: int) -> None:
    with pytest.raises(BadInput, match="at_most"):
        member(stage, 0, at_most)


def test_a_key_of_before_there_were_arrays_still_finds_its_job(stage: Stage) -> None:
    """The hash of a spec without a member is the one that 0.2.0 made."""
    spec = JobSpec(team="lab", queue="main", resources=Resources(accelerators=("v5e-8",), chips=8))
    assert body_hash(spec) == "1bb1f40748eb41290efe1bb990815f30d8dab7e967f4fc0288b5f57a546d14c5"


# --- chains ---
def test_a_chain_longer_than_the_stack_is_deep_can_be_cancelled(stage: Stage) -> None:
    first = last = stage.submit()
    for _ in range(1500):
        last = stage.submit(after=(last,))
    assert cancel(stage, first) == "cancelled"
    assert stage.job(last).state is JobState.CANCELLED


def test_nobody_may_wait_for_what_can_never_succeed(stage: Stage) -> None:
    done = stage.submit()
    cancel(stage, done)
    with pytest.raises(BadInput, match=rf"after: '{done}' has cancelled, so this job could never start"):
        stage.submit(after=(done,))
    with pytest.raises(BadInput, match=r"after: 'j-none' is not a job of your team"):
        stage.submit(after=("j-none",))


def test_a_job_of_another_team_cannot_be_waited_for(stage: Stage) -> None:
    stage.wait(stage.commands.put_team(Team(name="other")))
    stage.wait(stage.commands.put_queue(Queue(name="theirs", team="other")))
    theirs = stage.submit(team="other", queue="theirs")
    with pytest.raises(BadInput, match=r"is not a job of your team"):
        stage.submit(after=(theirs,))


def test_waiting_for_a_finished_job_is_not_waiting(stage: Stage) -> None:
    job, attempt, slice = stage.started()
    stage.end(slice, attempt)
    assert stage.job(stage.submit(after=(job,))).waiting


# --- finish, edit, purge ---
def test_only_a_job_without_live_attempts_is_finished(stage: Stage) -> None:
    waiting, (running, _, _) = stage.submit(), stage.started()
    stage.do(jobs.finish, waiting, False, "no pool has it")
    assert (stage.job(waiting).state, stage.job(waiting).reason) == (JobState.FAILED, "no pool has it")
    for id in (waiting, running):
        with pytest.raises(Outdated):
            stage.do(jobs.finish, id, False, "again")


def test_a_job_is_finished_as_cancelled_only_if_it_was(stage: Stage) -> None:
    job = stage.submit()
    with pytest.raises(Outdated, match="was not cancelled"):
        stage.do(jobs.finish, job, True, "cancelled")
    assert stage.job(job).state is JobState.QUEUED


def test_priority_and_tags_change_and_nothing_else(stage: Stage) -> None:
    job = stage.submit(priority=1, tags=("a",))
    stage.wait(stage.commands.set_priority(job, 5))
    stage.wait(stage.commands.tag(job, ["b", "c"]))
    after = stage.job(job)
    assert (after.priority, after.tags, after.spec.priority, after.state) == (5, ("b", "c"), 1, JobState.QUEUED)


def test_a_finished_job_takes_tags_but_no_priority(stage: Stage) -> None:
    job = stage.submit()
    cancel(stage, job)
    stage.wait(stage.commands.tag(job, ["kept"]))
    assert stage.job(job).tags == ("kept",)
    with pytest.raises(BadInput, match=rf"priority: 1 cannot change: {job} has cancelled"):
        stage.wait(stage.commands.set_priority(job, 1))


def test_only_what_ended_before_the_retention_is_purged(stage: Stage) -> None:
    old, live = stage.submit(), stage.submit()
    cancel(stage, old)
    stage.clock.advance(limits.RETENTION_S + 10)
    young = stage.submit()
    cancel(stage, young)
    cutoff = stage.clock.now() - limits.RETENTION_S
    with pytest.raises(BadInput, match=r"older_than: .* is less than 30 days ago"):
        stage.wait(stage.commands.purge([old, live, young], cutoff + 1))
    assert stage.wait(stage.commands.purge([old, live, young], cutoff)) == 1
    assert stage.look(lambda reader: reader.job(old)) is None
    assert stage.kinds(old)[-1] == "job.purged"
    assert stage.job(young).state is JobState.CANCELLED


# --- resume and rerun ---
def test_resume_goes_on_one_stage_further_and_rerun_from_nothing(stage: Stage) -> None:
    job, attempt, slice = stage.started(rule=Rule(preset="pre"))
    stage.close(attempt, Cause.PREEMPTED, clean=True)
    stage.end(slice, stage.start(job, slice), code=1)
    assert stage.job(job).state is JobState.FAILED
    resumed = stage.job(stage.wait(stage.commands.resume(job)).id)
    again = stage.job(stage.wait(stage.commands.rerun(job)).id)
    assert (resumed.stage, resumed.parent, resumed.waiting) == (2, job, True)
    assert (again.stage, again.parent, again.waiting) == (0, None, True)
    assert stage.attempt(stage.place(resumed.id, slice)).stage == 2


def test_only_a_finished_job_is_run_again(stage: Stage) -> None:
    job = stage.submit()
    with pytest.raises(BadInput, match=rf"job: '{job}' is queued; cancel it first, or wait until it ends"):
        stage.wait(stage.commands.resume(job))
    with pytest.raises(NotFound):
        stage.wait(stage.commands.rerun("j-none"))


def test_the_key_of_a_submit_does_not_stand_for_its_resume(stage: Stage) -> None:
    job = stage.submit("k")
    cancel(stage, job)
    with pytest.raises(KeyReused):
        stage.wait(stage.commands.resume(job, "k"))
    resumed = stage.wait(stage.commands.resume(job, "k2"))
    assert stage.wait(stage.commands.resume(job, "k2")).id == resumed.id
    with pytest.raises(KeyReused):
        stage.wait(stage.commands.rerun(job, "k2"))
