"""Compare-and-set, life cycles, and what the database itself refuses, on every store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.domain.lifecycle import AttemptState, IllegalTransition, JobState, SliceState
from penstock.domain.nouns import Control, Job, Leader, Quota
from penstock.ports.store import Conflict, Refused, Transaction
from tests.contract.store.examples import (
    a_job,
    a_pool,
    a_queue,
    a_slice,
    a_team,
    a_zone,
    an_attempt,
    close,
    fail,
    place,
    submit,
    submit_one,
)
from tests.contract.store.harness import Harness

EVERY_NOUN: list[tuple[Any, str, str]] = [
    (a_job(1), "job.created", "job.edited"),
    (an_attempt(1), "attempt.created", "attempt.reported"),
    (a_slice(1), "slice.intended", "slice.observed"),
    (a_pool(), "pool.created", "pool.resized"),
    (a_queue(), "queue.created", "queue.updated"),
    (a_team(), "team.created", "team.updated"),
    (a_zone(), "zone.seen", "zone.learned"),
    (Quota(scope="team", name="red", limit_chips=8), "quota.set", "quota.set"),
    (Leader(epoch=1, holder="me"), "leader.elected", "leader.elected"),
]
BY_NOUN = pytest.mark.parametrize(("noun", "created", "changed"), EVERY_NOUN, ids=lambda value: type(value).__name__)


@BY_NOUN
def test_each_add_and_save_raises_the_version_and_logs_it(on: Harness, noun: Any, created: str, changed: str) -> None:
    def verb(tx: Transaction) -> list[int]:
        one = tx.add(noun, created, fence=3, body={"why": "test"})
        two = tx.save(one, changed)
        return [one.version, two.version]

    assert on.transact(verb) == [1, 2]
    first, second = on.read(lambda r: r.events(0, 9))
    assert (first.kind, first.version, first.fence, first.body) == (created, 1, 3, {"why": "test"})
    assert (second.kind, second.version, second.fence, second.body) == (changed, 2, 0, {})
    assert first.entity == second.entity == type(noun).__name__.lower()
    assert first.id == second.id == getattr(noun, "id", None) or getattr(noun, "name", None)
    assert on.read(lambda r: r.events_of(first.entity, first.id)) == [first, second]


@BY_NOUN
def test_a_stale_version_conflicts_and_writes_nothing(on: Harness, noun: Any, created: str, changed: str) -> None:
    one = on.transact(lambda tx: tx.add(noun, created))
    on.transact(lambda tx: tx.save(one, changed))
    for stale in (one, replace(one, version=7)):
        with pytest.raises(Conflict, match="version 2"):
            on.transact(lambda tx, it: tx.save(it, changed), stale)
    assert on.read(lambda r: r.last_seq()) == 2


@BY_NOUN
def test_saving_what_does_not_exist_conflicts(on: Harness, noun: Any, created: str, changed: str) -> None:
    with pytest.raises(Conflict, match="does not exist"):
        on.transact(lambda tx: tx.save(replace(noun, version=1), changed))


@BY_NOUN
def test_a_duplicate_is_refused(on: Harness, noun: Any, created: str, changed: str) -> None:
    on.transact(lambda tx: tx.add(noun, created))
    with pytest.raises(Refused):
        on.transact(lambda tx: tx.add(noun, created))
    assert on.read(lambda r: r.last_seq()) == 1


def test_the_switch_exists_from_the_start(on: Harness) -> None:
    changed = on.transact(lambda tx: tx.save(Control(maintenance=True), "control.changed"))
    assert changed == Control(version=1, maintenance=True)
    with pytest.raises(Conflict):
        on.transact(lambda tx: tx.save(Control(maintenance=False), "control.changed"))
    with pytest.raises(Refused):
        on.transact(lambda tx: tx.add(Control(), "control.created"))


def test_a_second_stale_save_in_one_transaction_conflicts(on: Harness) -> None:
    def verb(tx: Transaction) -> None:
        (job,) = tx.jobs(["j0001"])
        tx.save(replace(job, priority=1), "job.edited")
        tx.save(replace(job, priority=2), "job.edited")

    on.transact(submit, a_job(1))
    with pytest.raises(Conflict):
        on.transact(verb)
    assert on.read(lambda r: r.jobs(["j0001"]))[0].version == 1


def test_a_verb_may_catch_a_conflict_and_go_on(on: Harness) -> None:
    def verb(tx: Transaction) -> list[str]:
        outcome = []
        for number, version in ((1, 1), (2, 9), (3, 1)):
            try:
                tx.save(replace(a_job(number), version=version, priority=7), "job.edited")
                outcome.append("saved")
            except Conflict:
                outcome.append("conflict")
        return outcome

    on.transact(submit, a_job(1), a_job(2), a_job(3))
    assert on.transact(verb) == ["saved", "conflict", "saved"]
    assert [job.priority for job in on.read(lambda r: r.jobs(["j0001", "j0002", "j0003"]))] == [7, 0, 7]


def test_a_verb_cannot_catch_a_refusal_and_go_on(on: Harness) -> None:
    def verb(tx: Transaction) -> None:
        try:
            submit(tx, a_job(1))
            tx.jobs(["j0001"])
        except Refused:
            return
        raise AssertionError("the duplicate was taken")

    on.transact(submit, a_job(1))
    with pytest.raises(Refused):
        on.transact(verb)
    assert on.read(lambda r: r.last_seq()) == 1


def test_a_failed_verb_leaves_nothing(on: Harness) -> None:
    def verb(tx: Transaction) -> None:
        submit(tx, a_job(1))
        tx.reserve("team", "red", 8)
        tx.jobs_page(team=None, states=(), after=None, limit=1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        on.transact(verb)
    assert on.read(lambda r: (r.last_seq(), r.job("j0001"), r.quotas())) == (0, None, [])
    on.transact(submit, a_job(1))
    assert on.read(lambda r: r.last_seq()) == 1


def test_kinds_follow_the_life_cycle(on: Harness) -> None:
    (job,) = on.transact(submit, a_job(1))
    running = replace(job, state=JobState.RUNNING)
    for changed, kind in (
        (running, "job.started"),  # from queued: not in the table
        (running, "job.placed"),  # the table leads elsewhere
        (job, "job.nonsense"),
        (replace(job, state=JobState.SUCCEEDED), "job.succeeded"),
    ):
        with pytest.raises(IllegalTransition) as caught:
            on.transact(lambda tx, it, what: tx.save(it, what), changed, kind)
        assert (caught.value.state, caught.value.kind) == (JobState.QUEUED, kind)
    with pytest.raises(IllegalTransition):
        on.transact(lambda tx: tx.add(replace(a_job(2), state=JobState.RUNNING), "job.created"))
    with pytest.raises(IllegalTransition):
        on.transact(lambda tx: tx.add(a_job(2), "job.edited"))
    with pytest.raises(IllegalTransition):
        on.transact(lambda tx: tx.add(a_slice(1, state=SliceState.READY), "slice.intended"))
    assert on.read(lambda r: r.last_seq()) == 1


def test_a_finished_job_takes_edits_and_nothing_else(on: Harness) -> None:
    def verb(tx: Transaction) -> Job:
        return fail(tx, submit_one(tx, a_job(1)))

    job = on.transact(verb)
    edited = on.transact(lambda tx: tx.save(replace(job, tags=("x",)), "job.edited"))
    with pytest.raises(IllegalTransition):
        on.transact(lambda tx: tx.save(replace(edited, state=JobState.QUEUED), "job.requeued"))


def test_one_job_per_team_and_key(on: Harness) -> None:
    on.transact(submit, a_job(1, key="k"), a_job(2, team="blue", key="k"), a_job(3), a_job(4))
    with pytest.raises(Refused):
        on.transact(submit, a_job(5, key="k"))
    with pytest.raises(Refused):
        on.transact(submit, a_job(6, key="new"), a_job(7, key="new"))
    assert on.read(lambda r: r.jobs(["j0005", "j0006", "j0007"])) == []


def test_one_live_attempt_per_job_and_replica(on: Harness) -> None:
    on.transact(lambda tx: tx.add(an_attempt(1), "attempt.created"))
    with pytest.raises(Refused):
        on.transact(lambda tx: tx.add(an_attempt(2, fence=2), "attempt.created"))
    on.transact(lambda tx: tx.add(an_attempt(3, fence=3, replica=1), "attempt.created"))


def test_the_next_attempt_may_follow_in_the_transaction_that_closes_the_last(on: Harness) -> None:
    def verb(tx: Transaction) -> None:
        # A new row of the same table before the update: the order of what is held back matters.
        tx.add(an_attempt(5, job="j0005"), "attempt.created")
        (old,) = tx.attempts(["a0001"])
        close(tx, old)
        tx.add(an_attempt(2, fence=2), "attempt.created")

    on.transact(lambda tx: tx.add(an_attempt(1), "attempt.created"))
    on.transact(verb)
    assert [one.id for one in on.read(lambda r: r.live_attempts())] == ["a0002", "a0005"]


def test_one_attempt_per_fence(on: Harness) -> None:
    on.transact(lambda tx: tx.add(an_attempt(1), "attempt.created"))
    with pytest.raises(Refused):
        on.transact(lambda tx: tx.add(an_attempt(2, fence=1, replica=1), "attempt.created"))


SETS_UP = {
    "job": lambda tx: fail(tx, submit_one(tx, a_job(1))),
    "attempt": lambda tx: close(tx, tx.add(an_attempt(1), "attempt.created")),
    "slice": lambda tx: tx.add(a_slice(1), "slice.intended"),
    "pool": lambda tx: tx.add(a_pool(), "pool.created"),
    "leader": lambda tx: tx.elect("me"),
}
BEHIND_OUR_BACK = [
    ("job", "update jobs set state = 'queued', version = version + 1"),
    ("job", "update jobs set state = 'succeeded', version = version + 1"),
    ("job", "update jobs set version = version + 2"),
    ("job", "update jobs set priority = 3"),
    ("job", "update jobs set state = 'nonsense', version = version + 1"),
    ("job", "update jobs set waiting = 1, version = version + 1"),
    ("attempt", "update attempts set state = 'running', version = version + 1"),
    ("attempt", "update attempts set version = version - 1"),
    ("slice", "update slices set state = 'gone', version = version + 1"),
    ("slice", "update slices set state = 'ready', version = version + 1"),
    ("slice", "update slices set version = version + 3"),
    ("pool", "update pools set version = version + 2"),
    ("leader", "update leader set epoch = epoch - 1"),
    ("leader", "update leader set version = version + 2"),
    ("job", "update events set kind = 'job.edited'"),
    ("slice", "insert into slices select 's2', 'ready', pool, team, provider, race, gone_at, 1, body from slices"),
    ("slice", "insert into slices select 's2', state, pool, team, provider, race, gone_at, 2, body from slices"),
    ("job", "delete from jobs where 1 = 0; insert into control values ('other', 1, '{}')"),
]


@pytest.mark.parametrize(("noun", "sql"), BEHIND_OUR_BACK)
def test_the_database_refuses_what_the_tables_refuse(on: Harness, noun: str, sql: str) -> None:
    verb: Callable[[Transaction], object] = SETS_UP[noun]
    on.transact(verb)
    with pytest.raises(Refused):
        on.raw(sql)


def test_the_database_keeps_unfinished_jobs_and_live_attempts(on: Harness) -> None:
    on.transact(lambda tx: place(tx, submit_one(tx, a_job(1)), an_attempt(1)))
    for table in ("jobs", "attempts"):
        with pytest.raises(Refused):
            on.raw(f"delete from {table}")


def test_a_text_that_one_database_cannot_hold_is_refused_not_half_written(on: Harness) -> None:
    try:
        on.transact(submit, a_job(1), a_job(2, queue="nul\0byte"))
    except Refused:
        assert on.read(lambda r: r.last_seq()) == 0
    else:
        assert on.read(lambda r: [job.id for job in r.heads(["nul\0byte"], 9)["nul\0byte"]]) == ["j0002"]


def test_actor_and_time_are_stamped(on: Harness) -> None:
    on.clock.time = 1234.5
    bound = on.store.bound(actor="alice")
    on.run(bound.transact(submit, a_job(1)))
    (event,) = on.read(lambda r: r.events(0, 9))
    assert (event.actor, event.at, event.epoch) == ("alice", 1234.5, 0)
    assert on.transact(lambda tx: tx.at) == 1234.5


def test_arguments_and_results_pass_through(on: Harness) -> None:
    assert on.transact(lambda _, *args, **kwargs: (args, kwargs), 1, "b", c=3) == ((1, "b"), {"c": 3})
    assert on.read(lambda _, *args, **kwargs: (args, kwargs), 1, "b", c=3) == ((1, "b"), {"c": 3})


def test_attempt_states_are_followed(on: Harness) -> None:
    def verb(tx: Transaction) -> None:
        one = tx.add(an_attempt(1), "attempt.created")
        one = tx.save(replace(one, state=AttemptState.LAUNCHING, launched=(0,)), "attempt.launched")
        one = tx.save(replace(one, launched=(0, 1)), "attempt.launched")
        one = tx.save(replace(one, state=AttemptState.RUNNING), "attempt.started")
        close(tx, one)

    on.transact(verb)
    one = on.read(lambda r: r.attempt("a0001"))
    assert one is not None
    assert (one.state, one.version, one.launched) == (AttemptState.CLOSED, 5, (0, 1))
