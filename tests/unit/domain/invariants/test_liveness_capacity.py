"""Free capacity is used, nothing leaks, queues share: each rule holds in the clear case and breaks when it should."""

import pytest

from penstock.domain import limits
from penstock.domain.invariants import liveness_capacity
from tests.unit.domain.invariants.scribe import LABEL, Scribe


@pytest.fixture
def run() -> Scribe:
    scribe = Scribe()
    scribe.queue_created()
    scribe.slice("s1")
    scribe.heal()
    return scribe


def late(scribe: Scribe) -> bool:
    return bool(scribe.broken("L1"))


# --- L1 ---
def test_l1_placed_in_time(run: Scribe) -> None:
    run.job("j1")
    run.ticks(2)
    run.placed("j1", "a1", "s1")
    run.started("a1")
    run.job("j2")
    run.ticks(20)
    run.succeeded("a1")
    run.ticks(1)
    run.placed("j2", "a2", "s1")
    assert run.premises("L1") == 2


def test_l1_placed_too_late(run: Scribe) -> None:
    run.job("j1")
    run.ticks(5)
    run.placed("j1", "a1", "s1")
    assert run.broken("L1") == ["waited 25 s beside free slice s1"]


def test_l1_never_placed(run: Scribe) -> None:
    run.job("j1")
    run.ticks(5)
    assert late(run)


def test_l1_a_returning_job_after_preemption(run: Scribe) -> None:
    run.job("j1")
    run.placed("j1", "a1", "s1")
    run.started("a1")
    run.requeued("a1", "preempted")
    run.slice("s2")
    run.ticks(5)
    assert late(run)


def test_l1_a_gang_in_backoff_may_keep_slices(run: Scribe) -> None:
    run.slice("s2")
    run.job("j1", slices=2)
    run.placed("j1", "a1", "s1", "s2")
    run.started("a1")
    run.requeued("a1", "infra")
    run.job("j2")
    run.ticks(5)
    assert not late(run)


def test_l1_a_wakeup_that_was_lost(run: Scribe) -> None:
    run.job("j1", after=("j0",))
    run.ticks(10)
    assert run.premises("L1") == 0
    run.commit("job.unblocked", "j1", by="j0")
    run.ticks(10)
    assert late(run)


def test_l1_a_held_member_of_an_array_waits_for_nothing_until_it_is_released(run: Scribe) -> None:
    run.job("j1", array="red/sweep", at_most=1, held=True)
    run.ticks(10)
    assert run.premises("L1") == 0
    run.commit("job.released", "j1", array="red/sweep")
    run.ticks(10)
    assert late(run)


def test_l1_a_member_that_is_unblocked_into_a_full_array_is_excused(run: Scribe) -> None:
    run.job("j1", after=("j0",), array="red/sweep", at_most=1, held=False)
    run.commit("job.unblocked", "j1", by="j0", held=True)
    run.ticks(10)
    assert run.premises("L1") == 0
    run.commit("job.released", "j1", array="red/sweep")
    run.ticks(10)
    assert late(run)


@pytest.mark.parametrize("excuse", ["silent", "lost", "dirty", "draining", "other team", "other kind", "bound"])
def test_l1_slices_that_are_of_no_use(run: Scribe, excuse: str) -> None:
    match excuse:
        case "silent":
            run.world("agent.silent", "s1", host=0)
        case "lost":
            run.world("vm.preempted", "s1", provider_id="vm-s1")
        case "dirty":
            run.commit("slice.bound", "s1", attempt="a0")
            run.commit("slice.released", "s1", attempt="a0", clean=False)
        case "draining":
            run.commit("slice.draining", "s1", why="notice")
        case "bound":
            run.commit("slice.bound", "s1", attempt="a0")
        case _:
            assert excuse in ("other team", "other kind")
    if excuse == "other team":
        run.job("j1", team="blue")
    elif excuse == "other kind":
        run.job("j1")
        run.jobs["j1"]["accelerators"] = ["v4-8"]
        run.history.events[-1].body["accelerators"] = ["v4-8"]
    else:
        run.job("j1")
    run.ticks(10)
    assert run.premises("L1") == 0


@pytest.mark.parametrize("excuse", ["gang", "quota", "maintenance", "backoff", "wish"])
def test_l1_speaks_of_the_clear_case_only(run: Scribe, excuse: str) -> None:
    match excuse:
        case "gang":
            run.job("j0", slices=2)
        case "quota":
            run.commit("queue.edited", "default", quota_chips=0, borrow_chips=0)
        case "maintenance":
            run.commit("control.edited", "control", maintenance=True)
        case _:
            assert excuse in ("backoff", "wish")
    run.job("j1")
    if excuse == "backoff":
        run.placed("j1", "a1", "s1")
        run.requeued("a1", "lost")
    elif excuse == "wish":
        run.history.events[-1].body["pool"] = "elsewhere"
    run.ticks(10)
    assert not late(run)


