"""What recovery does about each kind of trouble, and that it does nothing about anything else."""

from __future__ import annotations

import pytest

from penstock.domain import limits
from penstock.domain.endings import end_of
from penstock.domain.lifecycle import Cause, SliceState
from penstock.domain.nouns import Exit, StopOrder
from penstock.planner.actions import Action, Ask, Close, Fence, Finish, Release, Stop
from penstock.planner.recovery import AGENT_DEAD_S, CUSTODY_OVER_S, recover
from penstock.planner.slices import IDLE_SILENCE_S
from penstock.planner.snapshot import Snapshot, Witness
from tests.planner.live import (
    NOW,
    a_job,
    a_slice,
    add_running,
    add_slice,
    change_attempt,
    change_slice,
    world,
)

SILENCE = limits.SILENCE_S
WELL = Exit(host=0, code=0)
CRASHED = Exit(host=0, code=1, log_tail="Traceback (most recent call last):\nValueError: bad shape\n")
OOM = Exit(host=0, code=137, signal=9, oom_killed=True)
TOLD = Exit(host=1, code=143, signal=15, agent="stopped")


@pytest.fixture
def gang() -> Snapshot:
    """One attempt `x` on two slices."""
    snapshot = world()
    add_running(snapshot, "x", ("s1", "s2"))
    return snapshot


def only(snapshot: Snapshot) -> Action:
    actions = recover(snapshot, NOW)
    assert len(actions) == 1, actions
    return actions[0]


def closed(snapshot: Snapshot) -> tuple[Cause, bool]:
    """How `x` is closed; where something of it may still run, only after its fence was passed."""
    (action,) = [each for each in recover(snapshot, NOW) if isinstance(each, Close | Fence)]
    if isinstance(action, Fence):
        snapshot.witness.fenced["x"] = limits.FENCE_WAIT_S
        (action,) = [each for each in recover(snapshot, NOW) if isinstance(each, Close | Fence)]
    assert isinstance(action, Close)
    assert action.attempt == "x"
    assert action.evidence
    return action.cause, action.clean


def test_a_healthy_gang_is_left_alone(gang: Snapshot) -> None:
    add_slice(gang, "idle")
    gang.witness = Witness(silent={"s1": SILENCE - 0.1, "idle": IDLE_SILENCE_S}, absent={"s1": 59.0})
    assert recover(gang, NOW) == []


# --- broken slices ---
@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (SliceState.PREEMPTED, Cause.PREEMPTED),
        (SliceState.FAILED, Cause.INFRA),
        (SliceState.DELETING, Cause.INFRA),
        (SliceState.GONE, Cause.INFRA),
    ],
)
def test_an_attempt_on_a_broken_slice_closes(gang: Snapshot, state: SliceState, cause: Cause) -> None:
    change_slice(gang, "s2", state=state)
    assert only(gang) == Fence("x")  # the other slice may still run it
    assert closed(gang) == (cause, False)


@pytest.mark.parametrize(
    ("state", "at_once"),
    [
        (SliceState.PREEMPTED, True),
        (SliceState.GONE, True),
        (SliceState.FAILED, False),  # the provider's word says nothing about what still runs
        (SliceState.DELETING, False),
    ],
)
def test_only_a_machine_that_is_off_needs_no_fence(state: SliceState, at_once: bool) -> None:
    snapshot = world()
    add_running(snapshot, "x", ("s1",))
    change_slice(snapshot, "s1", state=state)
    assert isinstance(only(snapshot), Close if at_once else Fence)


def test_a_gang_whose_other_hosts_have_ended_needs_no_fence(gang: Snapshot) -> None:
    change_slice(gang, "s2", state=SliceState.PREEMPTED)
    hosts = gang.attempts["x"].hosts // 2
    change_attempt(gang, "x", exits=tuple(Exit(host=host, code=1) for host in range(hosts)))
    assert isinstance(only(gang), Close)


def test_a_preempted_slice_that_is_deleted_already_still_counts_as_preempted(gang: Snapshot) -> None:
    change_slice(gang, "s2", state=SliceState.DELETING, provider_state="PREEMPTED")
    assert closed(gang) == (Cause.PREEMPTED, False)


