"""Each liveness rule of attempts, jobs and the loop holds in time and breaks when late."""

import pytest

from penstock.domain import limits
from penstock.domain.invariants import liveness
from tests.unit.domain.invariants.scribe import Scribe


@pytest.fixture
def run() -> Scribe:
    """A running job, after the faults have stopped."""
    scribe = Scribe()
    scribe.queue_created()
    scribe.slice("s1")
    scribe.job("j1", failures=1)
    scribe.placed("j1", "a1", "s1")
    scribe.started("a1")
    scribe.heal()
    return scribe


# --- L2 ---
def test_l2_preemption_closes_in_time(run: Scribe) -> None:
    run.world("vm.preempted", "s1", provider_id="vm-s1")
    run.wait(18.0)
    run.closed("a1", "preempted", clean=False)
    run.ticks(20)
    assert run.premises("L2") == 1


def test_l2_preemption_is_not_noticed(run: Scribe) -> None:
    run.world("vm.preempted", "s1", provider_id="vm-s1")
    run.ticks(20)
    run.closed("a1", "preempted", clean=False)
    run.ticks(20)
    assert run.broken("L2") == [f"not closed {liveness.LOST_CLOSES_S:.0f} s after vm.preempted of s1"]


@pytest.mark.parametrize(("after_s", "late"), [(40.0, False), (60.0, True)])
def test_l2_silence_closes_after_the_fence(run: Scribe, after_s: float, late: bool) -> None:
    run.world("agent.silent", "s1", host=0)
    run.wait(after_s)
    run.closed("a1", "lost", clean=False)
    run.ticks(20)
    assert bool(run.broken("L2")) is late
    assert run.check("L2").premises["L2"] == 1


def test_l2_silence_from_before_the_heal_counts_from_there() -> None:
    scribe = Scribe()
    scribe.slice("s1")
    scribe.job("j1")
    scribe.placed("j1", "a1", "s1")
    scribe.world("agent.silent", "s1", host=0)
    scribe.wait(1000.0)
    scribe.heal()
    scribe.ticks(20)
    assert len(scribe.broken("L2")) == 1


def test_l2_an_agent_that_comes_back_keeps_its_attempt(run: Scribe) -> None:
    run.world("agent.silent", "s1", host=0)
    run.wait(10.0)
    run.world("agent.heard", "s1", host=0)
    run.ticks(20)
    assert run.premises("L2") == 0


def test_l2_a_machine_deleted_by_somebody_else(run: Scribe) -> None:
    run.world("vm.deleted", "s1", provider_id="vm-s1")
    run.ticks(20)
    assert len(run.broken("L2")) == 1


# --- L3 ---
def test_l3_cancel_in_time(run: Scribe) -> None:
    run.cancelled("j1")
    run.wait(20.0)
    run.exited("a1", 15)
    run.closed("a1", "cancelled")
    run.commit("job.cancelled", "j1")
    run.ticks(20)
    assert run.premises("L3") == 1


def test_l3_process_outlives_its_grace(run: Scribe) -> None:
    run.cancelled("j1")
    run.wait(45.0)
    run.exited("a1", 9)
    run.closed("a1", "cancelled")
    run.commit("job.cancelled", "j1")
    run.ticks(20)
    assert run.broken("L3") == ["a process of a1 outlives its cancel by more than 40 s"]


def test_l3_a_silent_host_has_clocks_of_its_own(run: Scribe) -> None:
    run.world("agent.silent", "s1", host=0)
    run.cancelled("j1")
    run.wait(52.0)
    run.commit("job.cancelled", "j1")
    run.ticks(20)
    assert run.premises("L3") == 1


def test_l3_job_does_not_end(run: Scribe) -> None:
    run.cancelled("j1")
    run.exited("a1", 15)
    run.ticks(20)
    run.commit("job.cancelled", "j1")
    run.ticks(1)
    assert run.broken("L3") == ["not ended 60 s after its cancel"]


# --- L7 ---
def test_l7_a_spent_budget_ends_the_job(run: Scribe) -> None:
    run.requeued("a1", "user_error")
    run.placed("j1", "a2", "s1")
    run.closed("a2", "user_error")
    run.commit("job.failed", "j1")
    run.ticks(10)
    assert run.premises("L7") == 1


def test_l7_a_job_that_always_fails_goes_on(run: Scribe) -> None:
    run.requeued("a1", "user_error")
    run.placed("j1", "a2", "s1")
    run.requeued("a2", "oom")
    run.ticks(10)
    assert run.broken("L7") == ["goes on after its failure budget was spent"]


def test_l7_an_infeasible_job_ends(run: Scribe) -> None:
    run.job("j2")
    run.world("why", "j2", code="infeasible", as_of=run.t)
    run.wait(limits.INFEASIBLE_S)
    run.commit("job.failed", "j2")
    run.ticks(10)
    assert run.premises("L7") == 1


@pytest.mark.parametrize("asked_again", [True, False])
def test_l7_an_infeasible_job_stays(run: Scribe, asked_again: bool) -> None:
    run.job("j2")
    run.world("why", "j2", code="infeasible.chips", as_of=run.t)
    run.wait(limits.INFEASIBLE_S)
    run.ticks(10)
    if asked_again:
        run.world("why", "j2", code="infeasible.chips", as_of=run.t)
    assert len(run.broken("L7")) == 1


def test_l7_a_clock_that_was_ahead_prolongs_the_wait(run: Scribe) -> None:
    run.wait(600.0)
    run.job("j2")
    run.wait(-600.0)
    run.world("why", "j2", code="infeasible", as_of=run.t)
    run.wait(limits.INFEASIBLE_S + 500.0)
    run.commit("job.failed", "j2")
    run.ticks(1)
    assert run.premises("L7") == 1