def test_l1_a_window_too_long_to_see_all_of(run: Scribe) -> None:
    for number in range(limits.WINDOW_JOBS + 1):
        run.job(f"j{number:03}")
    run.ticks(10)
    assert not late(run)
    run.commit("job.cancelled", "j000")
    run.ticks(10)
    assert late(run)


def test_l1_silence_before_the_heal_is_no_premise() -> None:
    scribe = Scribe()
    scribe.slice("s1")
    scribe.job("j1")
    scribe.ticks(100)
    assert scribe.premises("L1") == 0


# --- L4 ---
def test_l4_everything_is_owned_or_deleted(run: Scribe) -> None:
    run.slice("s2")
    run.slice_deleted("s2")
    run.ticks(1)
    assert run.premises("L4") == 3


@pytest.mark.parametrize("deleted_in_time", [True, False])
def test_l4_an_orphan(run: Scribe, deleted_in_time: bool) -> None:
    run.world("vm.created", "x1", provider_id="vm-x1", zone="z1", label=LABEL, chips=8, provider="fake")
    run.wait(600.0)
    if deleted_in_time:
        run.world("vm.deleted", "x1", provider_id="vm-x1")
    run.wait(1000.0)
    run.ticks(1)
    assert bool(run.broken("L4")) is not deleted_in_time


def test_l4_somebody_elses_machine_is_left_alone(run: Scribe) -> None:
    run.world("vm.created", "x1", provider_id="vm-x1", zone="z1", label="somebody", chips=8, provider="fake")
    run.wait(5000.0)
    run.ticks(1)
    assert run.broken("L4") == []


def test_l4_name_dropped_without_tombstone(run: Scribe) -> None:
    run.slice_intended("s2")
    run.commit("slice.deleting", "s2", why="refused")
    run.commit("slice.gone", "s2", evidence=[])
    run.wait(30.0)
    run.slice_created("s2")
    run.wait(5000.0)
    run.ticks(1)
    assert len(run.broken("L4")) == 1


def test_l4_a_delete_that_is_never_done(run: Scribe) -> None:
    run.commit("slice.deleting", "s1", why="idle")
    run.wait(5000.0)
    run.ticks(1)
    assert len(run.broken("L4")) == 1


def test_l4_an_intent_that_nobody_settles(run: Scribe) -> None:
    run.slice_intended("s2")
    run.wait(liveness_capacity.INTENT_RESOLVED_S + 10)
    run.ticks(1)
    assert len(run.broken("L4")) == 1


# --- L6 ---
def shared(scribe: Scribe) -> None:
    """Two queues of equal weight, one slice between them; jobs wait in both."""
    scribe.queue_created("other")
    for number in range(20):
        scribe.job(f"j{number:02}", queue="default")
        scribe.job(f"k{number:02}", queue="other")


def turn(scribe: Scribe, job: str) -> None:
    scribe.placed(job, f"a-{job}", "s1")
    scribe.started(f"a-{job}")
    scribe.ticks(120)
    scribe.succeeded(f"a-{job}")


def test_l6_taking_turns(run: Scribe) -> None:
    shared(run)
    for number in range(5):
        turn(run, f"j{number:02}")
        turn(run, f"k{number:02}")
    assert run.premises("L6") == 9


def test_l6_one_queue_starves(run: Scribe) -> None:
    shared(run)
    for number in range(5):
        turn(run, f"j{number:02}")
    assert len(run.broken("L6")) == 3


def test_l6_weights_count(run: Scribe) -> None:
    run.commit("queue.edited", "default", team="red", weight=4.0, quota_chips=None, borrow_chips=None, band=0)
    shared(run)
    for number in range(5):
        turn(run, f"j{number:02}")
    assert run.premises("L6") == 4


@pytest.mark.parametrize("difference", ["band", "quota", "gang"])
def test_l6_compares_equals_only(run: Scribe, difference: str) -> None:
    shared(run)
    quota, band = (4 if difference == "quota" else None), (1 if difference == "band" else 0)
    run.commit("queue.edited", "other", team="red", weight=1.0, quota_chips=quota, borrow_chips=None, band=band)
    if difference == "gang":
        run.job("k99", queue="other", slices=2)
    for number in range(5):
        turn(run, f"j{number:02}")
    assert run.premises("L6") == 0


