"""Quota counters, leadership and its epochs, retention: on every store."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.domain.lifecycle import IllegalTransition
from penstock.domain.nouns import Job, Leader, Quota
from penstock.ports.store import Conflict, QuotaFull, Refused, StaleLeader, Transaction
from tests.contract.store.examples import a_job, an_attempt, close, fail, place, submit, submit_one
from tests.contract.store.harness import Harness


def set_limit(tx: Transaction, limit: int | None) -> Quota:
    found = tx.quota("team", "red")
    if found is None:
        return tx.add(Quota(scope="team", name="red", limit_chips=limit), "quota.set")
    return tx.save(replace(found, limit_chips=limit), "quota.set")


def used(on: Harness) -> int:
    quota: Quota | None = on.read(lambda r: r.quota("team", "red"))
    assert quota is not None
    return quota.used_chips


def test_a_reservation_past_the_limit_is_refused(on: Harness) -> None:
    on.transact(set_limit, 16)
    on.transact(lambda tx: tx.reserve("team", "red", 10))
    with pytest.raises(QuotaFull, match="10 of 16 chips used, 7 more asked") as full:
        on.transact(lambda tx: tx.reserve("team", "red", 7))
    assert (full.value.used, full.value.limit, full.value.asked) == (10, 16, 7)
    on.transact(lambda tx: tx.reserve("team", "red", 6))
    assert used(on) == 16


def test_a_verb_may_catch_a_full_quota_and_go_on(on: Harness) -> None:
    def verb(tx: Transaction) -> int:
        taken = 0
        for _ in range(5):
            try:
                tx.reserve("team", "red", 6)
                taken += 1
            except QuotaFull:
                continue
        return taken

    on.transact(set_limit, 16)
    assert on.transact(verb) == 2
    assert used(on) == 12


def test_a_lowered_limit_blocks_only_new_reservations(on: Harness) -> None:
    on.transact(set_limit, 16)
    on.transact(lambda tx: tx.reserve("team", "red", 16))
    on.transact(set_limit, 4)
    with pytest.raises(QuotaFull):
        on.transact(lambda tx: tx.reserve("team", "red", 1))
    on.transact(lambda tx: tx.reserve("team", "red", -4))
    on.transact(lambda tx: tx.reserve("team", "red", 0))
    with pytest.raises(QuotaFull):
        on.transact(lambda tx: tx.reserve("team", "red", 1))
    assert used(on) == 12


def test_a_limit_set_in_the_same_transaction_counts_at_once(on: Harness) -> None:
    def verb(tx: Transaction) -> None:
        tx.reserve("team", "red", 3)
        set_limit(tx, 4)
        tx.reserve("team", "red", 1)
        with pytest.raises(QuotaFull):
            tx.reserve("team", "red", 1)

    on.transact(verb)
    assert on.read(lambda r: r.quotas()) == [Quota(scope="team", name="red", limit_chips=4, used_chips=4, version=1)]


def test_an_unknown_counter_is_made_without_a_limit(on: Harness) -> None:
    on.transact(lambda tx: tx.reserve("pool", "new", 1000))
    assert on.read(lambda r: r.quota("pool", "new")) == Quota(scope="pool", name="new", used_chips=1000)
    assert on.read(lambda r: r.last_seq()) == 0


def test_changing_a_limit_never_touches_what_is_used(on: Harness) -> None:
    before = on.transact(set_limit, 16)
    on.transact(lambda tx: tx.reserve("team", "red", 5))
    # The writer read the counter before the reservation: its `used_chips` is old, its version is not.
    on.transact(lambda tx: tx.save(replace(before, limit_chips=99), "quota.set"))
    assert on.read(lambda r: r.quota("team", "red")) == Quota(
        scope="team", name="red", limit_chips=99, used_chips=5, version=2
    )


def test_the_first_leader_has_epoch_one_and_each_next_one_more(on: Harness) -> None:
    assert on.transact(lambda tx: tx.elect("a")) == Leader(epoch=1, holder="a", version=1)
    assert on.transact(lambda tx: tx.elect("b")) == Leader(epoch=2, holder="b", version=2)
    assert on.read(lambda r: r.leader()) == Leader(epoch=2, holder="b", version=2)
    events = on.read(lambda r: r.events_of("leader", "leader"))
    assert [(event.kind, event.epoch, event.version) for event in events] == [
        ("leader.elected", 1, 1),
        ("leader.elected", 2, 2),
    ]


def test_a_renewal_counts_without_an_event(on: Harness) -> None:
    on.transact(lambda tx: tx.elect("a"))
    for _ in range(3):
        on.transact(lambda tx: tx.renew(1))
    assert on.read(lambda r: r.leader()) == Leader(epoch=1, holder="a", version=1, renewed=3)
    assert on.read(lambda r: r.last_seq()) == 1
    on.transact(lambda tx: tx.elect("b"))
    with pytest.raises(StaleLeader):
        on.transact(lambda tx: tx.renew(1))
    assert on.read(lambda r: r.leader()) == Leader(epoch=2, holder="b", version=2)


def test_effects_commit_only_under_the_epoch_in_force(on: Harness) -> None:
    one = on.store.bound(actor="one", epoch=1)
    with pytest.raises(StaleLeader):
        on.run(one.transact(submit, a_job(1)))
    on.transact(lambda tx: tx.elect("one"))
    on.run(one.transact(submit, a_job(1)))
    on.transact(lambda tx: tx.elect("two"))
    with pytest.raises(StaleLeader):
        on.run(one.transact(submit, a_job(2)))
    with pytest.raises(StaleLeader):
        on.run(on.store.bound(actor="early", epoch=3).transact(submit, a_job(2)))
    on.run(on.store.bound(actor="two", epoch=2).transact(submit, a_job(2)))
    on.transact(submit, a_job(3))  # commands ask for no leadership
    stamps = [(event.actor, event.epoch) for event in on.read(lambda r: r.events(0, 9)) if event.entity == "job"]
    assert stamps == [("one", 1), ("two", 2), ("system", 0)]
    assert on.run(one.read(lambda r: len(r.events(0, 9)))) == 5  # a replaced leader may still look


def test_an_election_that_fails_changes_nothing(on: Harness) -> None:
    def verb(tx: Transaction) -> None:
        tx.elect("b")
        raise ZeroDivisionError

    on.transact(lambda tx: tx.elect("a"))
    with pytest.raises(ZeroDivisionError):
        on.transact(verb)
    on.run(on.store.bound(actor="a", epoch=1).transact(submit, a_job(1)))


def finished(tx: Transaction) -> Job:
    job, attempt = place(tx, submit_one(tx, a_job(1, key="k", after=("j0000",))), an_attempt(1))
    close(tx, attempt)
    return fail(tx, job)


def test_purging_takes_the_rows_and_leaves_the_event(on: Harness) -> None:
    job = on.transact(finished)
    on.transact(submit, a_job(2))
    on.transact(lambda tx: tx.purge(job))
    assert on.read(lambda r: (r.job("j0001"), r.job_by_key("red", "k"), r.attempts_of("j0001"))) == (None, None, [])
    assert on.read(lambda r: r.dependants("j0000")) == []
    last = on.read(lambda r: r.events_of("job", "j0001"))[-1]
    assert (last.kind, last.version) == ("job.purged", job.version + 1)
    assert on.read(lambda r: r.job("j0002")) is not None
    assert on.troubles() == []
    on.transact(submit, a_job(3, key="k"))  # the key is free again


def test_only_finished_jobs_are_purged(on: Harness) -> None:
    (job,) = on.transact(submit, a_job(1))
    with pytest.raises(IllegalTransition):
        on.transact(lambda tx: tx.purge(job))
    job, _ = on.transact(place, job, an_attempt(1))
    job = on.transact(fail, job)
    with pytest.raises(Refused):  # its attempt still lives
        on.transact(lambda tx: tx.purge(job))
    with pytest.raises(Conflict):
        on.transact(lambda tx: tx.purge(replace(job, version=1)))
    assert on.read(lambda r: r.job("j0001")) is not None


def test_forgotten_events_are_gone_but_the_newest_stays(on: Harness) -> None:
    on.transact(submit, *(a_job(n) for n in range(6)))
    assert on.transact(lambda tx: tx.forget_events(2)) == 2
    assert [event.seq for event in on.read(lambda r: r.events(0, 9))] == [3, 4, 5, 6]
    assert on.transact(lambda tx: tx.forget_events(99)) == 3
    assert on.read(lambda r: r.last_seq()) == 6
    on.transact(submit, a_job(7))
    assert [event.seq for event in on.read(lambda r: r.events(0, 9))] == [6, 7]
    assert on.troubles() == []