def test_a_machine_replaced_under_the_same_name_breaks_the_attempt(gang: Snapshot) -> None:
    change_slice(gang, "s1", provider_id="vm-other")
    assert closed(gang) == (Cause.INFRA, False)


def test_a_draining_slice_still_serves(gang: Snapshot) -> None:
    change_slice(gang, "s1", state=SliceState.DRAINING)
    assert recover(gang, NOW) == []


def test_the_order_in_which_a_snapshot_is_filled_does_not_matter() -> None:
    snapshot = world()
    running = add_running(snapshot, "x", ("s1", "s2"))
    other = world()
    other.put_attempt(running)
    assert "x" in other.bereft
    other.put_slice(a_slice("s2", attempt="x"))
    other.put_slice(a_slice("s1", attempt="x"))
    assert other.bereft == snapshot.bereft == {}


def test_a_closed_attempt_is_forgotten_by_all_indexes(gang: Snapshot) -> None:
    change_slice(gang, "s1", state=SliceState.FAILED)
    change_attempt(gang, "x", state="closed")
    assert (gang.bereft, gang.holders, recover(gang, NOW)) == ({}, {}, [])


def test_trouble_of_a_cancelled_job_closes_it_as_cancelled(gang: Snapshot) -> None:
    gang.put_job(a_job("job-x", cancel_at=NOW))
    change_slice(gang, "s1", state=SliceState.PREEMPTED)
    assert closed(gang) == (Cause.CANCELLED, False)


# --- vanished slices ---
def test_a_held_slice_absent_from_listings_is_asked_about(gang: Snapshot) -> None:
    gang.witness = Witness(absent={"s1": 60.0})
    assert recover(gang, NOW) == [Ask("s1", "absent from listings")]


@pytest.mark.parametrize(("spot", "cause"), [(True, Cause.PREEMPTED), (False, Cause.INFRA)])
def test_a_held_slice_that_vanished_closes_its_attempt(gang: Snapshot, spot: bool, cause: Cause) -> None:
    change_slice(gang, "s1", spot=spot)
    gang.witness = Witness(absent={"s1": 60.0}, denied={"s1"})
    assert closed(gang) == (cause, False)


def test_one_get_that_denies_proves_nothing_while_the_agent_is_heard(gang: Snapshot) -> None:
    gang.witness = Witness(missing={"s1"}, absent={"s1": 10.0})
    assert recover(gang, NOW) == []


def test_silence_and_one_get_that_denies_close_the_attempt(gang: Snapshot) -> None:
    gang.witness = Witness(silent={"s1": SILENCE}, missing={"s1"})
    assert closed(gang) == (Cause.INFRA, False)


# --- silence ---
def test_a_silent_slice_is_asked_about_and_its_attempt_fenced(gang: Snapshot) -> None:
    gang.witness = Witness(silent={"s1": SILENCE})
    assert recover(gang, NOW) == [Fence("x"), Ask("s1", "silent for 15 s")]


@pytest.mark.parametrize(("asked", "busy"), [({"s1": 4.9}, set[str]()), (dict[str, float](), {"s1"})])
def test_a_silent_slice_is_not_asked_about_too_often(gang: Snapshot, asked: dict[str, float], busy: set[str]) -> None:
    gang.witness = Witness(silent={"s1": SILENCE}, asked=asked, busy=busy)
    assert recover(gang, NOW) == [Fence("x")]


def test_a_fenced_attempt_waits_until_no_zombie_can_believe(gang: Snapshot) -> None:
    change_attempt(gang, "x", fencing_at=NOW - 5.0)
    gang.witness = Witness(silent={"s1": 30.0}, asked={"s1": 1.0}, fenced={"x": limits.FENCE_WAIT_S - 0.1})
    assert recover(gang, NOW) == []
    gang.witness.fenced["x"] = limits.FENCE_WAIT_S
    assert closed(gang) == (Cause.LOST, False)