def test_l7_a_pool_was_made_in_time(run: Scribe) -> None:
    run.job("j2")
    run.world("why", "j2", code="infeasible", as_of=run.t)
    run.wait(limits.INFEASIBLE_S - 100)
    run.world("why", "j2", code="provisioning", as_of=run.t)
    run.wait(500.0)
    run.ticks(1)
    assert run.broken("L7") == []


# --- L8 ---
def test_l8_the_plan_becomes_empty(run: Scribe) -> None:
    run.ticks(5, actions=2)
    run.ticks(100)
    assert run.premises("L8") == 1


def test_l8_a_history_that_ends_too_soon_says_nothing(run: Scribe) -> None:
    run.ticks(50, actions=1)
    assert run.premises("L8") == 0


def test_l8_idle_slices_may_still_be_let_go(run: Scribe) -> None:
    run.slice("s2")
    run.ticks(120)
    run.slice_deleted("s2")
    run.ticks(3)
    assert run.premises("L8") == 1


def test_l8_an_agent_that_falls_silent_with_its_machine_is_no_input(run: Scribe) -> None:
    run.slice("s2")
    run.ticks(4)
    run.slice_deleted("s2")
    run.world("agent.silent", "s2", host=0)
    run.ticks(1)
    assert run.premises("L8") == 1
    run.world("agent.silent", "s1", host=0)
    run.ticks(1)
    assert run.premises("L8") == 0


def test_l8_never_quiet(run: Scribe) -> None:
    for _ in range(50):
        run.ticks(2)
        run.ticks(1, actions=1)
    assert run.broken("L8") == ["still acting 100 ticks after the last input"]


def test_l8_flapping(run: Scribe) -> None:
    run.ticks(100)
    run.slice_intended("s2")
    run.slice_created("s2")
    assert run.broken("L8") == ["create was called after the plan had become empty"]


def test_l8_deleting_what_is_gone(run: Scribe) -> None:
    run.slice("s2")
    run.slice_deleted("s2")
    run.ticks(100)
    run.world("provider.call", "s2", verb="delete", outcome="ok")
    assert run.broken("L8") == ["delete was called after the plan had become empty"]


def test_l8_a_standby_says_nothing(run: Scribe) -> None:
    for _ in range(100):
        run.ticks(1, actions=1)
        run.world("tick", "c2", actions=0, epoch=0)
    assert len(run.broken("L8")) == 1


# --- L9 ---
def outage(scribe: Scribe, outcome: str, **answer: object) -> None:
    scribe.world("store.down")
    scribe.wait(30.0)
    scribe.call("read", outcome, job="j1", answer=answer)
    scribe.wait(30.0)
    scribe.world("store.up")


def test_l9_unavailable_then_back(run: Scribe) -> None:
    outage(run, "fail", error="unavailable")
    run.ticks(20)
    assert run.premises("L9") == 2


@pytest.mark.parametrize(
    ("outcome", "answer"), [("fail", {"error": "internal"}), ("ok", {"found": True, "version": 1, "state": "running"})]
)
def test_l9_another_answer_without_a_store(run: Scribe, outcome: str, answer: dict[str, object]) -> None:
    outage(run, outcome, **answer)
    run.ticks(20)
    assert len(run.broken("L9")) == 1


def test_l9_the_loop_does_not_resume(run: Scribe) -> None:
    outage(run, "fail", error="unavailable")
    run.wait(60.0)
    run.ticks(1)
    assert run.broken("L9") == ["no tick 10 s after the store was back"]


@pytest.mark.parametrize(
    ("kind", "subject", "body", "excused"),
    [
        ("controller.crashed", "c1", {}, True),
        ("fault", "P3", {"what": "controller stopped"}, True),
        ("fault", "P3", {"slice": "s1"}, False),
        ("fault", "C1", {}, False),
    ],
)
def test_l9_what_excuses_the_loop(run: Scribe, kind: str, subject: str, body: dict[str, object], excused: bool) -> None:
    run.world("store.down")
    run.wait(30.0)
    run.world("store.up")
    run.wait(1.0)
    run.world(kind, subject, **body)
    run.wait(60.0)
    run.ticks(1)
    assert bool(run.broken("L9")) is not excused


# --- L11, L12 ---
def test_l11_scale() -> None:
    scribe = Scribe()
    scribe.world("bench", "core", queued=1_000_000, tick_s=0.1, submit_p99_s=0.1, memory_bytes=900 << 20)
    scribe.world("bench", "core", queued=10_000, tick_s=5.0)
    assert scribe.premises("L11") == 1


@pytest.mark.parametrize(("name", "value"), [("tick_s", 1.5), ("submit_p99_s", 0.3), ("memory_bytes", 2 << 30)])
def test_l11_too_slow_or_large(name: str, value: float) -> None:
    scribe = Scribe()
    scribe.world("bench", "core", queued=1_000_000, **{name: value})
    assert len(scribe.broken("L11")) == 1


def test_l12_fresh_reasons(run: Scribe) -> None:
    run.wait(30.0)
    run.world("why", "j1", code="running", as_of=run.t - 10)
    assert run.premises("L12") == 1


@pytest.mark.parametrize("body", [{"code": "", "as_of": 50.0}, {"code": "quota", "as_of": 20.0}, {"code": "quota"}])
def test_l12_stale_or_missing_reasons(run: Scribe, body: dict[str, object]) -> None:
    run.wait(30.0)
    run.world("why", "j1", **body)
    assert len(run.broken("L12")) == 1


def test_l12_ended_and_new_jobs_need_none(run: Scribe) -> None:
    run.wait(30.0)
    run.succeeded("a1")
    run.world("why", "j1", code="")
    run.job("j2")
    run.world("why", "j2", code="")
    assert run.premises("L12") == 0
