"""Each safety rule of jobs and attempts holds on a lawful history and breaks on an unlawful one."""

import pytest

from tests.unit.domain.invariants.scribe import Scribe


@pytest.fixture
def run() -> Scribe:
    """A job with one output on a slice, running."""
    scribe = Scribe()
    scribe.queue_created()
    scribe.slice("s1")
    scribe.slice("s2")
    scribe.job("j1", outputs=("model",), failures=1, losses=1)
    scribe.placed("j1", "a1", "s1")
    scribe.started("a1")
    return scribe


def test_s0_projection() -> None:
    scribe = Scribe()
    scribe.world("projection", "c1", equal=True)
    assert scribe.premises("S0") == 1
    scribe.world("projection", "c1", equal=False)
    assert scribe.broken("S0")


def test_s3_holds_over_a_whole_life(run: Scribe) -> None:
    run.succeeded("a1")
    run.slice_deleted("s1")
    assert run.premises("S3") == len(run.history.events)


def test_s3_illegal_transition(run: Scribe) -> None:
    run.commit("slice.gone", "s1")
    assert run.broken("S3") == ["slice.gone in state ready"]


def test_s3_skipped_version(run: Scribe) -> None:
    event = run.commit("job.edited", "j1")
    run.history.events[-1] = type(event)(
        seq=event.seq, at=0.0, kind=event.kind, entity="job", id="j1", version=event.version + 1, actor="test"
    )
    assert len(run.broken("S3")) == 1


def test_s3_versions_of_entities_without_a_table() -> None:
    scribe = Scribe()
    scribe.queue_created()
    scribe._versions["queue", "default"] = 0
    scribe.commit("queue.edited", "default", weight=2.0)
    assert scribe.broken("S3") == ["version 1 where 2 was due"]


def test_s4_an_ended_job_may_be_edited(run: Scribe) -> None:
    run.succeeded("a1")
    run.commit("job.edited", "j1", tags=[])
    assert run.premises("S4") == 1


@pytest.mark.parametrize("kind", ["job.requeued", "job.progressed", "job.output_committed", "job.failed"])
def test_s4_nothing_else_happens_to_an_ended_job(run: Scribe, kind: str) -> None:
    run.succeeded("a1")
    run.commit(kind, "j1")
    assert len(run.broken("S4")) == 1


def test_s4_late_report_revives(run: Scribe) -> None:
    run.succeeded("a1")
    run.placed("j1", "a2", "s2")
    assert any("attempt a2" in message for message in run.broken("S4"))


def test_s5_retry_after_close(run: Scribe) -> None:
    run.requeued("a1", "preempted")
    run.placed("j1", "a2", "s2")
    run.started("a2")
    assert run.premises("S5") == 1


def test_s5_retry_without_closing(run: Scribe) -> None:
    run.placed("j1", "a2", "s2")
    assert run.broken("S5") == ["a2 made while a1 lives"]


def test_s5_replicas_may_live_side_by_side(run: Scribe) -> None:
    run.placed("j1", "a2", "s2", replica=1)
    run.started("a2")
    assert run.broken("S5") == []


def test_s5_fence_not_raised_on_retry(run: Scribe) -> None:
    run.requeued("a1", "preempted")
    run._fences["j1"] = 0
    run.placed("j1", "a2", "s2")
    assert run.broken("S5") == ["a2 has fence 1, not above 1"]


def test_s5_fence_must_pass_the_one_raised_for_a_silent_attempt(run: Scribe) -> None:
    run.commit("attempt.fencing", "a1", fence=2)
    run.closed("a1", "lost", clean=False)
    run.placed("j1", "a2", "s2")
    assert run.broken("S5") == ["a2 has fence 2, not above 2"]


def test_s5_zombie_overlap(run: Scribe) -> None:
    run.closed("a1", "lost", clean=False)
    run.commit("job.requeued", "j1", replica=0, cause="lost", reason="")
    run.placed("j1", "a2", "s2")
    run.process("a2", "s2")
    assert run.broken("S5") == ["zombie overlap: a2 started while a process of a1 still runs"]


@pytest.mark.parametrize(
    ("subject", "body", "excused"),
    [
        ("P3", {"seconds": 60.0}, True),
        ("P3", {}, True),
        ("P3", {"seconds": 1.0}, False),
        ("N1", {"bucket": True}, True),
        ("N1", {"bucket": False}, False),
        ("N2", {}, False),
    ],
)
def test_s5_only_a_host_that_could_not_read_the_fence_is_excused(
    run: Scribe, subject: str, body: dict[str, object], excused: bool
) -> None:
    run.world("fault", subject, slice="s1", **body)
    run.wait(30.0)
    run.closed("a1", "lost", clean=False)
    run.placed("j1", "a2", "s2")
    run.process("a2", "s2")
    assert bool(run.broken("S5")) is not excused


def test_s5_a_process_ends_with_its_machine(run: Scribe) -> None:
    run.world("vm.preempted", "s1", provider_id="vm-s1")
    run.closed("a1", "preempted", clean=False)
    run.placed("j1", "a2", "s2")
    run.process("a2", "s2")
    assert run.premises("S5") == 1