def test_who_was_silent_and_what_their_provider_said_meanwhile_is_the_evidence(gang: Snapshot) -> None:
    change_attempt(gang, "x", fencing_at=NOW - 5.0)
    change_slice(gang, "s1", provider_state="READY")
    gang.witness = Witness(silent={"s1": 30.4, "s2": 3.0}, asked={"s1": 1.0}, fenced={"x": limits.FENCE_WAIT_S})
    (close,) = recover(gang, NOW)
    assert isinstance(close, Close)
    assert close.evidence[0] == "slice s1 was silent for 30 s while its provider said READY"
    assert len(close.evidence) == 2
    gang.witness.silent.clear()
    (close,) = recover(gang, NOW)
    assert isinstance(close, Close)
    assert close.evidence[0] == "silent until its fence was passed"


def test_a_fenced_attempt_that_is_heard_again_closes_all_the_same(gang: Snapshot) -> None:
    change_attempt(gang, "x", fencing_at=NOW - 5.0)
    gang.witness = Witness(fenced={"x": limits.FENCE_WAIT_S})
    assert closed(gang) == (Cause.LOST, False)


def test_a_fence_that_was_not_seen_written_is_written_again(gang: Snapshot) -> None:
    change_attempt(gang, "x", fencing_at=NOW - 500.0, fenced_at=NOW - 499.0)
    assert recover(gang, NOW) == [Fence("x")]


@pytest.mark.parametrize(("second", "closes"), [(0.0, True), (CUSTODY_OVER_S, True), (100.0, False)])
def test_without_a_bucket_all_silent_hosts_must_be_out_of_custody(gang: Snapshot, second: float, closes: bool) -> None:
    change_attempt(gang, "x", fencing_at=NOW - 5.0)
    asked = {"s1": 0.0, "s2": 0.0}
    gang.witness = Witness(silent={"s1": CUSTODY_OVER_S, "s2": second}, asked=asked, objects_down=True)
    if closes:
        assert closed(gang) == (Cause.LOST, False)
    else:
        assert recover(gang, NOW) == [Fence("x")]


def test_long_silence_alone_closes_nothing_while_the_bucket_works(gang: Snapshot) -> None:
    change_attempt(gang, "x", fencing_at=NOW - 5.0)
    gang.witness = Witness(silent={"s1": CUSTODY_OVER_S}, asked={"s1": 0.0}, fenced={"x": 1.0})
    assert recover(gang, NOW) == []


def test_a_stop_order_explains_a_fenced_attempt(gang: Snapshot) -> None:
    change_attempt(gang, "x", fencing_at=NOW, stop=StopOrder("timeout", NOW))
    gang.witness = Witness(fenced={"x": 20.0})
    assert closed(gang) == (Cause.TIMEOUT, False)


def test_a_peer_that_crashed_is_not_blamed_for_a_silent_host(gang: Snapshot) -> None:
    change_attempt(gang, "x", fencing_at=NOW, exits=(CRASHED,), stop=StopOrder("gang", NOW))
    gang.witness = Witness(silent={"s2": 60.0}, asked={"s2": 0.0}, fenced={"x": 20.0})
    assert closed(gang) == (Cause.LOST, False)


# --- silent slices nobody uses ---
@pytest.mark.parametrize(
    ("silent", "missing", "expected"),
    [
        (IDLE_SILENCE_S, False, []),
        (IDLE_SILENCE_S + 1, False, [Ask("s", "silent for 46 s")]),
        (IDLE_SILENCE_S + 1, True, [Release("s", "silent, and the provider knows nothing of it", vanished=True)]),
        (AGENT_DEAD_S + 1, False, [Release("s", "its agents have been silent for 121 s")]),
    ],
)
def test_an_idle_silent_slice(silent: float, missing: bool, expected: list[Action]) -> None:
    snapshot = world()
    add_slice(snapshot, "s")
    snapshot.witness = Witness(silent={"s": silent}, missing={"s"} if missing else set())
    assert recover(snapshot, NOW) == expected


@pytest.mark.parametrize("changes", [{"state": SliceState.DELETING}, {"dirty": True}, {"state": SliceState.DRAINING}])
def test_a_silent_slice_that_leaves_anyway_is_not_recovered(changes: dict[str, object]) -> None:
    snapshot = world()
    add_slice(snapshot, "s", **changes)
    snapshot.witness = Witness(silent={"s": 1000.0})
    assert recover(snapshot, NOW) == []


