"""Ages by one process's own steady clock: silence, absence, fences, stops, joins; and what a stall must not do."""

from __future__ import annotations

import pytest

from penstock.controller import attempts
from penstock.controller.witness import Evidence
from penstock.domain import limits
from penstock.ports.capacity import CREATING, READY
from tests.unit.controller.stage import Stage


@pytest.fixture
def evidence(stage: Stage) -> Evidence:
    return Evidence(stage.clock)


def take(stage: Stage, evidence: Evidence) -> object:
    stage.wait(stage.projection.catch_up())
    return evidence.take(stage.projection.snapshot, stage.clock.now())


def pass_time(stage: Stage, evidence: Evidence, seconds: float, *heard: str) -> None:
    """Tick by tick, as the loop does, hearing from one-host slices meanwhile."""
    while seconds > 0:
        step = min(limits.TICK_S, seconds)
        stage.clock.advance(step)
        seconds -= step
        for slice in heard:
            evidence.heard(slice, 0)
        take(stage, evidence)


def silent(stage: Stage, evidence: Evidence) -> dict[str, float]:
    stage.wait(stage.projection.catch_up())
    return evidence.take(stage.projection.snapshot, stage.clock.now()).silent


def test_nobody_is_suspected_before_we_have_listened_for_long_enough(stage: Stage, evidence: Evidence) -> None:
    stage.ready()
    pass_time(stage, evidence, limits.SILENCE_S - 1)
    assert silent(stage, evidence) == {}


def test_a_slice_is_as_silent_as_its_most_silent_host(stage: Stage, evidence: Evidence) -> None:
    big, small = stage.ready("big"), stage.ready()
    take(stage, evidence)
    pass_time(stage, evidence, 20, small)
    for host in range(3):
        evidence.heard(big, host)
    pass_time(stage, evidence, 5, small)
    assert silent(stage, evidence) == {big: 25.0}
    evidence.heard(big, 3)
    assert silent(stage, evidence) == {}


def test_a_slice_that_has_just_become_ready_was_not_silent_before(stage: Stage, evidence: Evidence) -> None:
    """A plan may see the commit of its last join before the one who committed it notes that the host was heard."""
    pass_time(stage, evidence, 600)
    slice = stage.ready()
    assert silent(stage, evidence) == {}
    pass_time(stage, evidence, limits.SILENCE_S)
    assert silent(stage, evidence) == {slice: limits.SILENCE_S}
    evidence.heard(slice, 0)
    assert silent(stage, evidence) == {}


def test_a_slice_that_never_was_ready_is_not_silent(stage: Stage, evidence: Evidence) -> None:
    stage.intend()
    pass_time(stage, evidence, 60)
    assert silent(stage, evidence) == {}


def test_our_own_stall_is_nobodys_silence(stage: Stage, evidence: Evidence) -> None:
    slice = stage.ready()
    evidence.heard(slice, 0)
    take(stage, evidence)
    stage.clock.advance(3600)
    assert silent(stage, evidence) == {}
    pass_time(stage, evidence, limits.SILENCE_S)
    assert silent(stage, evidence) == {slice: limits.SILENCE_S}


def test_a_jump_of_the_wall_clock_ages_nothing(stage: Stage, evidence: Evidence) -> None:
    slice = stage.ready()
    pass_time(stage, evidence, 10, slice)
    stage.clock.time += 86_400
    assert silent(stage, evidence) == {}


def test_listening_anew_forgives(stage: Stage, evidence: Evidence) -> None:
    stage.ready()
    pass_time(stage, evidence, 60)
    assert silent(stage, evidence)
    evidence.listen()
    assert silent(stage, evidence) == {}


def test_absence_is_the_time_between_two_listings_and_denial_needs_it(stage: Stage, evidence: Evidence) -> None:
    slice = stage.ready()
    evidence.absent(slice)
    evidence.asked(slice, exists=False)
    stage.clock.advance(10)
    evidence.absent(slice)
    stage.wait(stage.projection.catch_up())
    seen = evidence.take(stage.projection.snapshot, stage.clock.now())
    assert (seen.absent, seen.missing, seen.denied) == ({slice: 10.0}, {slice}, set())
    stage.clock.advance(limits.GONE_LISTINGS_APART_S - 10)
    evidence.absent(slice)
    seen = evidence.take(stage.projection.snapshot, stage.clock.now())
    assert (seen.absent[slice], seen.denied) == (limits.GONE_LISTINGS_APART_S, set())  # the get came too early
    evidence.asked(slice, exists=False)
    seen = evidence.take(stage.projection.snapshot, stage.clock.now())
    assert (seen.denied, seen.asked) == ({slice}, {slice: 0.0})