def test_l6_a_quota_that_leaves_room_is_no_excuse(run: Scribe) -> None:
    shared(run)
    run.commit("queue.edited", "other", team="red", weight=1.0, quota_chips=8, borrow_chips=0, band=0)
    for number in range(5):
        turn(run, f"j{number:02}")
    assert len(run.broken("L6")) == 3


def gang_waits(scribe: Scribe) -> None:
    """A gang of two waits; one slice is free, the other is taken for at most 600 s more."""
    scribe.slice("s2")
    scribe.job("j1")
    scribe.placed("j1", "a1", "s1", timeout_s=700.0)
    scribe.job("j2", slices=2)
    scribe.job("j3")
    scribe.ticks(20)


def test_l6_a_short_job_may_pass(run: Scribe) -> None:
    gang_waits(run)
    run.placed("j3", "a3", "s2", backfilled=True, timeout_s=500.0)
    assert run.premises("L6") == 1


def test_l6_backfill_delays_the_head(run: Scribe) -> None:
    gang_waits(run)
    run.placed("j3", "a3", "s2", backfilled=True, timeout_s=5000.0)
    assert run.broken("L6") == ["j3 was let past it and delays its start by 4400 s"]


def test_l6_backfill_on_a_slice_the_gang_does_not_need(run: Scribe) -> None:
    gang_waits(run)
    run.slice("s3")
    run.slice("s4", zone="z2")
    run.placed("j3", "a3", "s4", backfilled=True, timeout_s=5000.0)
    assert run.premises("L6") == 1


def test_l6_the_planner_may_believe_what_running_jobs_expect(run: Scribe) -> None:
    """At the shadow start three slices will be free by the word of their jobs: one of them is not needed."""
    run.slice("s2")
    run.slice("s3")
    run.job("j1")
    run.placed("j1", "a1", "s1", timeout_s=3000.0, expected_s=600.0)
    run.job("j0")
    run.placed("j0", "a0", "s3", timeout_s=600.0)
    run.job("j2", slices=2)
    run.job("j3")
    run.ticks(20)
    run.placed("j3", "a3", "s2", backfilled=True, timeout_s=5000.0)
    assert run.premises("L6") == 1
    assert not run.broken("L6")


def test_l6_a_pool_that_may_grow_makes_up_for_the_slice(run: Scribe) -> None:
    run.commit("pool.created", "p", team="red", max=3, limit_chips=24)
    gang_waits(run)
    run.placed("j3", "a3", "s2", backfilled=True, timeout_s=5000.0)
    assert run.premises("L6") == 1
    assert not run.broken("L6")


@pytest.mark.parametrize(("zone", "broken"), [("z1", 0), ("z2", 1)])
def test_l6_a_slice_on_its_way_makes_up_for_the_slice(run: Scribe, zone: str, broken: int) -> None:
    gang_waits(run)
    run.slice_intended("s3", zone=zone)
    run.placed("j3", "a3", "s2", backfilled=True, timeout_s=5000.0)
    assert len(run.broken("L6")) == broken


def test_l6_a_slice_that_was_given_up_makes_up_for_nothing(run: Scribe) -> None:
    gang_waits(run)
    run.slice_intended("s3")
    run.slice_deleted("s3")
    run.placed("j3", "a3", "s2", backfilled=True, timeout_s=5000.0)
    assert run.broken("L6") == ["j3 was let past it and delays its start by 4400 s"]


def test_l6_a_gang_that_was_put_behind_has_no_claim(run: Scribe) -> None:
    gang_waits(run)
    run.commit("job.edited", "j2", tags=[], queue="default", priority=-5)
    run.placed("j3", "a3", "s2", backfilled=True, timeout_s=5000.0)
    assert run.premises("L6") == 0


# --- budgets and reservations excuse ---
def test_l1_a_queue_with_a_budget_may_wait(run: Scribe) -> None:
    run.commit("queue.edited", "default", team="red", quota_chips=None, paused=False, budget="$1.00 per month")
    run.job("j1")
    run.ticks(9)
    assert not late(run)


def test_l1_a_reserved_slice_is_not_free_for_all(run: Scribe) -> None:
    run.commit("slice.reserved", "s1", user="ann", until=9e9, note="")
    run.job("j1")
    run.ticks(9)
    assert not late(run)


def test_l1_a_reserved_pool_is_not_free_for_all_and_others_are(run: Scribe) -> None:
    run.commit("pool.reserved", "p", user="ann", until=9e9, note="")
    run.slice("s2")
    run.job("j1")
    run.ticks(9)
    assert not late(run)
    run.slice("s3", pool="p2")
    run.ticks(9)
    assert late(run)