# --- exits ---
def test_the_first_failure_stops_the_gang(gang: Snapshot) -> None:
    change_attempt(gang, "x", exits=(CRASHED,))
    assert recover(gang, NOW) == [Stop("x", "gang")]


def test_hosts_that_ended_well_are_waited_for(gang: Snapshot) -> None:
    change_attempt(gang, "x", exits=(WELL,))
    assert recover(gang, NOW) == []


def test_a_stopped_gang_gets_its_grace_and_then_the_cause_of_its_first_failure(gang: Snapshot) -> None:
    change_attempt(gang, "x", exits=(OOM,), stop=StopOrder("gang", NOW))
    gang.witness = Witness(stopping={"x": limits.GRACE_S + limits.TICK_S - 0.1})
    assert recover(gang, NOW) == []
    gang.witness.stopping["x"] = limits.GRACE_S + limits.TICK_S
    assert closed(gang) == (Cause.OOM, False)


def test_all_exits_close_cleanly_after_a_crash_of_ours(gang: Snapshot) -> None:
    change_attempt(gang, "x", exits=(CRASHED, TOLD), stop=StopOrder("gang", NOW))
    assert closed(gang) == (Cause.USER_ERROR, True)


def test_two_reports_of_one_host_are_not_all_hosts(gang: Snapshot) -> None:
    change_attempt(gang, "x", exits=(WELL, WELL))
    assert recover(gang, NOW) == []


@pytest.mark.parametrize(
    ("exits", "why", "fenced", "cancelled", "cause"),
    [
        ((WELL, Exit(host=1, code=0)), None, False, False, Cause.SUCCEEDED),
        ((WELL, Exit(host=1, code=0)), None, False, True, Cause.CANCELLED),
        ((WELL, Exit(host=1, code=0)), None, True, False, Cause.LOST),
        # A program that saves and leaves with 0 when told to stop has not finished.
        ((WELL, Exit(host=1, code=0)), "reclaimed", False, False, Cause.PREEMPTED),
        ((WELL, Exit(host=1, code=0)), "gang", False, False, Cause.SUCCEEDED),
        ((WELL, TOLD), "reclaimed", False, False, Cause.PREEMPTED),
        ((WELL, TOLD), "replica", False, False, Cause.PREEMPTED),
        ((WELL, TOLD), "drained", False, False, Cause.PREEMPTED),
        ((WELL, TOLD), "timeout", False, False, Cause.TIMEOUT),
        ((WELL, TOLD), None, False, False, Cause.LOST),
        ((OOM, TOLD), "gang", False, False, Cause.OOM),
        ((CRASHED, Exit(host=1, code=137, signal=9, agent="stopped")), "gang", False, False, Cause.USER_ERROR),
    ],
)
def test_the_cause_of_an_end(
    exits: tuple[Exit, ...], why: str | None, fenced: bool, cancelled: bool, cause: Cause
) -> None:
    stop = None if why is None else StopOrder(why, NOW)
    attempt = add_running(world(), "x", ("s1", "s2"), exits=exits, stop=stop, fencing_at=NOW if fenced else None)
    assert end_of(attempt, cancelled)[0] is cause


def test_an_end_with_its_outputs_is_an_end_though_it_was_told_to_stop() -> None:
    exits = (WELL, Exit(host=1, code=0))
    stop = StopOrder("reclaimed", NOW)
    attempt = add_running(world(), "x", ("s1", "s2"), exits=exits, stop=stop, outputs=("model",))
    assert end_of(attempt, cancelled=False, outputs=("model",))[0] is Cause.SUCCEEDED
    assert end_of(attempt, cancelled=False, outputs=("model", "metrics"))[0] is Cause.PREEMPTED


def test_an_echo_is_not_the_cause() -> None:
    echo = Exit(host=0, code=1, log_tail="UNAVAILABLE: coordination service: task 1 disconnected; failed to connect\n")
    attempt = add_running(world(), "x", ("s1", "s2"), exits=(echo, Exit(host=1, oom_killed=True, code=137, signal=9)))
    assert end_of(attempt, cancelled=False)[0] is Cause.OOM


