"""The verb behind a sync: joins, launches, reports in any order, gangs, fences, late words, outputs, progress."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from penstock.controller import attempts, slices
from penstock.controller.reports import HOST_REPLACED, hear
from penstock.domain.custody import Held, Launch, Phase
from penstock.domain.lifecycle import AttemptState, Cause, JobState, SliceState
from penstock.domain.nouns import Exit, Replicas, Rule
from penstock.ports.capacity import CREATING, READY
from tests.unit.controller.stage import Stage, held, request

WELL = Exit(host=0, code=0)
BAD = Exit(host=0, code=1, log_tail="ValueError: no")


def seq(stage: Stage) -> int:
    return stage.look(lambda reader: reader.last_seq())


# --- hosts ---
def test_a_slice_is_ready_when_the_provider_and_all_hosts_say_so(stage: Stage) -> None:
    (slice,) = stage.intend("big")
    stage.see(slice, CREATING)
    for host in (2, 0, 3):
        assert stage.sync(slice, host).welcome
    stage.see(slice, READY)
    assert stage.slice(slice).state is SliceState.CREATING
    stage.sync(slice, 1)
    after = stage.slice(slice)
    assert (after.state, after.ready_at, after.idle_since) == (SliceState.READY, stage.clock.now(), stage.clock.now())
    assert after.joined == ("host-0", "host-1", "host-2", "host-3")


def test_a_host_that_comes_before_the_providers_id_waits(stage: Stage) -> None:
    (slice,) = stage.intend()
    before = seq(stage)
    assert stage.sync(slice).welcome
    assert seq(stage) == before
    stage.see(slice)
    stage.sync(slice)
    assert stage.slice(slice).state is SliceState.READY


def test_joining_twice_is_one_event(stage: Stage) -> None:
    slice = stage.ready()
    before = seq(stage)
    assert stage.sync(slice).welcome
    assert seq(stage) == before


def test_a_replaced_host_breaks_the_slice_once(stage: Stage) -> None:
    slice = stage.ready("big")
    reply = stage.sync(slice, 1, incarnation="another")
    assert (reply.welcome, reply.why) == (False, HOST_REPLACED)
    assert (stage.slice(slice).state, stage.slice(slice).why) == (SliceState.FAILED, HOST_REPLACED)
    before = seq(stage)
    assert not stage.sync(slice, 1, incarnation="another").welcome
    assert stage.sync(slice, 0).why == "the slice is failed"
    assert seq(stage) == before


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"provider_id": "vm-other"}, "this machine is another incarnation than the slice"),
        ({"host": 1}, "the slice has 1 hosts"),
        ({"host": -1}, "the slice has 1 hosts"),
        ({"slice": "s-none"}, "no such slice"),
    ],
)
def test_strangers_are_unwelcome_and_change_nothing(stage: Stage, changes: dict[str, Any], why: str) -> None:
    slice = stage.ready()
    before = seq(stage)
    reply = stage.do(hear, msgspec.structs.replace(request(slice), **changes))
    assert (reply.welcome, reply.why, reply.launch) == (False, why, None)
    assert seq(stage) == before
    assert stage.slice(slice).usable


def test_a_slice_on_its_way_out_takes_nobody_in(stage: Stage) -> None:
    slice = stage.ready()
    stage.do(slices.release, slice, "test")
    assert stage.sync(slice).why == "the slice is deleting"


# --- launch ---
def test_the_order_to_start_is_repeated_until_it_is_held(stage: Stage) -> None:
    job, slice = stage.submit(accelerator="v5e-16", timeout_s=77), stage.ready("big")
    attempt = stage.place(job, slice)
    order = Launch(attempt=attempt, job=job, replica=0, fence=1, stage=0, rank=2, world_size=4, timeout_s=77)
    before = seq(stage)
    assert stage.sync(slice, 2).launch == order
    assert stage.sync(slice, 2).launch == order
    assert seq(stage) == before
    reply = stage.report(slice, attempt, 2, Phase.LAUNCHED)
    assert (reply.launch, reply.stop, reply.kill, reply.forget) == (None, (), (), ())
    assert stage.attempt(attempt).launched == (2,)
    assert stage.attempt(attempt).state is AttemptState.LAUNCHING


def test_ranks_of_a_gang_run_over_all_its_slices(stage: Stage) -> None:
    job = stage.submit(accelerator="v5e-16", gang=2)
    first, second = stage.ready("big"), stage.ready("big")
    stage.place(job, first, second)
    ranks = []
    for slice, host in itertools.product((first, second), range(4)):
        order = stage.sync(slice, host).launch
        assert order is not None
        assert order.world_size == 8
        ranks.append(order.rank)
    assert ranks == list(range(8))


@pytest.mark.parametrize("end", ["stop", "cancel", "fence", "close"])
def test_nothing_is_started_that_is_on_its_way_out(stage: Stage, end: str) -> None:
    job, slice = stage.submit(), stage.ready()
    attempt = stage.place(job, slice)
    match end:
        case "stop":
            stage.do(attempts.stop, attempt, "reclaimed")
        case "cancel":
            stage.wait(stage.commands.cancel(job))
        case "fence":
            stage.do(attempts.raise_fence, attempt)
        case _:
            stage.close(attempt)
    assert stage.sync(slice).launch is None


def test_a_host_that_has_ended_is_not_started_again(stage: Stage) -> None:
    _, attempt, slice = stage.started("big")
    reply = stage.report(slice, attempt, 1, exit=WELL)
    assert reply.forget == (attempt,)
    assert stage.sync(slice, 1).launch is None


def test_the_job_runs_when_every_host_does(stage: Stage) -> None:
    job, slice = stage.submit(accelerator="v5e-16"), stage.ready("big")
    attempt = stage.place(job, slice)
    for host in (3, 1, 0):
        stage.report(slice, attempt, host, Phase.RUNNING)
    assert (stage.attempt(attempt).state, stage.job(job).state) == (AttemptState.LAUNCHING, JobState.PROVISIONING)
    stage.clock.advance(5)
    stage.report(slice, attempt, 2, Phase.RUNNING)
    after = stage.attempt(attempt)
    assert (after.state, after.started_at) == (AttemptState.RUNNING, stage.clock.now())
    assert stage.job(job).state is JobState.RUNNING


# --- reports in any order, any number of times ---
def test_duplicated_and_reordered_reports_change_nothing(stage: Stage) -> None:
    _, attempt, slice = stage.started("big")
    now = stage.attempt(attempt)
    late = [
        request(slice, 1, held(now, Phase.LAUNCHED)),
        request(slice, 1, held(now, Phase.RUNNING)),
        request(slice, 1),
    ]
    stage.report(slice, attempt, 1, exit=WELL)
    before, known = seq(stage), stage.attempt(attempt)
    for each in [*late, request(slice, 1, held(now, Phase.EXITED, exit=BAD)), *late]:
        assert stage.do(hear, each).welcome
    assert seq(stage) == before
    assert stage.attempt(attempt) == known
    assert [exit.host for exit in known.exits] == [1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_a_gang_succeeds_in_whatever_order_its_hosts_report(stage: Stage, order: tuple[int, ...]) -> None:
    """Also when the only word of each host is its last: launched and running are implied by a good end."""
    job, slice = stage.submit(accelerator="v5e-16"), stage.ready("big")
    attempt = stage.place(job, slice)
    for host in order:
        assert stage.job(job).state is JobState.PROVISIONING
        stage.report(slice, attempt, host, exit=WELL)
    assert (stage.job(job).state, stage.attempt(attempt).cause) == (JobState.SUCCEEDED, Cause.SUCCEEDED)
    assert stage.slice(slice).usable


def test_a_failing_host_stops_its_siblings_at_once(stage: Stage) -> None:
    job, attempt, slice = stage.started("big")
    stage.report(slice, attempt, 2, exit=BAD)
    running = stage.attempt(attempt)
    assert running.stop is not None
    assert (running.state, running.stop.why) == (AttemptState.RUNNING, "gang")
    assert stage.report(slice, attempt, 0, Phase.RUNNING).stop == (attempt,)
    for host in (0, 1, 3):
        stage.report(slice, attempt, host, exit=Exit(host=host, signal=15, agent="stopped"))
    closed = stage.attempt(attempt)
    assert (closed.cause, closed.state) == (Cause.USER_ERROR, AttemptState.CLOSED)
    assert [exit.host for exit in closed.exits] == [2, 0, 1, 3]
    assert stage.job(job).state is JobState.FAILED


@pytest.mark.parametrize(
    ("why", "cause"),
    [("reclaimed", Cause.PREEMPTED), ("drained", Cause.PREEMPTED), ("timeout", Cause.TIMEOUT)],
)
def test_our_own_stop_order_explains_the_end(stage: Stage, why: str, cause: Cause) -> None:
    _, attempt, slice = stage.started()
    stage.do(attempts.stop, attempt, why)
    stage.report(slice, attempt, exit=Exit(host=0, signal=15, agent="stopped"))
    assert stage.attempt(attempt).cause is cause


def test_a_stop_by_the_agent_itself_is_a_loss_not_a_failure(stage: Stage) -> None:
    job, attempt, slice = stage.started()
    stage.report(slice, attempt, exit=Exit(host=0, signal=15, agent="stopped"))
    assert stage.attempt(attempt).cause is Cause.LOST
    assert stage.job(job).state is JobState.QUEUED


def test_a_polite_end_after_a_stop_order_is_no_success(stage: Stage) -> None:
    job, attempt, slice = stage.started()
    stage.do(attempts.stop, attempt, "reclaimed")
    stage.end(slice, attempt)
    assert stage.job(job).state is JobState.QUEUED
    assert stage.job(job).chain(0).last_cause is Cause.PREEMPTED


# --- late words ---
def test_an_exit_after_the_close_is_kept_as_rejected_once(stage: Stage) -> None:
    job, attempt, slice = stage.started()
    stage.close(attempt, Cause.PREEMPTED, clean=True)
    version = stage.job(job).version
    for _ in range(3):
        assert stage.report(slice, attempt, exit=WELL).forget == (attempt,)
    (rejected,) = stage.events(attempt, "attempt.report_rejected")
    assert rejected.body == {"host": 0, "why": "the attempt is closed", "fence": 1}
    assert (stage.job(job).version, stage.attempt(attempt).cause) == (version, Cause.PREEMPTED)


def test_a_process_of_a_closed_attempt_is_killed(stage: Stage) -> None:
    _, attempt, slice = stage.started()
    stage.close(attempt)
    before = seq(stage)
    assert stage.report(slice, attempt, phase=Phase.RUNNING).kill == (attempt,)
    assert seq(stage) == before


def test_what_nobody_knows_is_killed_or_forgotten(stage: Stage) -> None:
    slice = stage.ready()
    running = Held(attempt="a-none", fence=1, phase=Phase.RUNNING)
    ended = Held(attempt="a-none", fence=1, phase=Phase.EXITED, exit=WELL)
    assert stage.sync(slice, 0, running).kill == ("a-none",)
    assert stage.sync(slice, 0, ended).forget == ("a-none",)


def test_a_report_with_another_fence_is_not_heard(stage: Stage) -> None:
    job, attempt, slice = stage.started()
    reply = stage.sync(slice, 0, Held(attempt=attempt, fence=9, phase=Phase.EXITED, exit=WELL))
    assert reply.forget == (attempt,)
    assert stage.job(job).state is JobState.RUNNING


def test_a_report_from_a_slice_that_does_not_hold_it_is_not_heard(stage: Stage) -> None:
    job, attempt, _ = stage.started()
    other = stage.ready()
    reply = stage.report(other, attempt, exit=WELL)
    assert reply.forget == (attempt,)
    assert stage.job(job).state is JobState.RUNNING


@pytest.mark.parametrize("closed", [False, True])
def test_an_exit_without_its_facts_ends_nothing(stage: Stage, closed: bool) -> None:
    """An agent that says "exited" and not how is broken; it must not break the server."""
    _, attempt, slice = stage.started()
    if closed:
        stage.close(attempt)
    before = seq(stage)
    assert stage.report(slice, attempt).forget == ((attempt,) if closed else ())
    assert seq(stage) == before


def test_a_success_after_a_cancel_is_refused(stage: Stage) -> None:
    job, attempt, slice = stage.started(outputs=("model",))
    stage.wait(stage.commands.cancel(job))
    stage.end(slice, attempt, outputs=("model",))
    assert (stage.attempt(attempt).cause, stage.job(job).state) == (Cause.CANCELLED, JobState.CANCELLED)
    assert stage.job(job).outputs == ()
    assert stage.slice(slice).usable


def test_a_success_after_its_fence_was_passed_is_refused(stage: Stage) -> None:
    job, attempt, slice = stage.started(outputs=("model",))
    stage.do(attempts.raise_fence, attempt)
    assert stage.report(slice, attempt, phase=Phase.RUNNING).kill == (attempt,)
    stage.end(slice, attempt, outputs=("model",))
    assert (stage.attempt(attempt).cause, stage.job(job).state) == (Cause.LOST, JobState.QUEUED)
    assert stage.job(job).outputs == ()


# --- outputs and progress ---
def test_declared_outputs_are_committed_with_the_success(stage: Stage) -> None:
    job, attempt, slice = stage.started(outputs=("model", "metrics"))
    stage.end(slice, attempt, outputs=("metrics", "model", "extra"))
    assert stage.job(job).state is JobState.SUCCEEDED
    assert stage.job(job).outputs == ("model", "metrics")
    committed = stage.events(job, "job.output_committed")
    assert [(event.body["name"], event.fence) for event in committed] == [("model", 1), ("metrics", 1)]


def test_missing_outputs_are_a_failure(stage: Stage) -> None:
    job, attempt, slice = stage.started(outputs=("model", "metrics"))
    stage.end(slice, attempt, outputs=("metrics",))
    assert stage.job(job).state is JobState.FAILED
    assert stage.attempt(attempt).evidence == ("declared outputs were not written: model",)
    assert not stage.events(job, "job.output_committed")


def test_open_work_only_shrinks(stage: Stage) -> None:
    job = stage.submit(replicas=Replicas(1, 2))
    first, second = stage.ready(), stage.ready()
    one, two = stage.start(job, first, 0), stage.start(job, second, 1)
    said = [(first, one, 10), (second, two, 8), (first, one, 9), (second, two, 8), (first, one, 0), (second, two, 3)]
    shown = []
    for slice, attempt, units in said:
        stage.report(slice, attempt, 0, Phase.RUNNING, open_units=units)
        shown.append(stage.job(job).open_units)
    assert shown == [10, 8, 8, 8, 0, 0]
    assert [event.body["open_units"] for event in stage.events(job, "job.progressed")] == [10, 8, 0]


def test_which_hosts_have_a_unit_in_hand_is_kept_and_news_only_when_it_changes(stage: Stage) -> None:
    job = stage.submit(accelerator="v5e-16", replicas=Replicas(1, 2))
    slice = stage.ready("big")
    attempt = stage.start(job, slice)
    shown = []
    for host, said in ((1, True), (0, None), (0, True), (0, True), (1, False), (1, None), (0, False)):
        stage.report(slice, attempt, host, Phase.RUNNING, open_units=3, holding=said)
        shown.append(stage.attempt(attempt).holding)
    assert shown == [(1,), (1,), (0, 1), (0, 1), (0,), (0,), ()]
    told = [(event.body["host"], event.body["holding"]) for event in stage.events(attempt, "attempt.progressed")]
    assert told == [(1, True), (0, True), (1, False), (0, False)]


# --- notice ---
def test_a_notice_drains_the_slice_and_lets_the_whole_gang_save(stage: Stage) -> None:
    job = stage.submit(accelerator="v5e-16", gang=2)
    first, second = stage.ready("big"), stage.ready("big")
    attempt = stage.place(job, first, second)
    for slice, host in itertools.product((first, second), range(4)):
        stage.report(slice, attempt, host, Phase.RUNNING)
    reply = stage.sync(first, 3, held(stage.attempt(attempt)), notice=True)
    assert reply.stop == (attempt,)
    assert (stage.slice(first).state, stage.slice(second).state) == (SliceState.DRAINING, SliceState.READY)
    assert stage.report(second, attempt, 0, Phase.RUNNING).stop == (attempt,)
    before = seq(stage)
    stage.sync(first, 2, held(stage.attempt(attempt)), notice=True)
    assert seq(stage) == before
    for slice, host in itertools.product((first, second), range(4)):
        stage.report(slice, attempt, host, exit=Exit(host=host, signal=15, agent="stopped", notice=True))
    assert (stage.attempt(attempt).cause, stage.job(job).state) == (Cause.PREEMPTED, JobState.QUEUED)
    at = "1970-01-12 13:46:40 UTC"
    assert stage.attempt(attempt).evidence == (f"slice {first} was preempted with notice at {at}",)


@pytest.mark.parametrize("outputs", [(), ("model",)])
def test_what_saves_and_exits_well_on_a_notice_was_preempted_unless_it_was_done(
    stage: Stage, outputs: tuple[str, ...]
) -> None:
    _, attempt, slice = stage.started(outputs=("model",))
    stage.sync(slice, 0, held(stage.attempt(attempt)), notice=True)
    stage.end(slice, attempt, outputs=outputs)
    closed = stage.attempt(attempt)
    assert closed.cause is (Cause.SUCCEEDED if outputs else Cause.PREEMPTED)
    assert any("was preempted with notice" in said for said in closed.evidence) is not bool(outputs)


def test_somebody_who_wants_another_slice_is_named_as_the_reason(stage: Stage) -> None:
    _, attempt, slice = stage.started()
    stage.do(slices.replace, slice, "ada wants another", True)
    stage.report(slice, attempt, exit=Exit(host=0, signal=15, agent="stopped"))
    assert stage.attempt(attempt).cause is Cause.PREEMPTED
    (said,) = stage.attempt(attempt).evidence
    assert said.startswith(f"slice {slice} was given up: ada wants another at ")


def test_a_notice_on_a_slice_that_drains_already_still_stops_the_work(stage: Stage) -> None:
    _, attempt, slice = stage.started()
    stage.do(slices.drain, slice, "its pool was made smaller")
    assert stage.sync(slice, 0, held(stage.attempt(attempt)), notice=True).stop == (attempt,)
    assert stage.slice(slice).why == "its pool was made smaller"
    assert stage.slice(slice).lost_at == stage.clock.now(), "whatever it was to become, the platform took it"


def test_a_notice_on_an_idle_slice_only_drains_it(stage: Stage) -> None:
    slice = stage.ready()
    assert stage.sync(slice, notice=True).welcome
    assert (stage.slice(slice).state, stage.slice(slice).idle_since) == (SliceState.DRAINING, None)


def test_work_that_was_retried_elsewhere_cannot_end_twice(stage: Stage) -> None:
    """A zombie of the first attempt ends well after the second has started: only the second counts."""
    job, first, old = stage.started(rule=Rule(), outputs=("model",))
    stage.close(first, Cause.LOST)
    new = stage.ready()
    second = stage.start(job, new)
    stage.report(old, first, exit=WELL, outputs=("model",))
    assert stage.job(job).state is JobState.RUNNING
    stage.end(new, second, outputs=("model",))
    (committed,) = stage.events(job, "job.output_committed")
    assert (committed.fence, committed.body["attempt"]) == (2, second)