@pytest.mark.parametrize("how", ["listed", "got"])
def test_one_sighting_undoes_all_absence(stage: Stage, evidence: Evidence, how: str) -> None:
    slice = stage.ready()
    evidence.absent(slice)
    stage.clock.advance(100)
    evidence.absent(slice)
    evidence.asked(slice, exists=False)
    if how == "listed":
        evidence.present(slice)
    else:
        evidence.asked(slice, exists=True)
    stage.wait(stage.projection.catch_up())
    seen = evidence.take(stage.projection.snapshot, stage.clock.now())
    assert (seen.absent, seen.missing, seen.denied) == ({}, set(), set())


def test_a_get_without_an_answer_proves_nothing(stage: Stage, evidence: Evidence) -> None:
    slice = stage.ready()
    evidence.doubted(slice)
    stage.clock.advance(3)
    stage.wait(stage.projection.catch_up())
    seen = evidence.take(stage.projection.snapshot, stage.clock.now())
    assert (seen.asked, seen.missing) == ({slice: 3.0}, set())


def test_hosts_that_do_not_join_are_waited_for_from_when_the_provider_said_ready(
    stage: Stage, evidence: Evidence
) -> None:
    (slice,) = stage.intend("big")
    stage.see(slice, CREATING)
    pass_time(stage, evidence, 100)
    stage.see(slice, READY)
    stage.sync(slice, 0)
    take(stage, evidence)
    pass_time(stage, evidence, 30)
    assert evidence.take(stage.projection.snapshot, stage.clock.now()).unjoined == {slice: 30.0}
    for host in range(1, 4):
        stage.sync(slice, host)
    stage.wait(stage.projection.catch_up())
    assert evidence.take(stage.projection.snapshot, stage.clock.now()).unjoined == {}


def test_stops_and_fences_age_from_when_this_process_saw_them(stage: Stage, evidence: Evidence) -> None:
    _, attempt, _ = stage.started()
    stage.do(attempts.stop, attempt, "reclaimed")
    take(stage, evidence)
    evidence.fenced(attempt)
    pass_time(stage, evidence, 12)
    evidence.fenced(attempt)  # written again: the first time counts
    seen = evidence.take(stage.projection.snapshot, stage.clock.now())
    assert (seen.stopping, seen.fenced) == ({attempt: 12.0}, {attempt: 12.0})
    stage.close(attempt)
    stage.wait(stage.projection.catch_up())
    seen = evidence.take(stage.projection.snapshot, stage.clock.now())
    assert (seen.stopping, seen.fenced) == ({}, {})


def test_an_attempt_is_overdue_only_after_its_agent_had_its_grace(stage: Stage, evidence: Evidence) -> None:
    _, attempt, _ = stage.started(timeout_s=100)
    stage.clock.advance(100 + limits.GRACE_S + 2 * limits.TICK_S)
    stage.wait(stage.projection.catch_up())
    assert evidence.take(stage.projection.snapshot, stage.clock.now()).overdue == set()
    stage.clock.advance(1)
    assert evidence.take(stage.projection.snapshot, stage.clock.now()).overdue == {attempt}
    stage.do(attempts.stop, attempt, "timeout")
    stage.wait(stage.projection.catch_up())
    assert evidence.take(stage.projection.snapshot, stage.clock.now()).overdue == set()


def test_stamps_of_what_is_gone_are_forgotten(stage: Stage, evidence: Evidence) -> None:
    slice = stage.ready()
    evidence.deleted(slice)
    evidence.tried(slice)
    evidence.absent(slice)
    stage.drop(slice)
    evidence.asked(slice, exists=False)
    evidence.absent(slice)
    stage.wait(stage.projection.catch_up())
    seen = evidence.take(stage.projection.snapshot, stage.clock.now())
    assert (seen.absent, seen.asked, seen.deletes, seen.tried, seen.missing) == ({}, {}, {}, {}, set())


def test_calls_in_flight_and_a_dead_bucket_are_passed_on(stage: Stage, evidence: Evidence) -> None:
    evidence.busy.add("s1")
    evidence.objects_down = True
    stage.wait(stage.projection.catch_up())
    seen = evidence.take(stage.projection.snapshot, stage.clock.now())
    assert (seen.busy, seen.objects_down) == ({"s1"}, True)