def test_s6_output_under_the_newest_fence(run: Scribe) -> None:
    run.succeeded("a1")
    assert run.premises("S6") == 1


def test_s6_commit_without_fence(run: Scribe) -> None:
    run.stored("a1", "model")
    run.closed("a1", "lost", clean=False)
    run.placed("j1", "a2", "s2")
    run.output("a1", "model")
    assert run.broken("S6") == ["output 'model' committed with fence 1, newest is 2"]


@pytest.mark.parametrize("kind", ["attempt.fencing", "job.cancel_requested", "job.fence_raised"])
def test_s6_every_raise_shuts_out_the_old_fence(run: Scribe, kind: str) -> None:
    run.stored("a1", "model")
    run.commit(kind, "a1" if kind.startswith("attempt") else "j1", fence=2, replica=0)
    run.output("a1", "model")
    assert len(run.broken("S6")) == 1


def test_s6_the_raise_of_another_replica_does_not(run: Scribe) -> None:
    run.stored("a1", "model")
    run.placed("j1", "a2", "s2", replica=1)
    run.output("a1", "model")
    assert run.premises("S6") == 1


def test_s6_output_that_was_never_stored(run: Scribe) -> None:
    run.output("a1", "model")
    assert run.broken("S6") == ["output 'model' committed but jobs/j1/staging/1/model does not exist"]


def test_s6_output_that_was_deleted_before(run: Scribe) -> None:
    run.stored("a1", "model")
    run.world("object.deleted", "jobs/j1/staging/1/model")
    run.output("a1", "model")
    assert len(run.broken("S6")) == 1


def test_s6_output_of_an_unknown_attempt(run: Scribe) -> None:
    run.commit("job.output_committed", "j1", fence=1, name="model", attempt="a9")
    assert run.broken("S6") == ["output 'model' of unknown attempt 'a9'"]


def test_s6_writing_into_anothers_prefix(run: Scribe) -> None:
    run.world("object.put", "jobs/j1/staging/7/model", generation=1, checksum="c", writer="a1")
    assert run.broken("S6") == ["wrote jobs/j1/staging/7/model, outside its own prefix"]


def test_s8_success_with_outputs(run: Scribe) -> None:
    run.succeeded("a1")
    assert run.premises("S8") == 1


def test_s8_success_without_outputs(run: Scribe) -> None:
    run.closed("a1", "succeeded")
    run.commit("job.succeeded", "j1")
    assert run.broken("S8") == ["succeeded without output 'model' of its winning attempt"]


def test_s8_outputs_of_an_earlier_attempt_do_not_count(run: Scribe) -> None:
    run.stored("a1", "model")
    run.output("a1", "model")
    run.requeued("a1", "preempted")
    run.placed("j1", "a2", "s2")
    run.started("a2")
    run.closed("a2", "succeeded")
    run.commit("job.succeeded", "j1")
    assert len(run.broken("S8")) == 1


def test_s15_within_both_budgets(run: Scribe) -> None:
    run.requeued("a1", "preempted")
    run.placed("j1", "a2", "s2")
    run.requeued("a2", "user_error")
    run.placed("j1", "a3", "s2")
    run.succeeded("a3")
    assert run.premises("S15") == 2


@pytest.mark.parametrize("cause", ["user_error", "oom", "timeout", "lost", "infra"])
def test_s15_a_spent_budget_ends_the_chain(run: Scribe, cause: str) -> None:
    run.requeued("a1", cause)
    run.placed("j1", "a2", "s2")
    run.requeued("a2", cause)
    run.placed("j1", "a3", "s2")
    messages = run.broken("S15")
    assert len(messages) == 2
    assert any("went on after" in message for message in messages)
    assert any("requeued after" in message for message in messages)


def test_s15_too_many_attempts(run: Scribe) -> None:
    run.closed("a1", "user_error")
    run.placed("j1", "a2", "s2")
    run.closed("a2", "lost")
    for number in (3, 4):
        run.placed("j1", f"a{number}", "s2")
    assert any("4 attempts" in message for message in run.broken("S15"))


def test_s15_preemption_never_spends_the_failure_budget(run: Scribe) -> None:
    run.world("vm.preempted", "s1", provider_id="vm-s1")
    run.exited("a1", "vm_gone")
    run.closed("a1", "user_error")
    assert run.broken("S15") == ["closed as user_error, but only its machines went away"]


def test_s16_a_new_leader(run: Scribe) -> None:
    run.commit("leader.elected", "leader", epoch=2, holder="c2")
    run.commit("job.edited", "j1", epoch=2)
    run.commit("job.edited", "j1", epoch=0)
    assert run.premises("S16") == 1


def test_s16_effect_of_an_old_epoch(run: Scribe) -> None:
    run.commit("leader.elected", "leader", epoch=2, holder="c2")
    run.commit("job.edited", "j1", epoch=1)
    assert run.broken("S16") == ["job.edited of epoch 1 after 2"]


def test_s16_one_epoch_for_two_leaders(run: Scribe) -> None:
    run.commit("leader.elected", "leader", epoch=2, holder="c2")
    run.commit("leader.elected", "leader", epoch=2, holder="c1")
    assert run.broken("S16") == ["epoch 2 was given out twice"]
