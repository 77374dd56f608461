"""Each safety rule that clients can see holds on a lawful history and breaks on an unlawful one."""

import pytest

from penstock.domain import limits
from tests.unit.domain.invariants.scribe import Scribe


@pytest.fixture
def run() -> Scribe:
    scribe = Scribe()
    scribe.queue_created()
    scribe.slice("s1")
    scribe.job("j1", key="k1")
    return scribe


def test_s1_every_later_read_finds_it(run: Scribe) -> None:
    run.read("j1")
    run.read("j1", client="bob")
    assert run.premises("S1") == 2


def test_s1_a_read_that_does_not(run: Scribe) -> None:
    run.read("j1", client="bob", found=False)
    assert run.broken("S1") == ["bob read it and did not find it"]


def test_s1_a_read_that_began_before_the_answer_may_miss_it() -> None:
    scribe = Scribe()
    scribe.client("read.invoke", "bob", call=90, job="j1")
    scribe.job("j1")
    scribe.client("read.ok", "bob", call=90, job="j1", found=False, version=0, state="")
    assert scribe.broken("S1") == []


def test_s1_acknowledged_but_never_committed(run: Scribe) -> None:
    run.call("submit", "ok", key="k2", body_hash="h", team="red", answer={"job": "j2"})
    assert run.broken("S1") == ["submit was acknowledged but nothing had been committed"]


def test_s1_purged_after_its_retention(run: Scribe) -> None:
    run.commit("job.failed", "j1")
    run.wait(limits.RETENTION_S + 1)
    run.world("tick", "c1", actions=0, epoch=1)
    run.commit("job.purged", "j1")
    run.read("j1", found=False)
    assert run.premises("S1") == 1


def test_s1_purged_too_early(run: Scribe) -> None:
    run.commit("job.failed", "j1")
    run.wait(60.0)
    run.world("tick", "c1", actions=0, epoch=1)
    run.commit("job.purged", "j1")
    assert run.broken("S1") == ["purged before its retention was over"]


def test_s2_the_same_key_answers_the_same_job(run: Scribe) -> None:
    run.call("submit", "ok", key="k1", body_hash="h", team="red", answer={"job": "j1"})
    run.call("submit", "fail", key="k1", body_hash="other", team="red", answer={"error": "conflict"})
    run.call("submit", "unknown", key="k1", body_hash="h", team="red", answer={})
    run.job("j2", key="k1", team="blue")
    assert run.premises("S2") == 3


def test_s2_two_jobs_for_one_key(run: Scribe) -> None:
    run.commit("job.created", "j2", team="red", key="k1", body_hash="h")
    assert run.broken("S2") == ["key 'k1' had made job j1 already"]


def test_s2_two_answers_for_one_key(run: Scribe) -> None:
    run.call("submit", "ok", key="k1", body_hash="h", team="red", answer={"job": "j2"})
    assert run.broken("S2") == ["the same key was answered j1 at its creation"]


def test_s2_another_body_is_accepted(run: Scribe) -> None:
    run.call("submit", "ok", key="k1", body_hash="other", team="red", answer={"job": "j1"})
    assert run.broken("S2") == ["the same key with another body was accepted"]


def test_s2_an_answer_without_a_job(run: Scribe) -> None:
    run.call("submit", "ok", key="k9", body_hash="h", team="red", answer={"job": "j9"})
    assert run.broken("S2") == ["no job was created for key 'k9'"]


def test_s13_cancel_ends_it(run: Scribe) -> None:
    run.placed("j1", "a1", "s1")
    run.started("a1")
    run.cancelled("j1")
    run.exited("a1", 15)
    run.closed("a1", "cancelled")
    run.commit("job.cancelled", "j1")
    run.call("cancel", "ok", job="j1", answer={"answer": "already finished"})
    assert run.premises("S13") == 1


def test_s13_cancel_ignored_by_placement(run: Scribe) -> None:
    run.cancelled("j1")
    run.placed("j1", "a1", "s1")
    assert run.broken("S13") == ["attempt a1 made after the cancel"]


@pytest.mark.parametrize("kind", ["job.succeeded", "job.failed"])
def test_s13_another_end_after_the_cancel(run: Scribe, kind: str) -> None:
    run.cancelled("j1")
    run.commit(kind, "j1")
    assert run.broken("S13") == [f"{kind} although it was cancelled"]


def test_s13_cancel_of_a_finished_job(run: Scribe) -> None:
    run.commit("job.failed", "j1")
    run.commit("job.cancel_requested", "j1", fence=1)
    assert run.broken("S13") == ["a cancel was committed after the job had finished"]


def test_s13_acknowledged_but_never_committed(run: Scribe) -> None:
    run.call("cancel", "ok", job="j1", answer={"answer": "cancelled"})
    assert run.broken("S13") == ["a cancel was acknowledged but none had been committed"]


def test_s13_already_finished_is_a_lie(run: Scribe) -> None:
    run.call("cancel", "ok", job="j1", answer={"answer": "already finished"})
    assert run.broken("S13") == ["answered 'already finished' while the job was open"]


def test_s13_cancel_of_nothing(run: Scribe) -> None:
    run.call("cancel", "ok", job="j9", answer={"answer": "cancelled"})
    assert run.broken("S13") == ["a cancel of an unknown job was acknowledged"]


def test_s20_versions_rise(run: Scribe) -> None:
    run.read("j1")
    run.commit("job.edited", "j1")
    run.read("j1")
    run.read("j1", client="bob", version=1)
    run.cancelled("j1")
    run.read("j1")
    assert run.premises("S20") > 2


def test_s20_version_goes_back(run: Scribe) -> None:
    run.commit("job.edited", "j1")
    run.read("j1", client="bob")
    run.read("j1", client="bob", version=1)
    assert run.broken("S20") == ["bob read version 1 after 2"]


def test_s20_overlapping_reads_have_no_order(run: Scribe) -> None:
    run.client("read.invoke", "bob", call=90, job="j1")
    run.commit("job.edited", "j1")
    run.read("j1", client="bob")
    run.client("read.ok", "bob", call=90, job="j1", found=True, version=1, state="queued")
    assert run.broken("S20") == []


def test_s20_own_submit_is_not_seen(run: Scribe) -> None:
    run.read("j1", found=False)
    assert run.broken("S20") == ["ann does not see its own submit"]


def test_s20_own_cancel_is_not_seen(run: Scribe) -> None:
    run.cancelled("j1", client="bob")
    run.read("j1", client="bob", version=1)
    assert run.broken("S20") == ["bob does not see its own cancel"]