# --- stop orders ---
@pytest.mark.parametrize(
    ("why", "deadline", "cause"),
    [
        ("cancelled", limits.CANCEL_DEADLINE_S, Cause.CANCELLED),
        ("reclaimed", limits.GRACE_S + 2 * limits.TICK_S, Cause.PREEMPTED),
        ("drained", limits.GRACE_S + 2 * limits.TICK_S, Cause.PREEMPTED),
        ("replica", limits.GRACE_S + 2 * limits.TICK_S, Cause.PREEMPTED),
        ("timeout", limits.GRACE_S + 2 * limits.TICK_S, Cause.TIMEOUT),
    ],
)
def test_a_stopped_attempt_closes_when_its_deadline_is_over(
    gang: Snapshot, why: str, deadline: float, cause: Cause
) -> None:
    change_attempt(gang, "x", stop=StopOrder(why, NOW))
    gang.witness = Witness(stopping={"x": deadline - 0.1})
    assert recover(gang, NOW) == []
    gang.witness.stopping["x"] = deadline
    assert closed(gang) == (cause, False)


def test_a_stop_order_just_seen_by_a_new_leader_starts_its_wait(gang: Snapshot) -> None:
    change_attempt(gang, "x", stop=StopOrder("reclaimed", NOW - 1000.0))
    assert recover(gang, NOW) == []


def test_a_cancel_keeps_its_deadline_across_restarts(gang: Snapshot) -> None:
    gang.put_job(a_job("job-x", cancel_at=NOW - 60.0))
    change_attempt(gang, "x", stop=StopOrder("cancelled", NOW - limits.CANCEL_DEADLINE_S))
    assert closed(gang) == (Cause.CANCELLED, False)


def test_a_stopped_attempt_with_a_silent_host_is_fenced_before_it_closes(gang: Snapshot) -> None:
    change_attempt(gang, "x", stop=StopOrder("reclaimed", NOW - 100.0))
    gang.witness = Witness(stopping={"x": 100.0}, silent={"s2": 50.0}, asked={"s2": 1.0})
    assert recover(gang, NOW) == [Fence("x")]


def test_a_cancelled_attempt_with_a_silent_host_closes_in_time(gang: Snapshot) -> None:
    change_attempt(gang, "x", stop=StopOrder("cancelled", NOW))
    gang.witness = Witness(stopping={"x": 50.0}, silent={"s2": 50.0})
    assert closed(gang) == (Cause.CANCELLED, False)


def test_an_overdue_attempt_is_stopped_once(gang: Snapshot) -> None:
    gang.witness = Witness(overdue={"x", "closed-long-ago"})
    assert recover(gang, NOW) == [Stop("x", "timeout")]
    change_attempt(gang, "x", stop=StopOrder("timeout", NOW))
    assert recover(gang, NOW) == []


# --- cancelled jobs ---
@pytest.mark.parametrize("why", [None, "reclaimed", "gang"])
def test_the_attempts_of_a_cancelled_job_are_stopped(gang: Snapshot, why: str | None) -> None:
    gang.put_job(a_job("job-x", cancel_at=NOW))
    change_attempt(gang, "x", stop=None if why is None else StopOrder(why, NOW))
    assert recover(gang, NOW) == [Stop("x", "cancelled")]


def test_a_cancelled_job_that_is_stopping_is_waited_for(gang: Snapshot) -> None:
    gang.put_job(a_job("job-x", cancel_at=NOW))
    change_attempt(gang, "x", stop=StopOrder("cancelled", NOW))
    assert recover(gang, NOW) == []


def test_a_cancelled_job_without_attempts_finishes() -> None:
    snapshot = world()
    snapshot.put_job(a_job("j", cancel_at=NOW))
    assert recover(snapshot, NOW) == [Finish(job="j", cancelled=True, reason="cancelled")]


def test_actions_come_by_kind_and_id() -> None:
    snapshot = world()
    for name in ("c", "a", "b"):
        add_running(snapshot, name, (f"s{name}",))
        change_slice(snapshot, f"s{name}", state=SliceState.PREEMPTED)
        snapshot.put_job(a_job(f"gone-{name}", cancel_at=NOW))
    seen = [
        action.attempt if isinstance(action, Close) else action.job
        for action in recover(snapshot, NOW)
        if isinstance(action, Close | Finish)
    ]
    assert seen == ["a", "b", "c", "gone-a", "gone-b", "gone-c"]
