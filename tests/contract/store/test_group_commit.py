"""The writer thread: what shares a commit and what does not, callers that give up, closing, losing the database."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.domain.lifecycle import IllegalTransition
from penstock.domain.nouns import Job
from penstock.ports.store import Conflict, Refused, StaleLeader, Transaction, Unavailable, UnknownOutcome
from penstock.store import threads
from penstock.store.turns import Turns
from tests.contract.store.examples import a_job, an_attempt, fail, place, submit, submit_one
from tests.contract.store.harness import Harness


class Gate:
    """A verb that holds the writer until it is opened, so that what comes meanwhile forms one group."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self, tx: Transaction) -> None:
        self.entered.set()
        assert self._open.wait(10.0)

    def open(self) -> None:
        self._open.set()


@pytest.fixture(autouse=True)
def _long_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GROUP_S", 60.0)


async def _together(on: Harness, *calls: tuple[Any, ...]) -> list[Any]:
    """The outcomes of calls that the writer finds waiting at once."""
    gate = Gate()
    first = asyncio.create_task(on.store.transact(gate))
    await asyncio.to_thread(gate.entered.wait, 10.0)
    tasks = [asyncio.create_task(on.store.transact(verb, *args)) for verb, *args in calls]
    await asyncio.sleep(0)
    gate.open()
    await first
    return list(await asyncio.gather(*tasks, return_exceptions=True))


def doomed(tx: Transaction, *jobs: Job) -> None:
    submit(tx, *jobs)
    tx.reserve("team", "red", 5)
    tx.jobs_page(team=None, states=(), after=None, limit=1)  # makes the writes reach the database
    raise ZeroDivisionError


def test_each_failure_in_a_group_is_its_own(threaded: Harness) -> None:
    outcomes = threaded.run(
        _together(
            threaded,
            (submit, a_job(1)),
            (doomed, a_job(2), a_job(3)),
            (submit, a_job(4), a_job(1)),  # a duplicate: the database refuses
            (lambda tx: tx.save(a_job(4), "job.edited"),),
            (submit, a_job(5)),
            (lambda tx: tx.add(a_job(6), "job.placed"),),
            (submit, a_job(2)),
        )
    )
    assert [type(outcome) for outcome in outcomes] == [
        list, ZeroDivisionError, Refused, Conflict, list, IllegalTransition, list,
    ]  # fmt: skip
    events = threaded.read(lambda r: r.events(0, 99))
    assert [(event.seq, event.id) for event in events] == [(1, "j0001"), (2, "j0005"), (3, "j0002")]
    assert threaded.read(lambda r: r.quotas()) == []
    assert threaded.troubles() == []


def test_the_first_of_a_group_may_fail_too(threaded: Harness) -> None:
    async def story() -> list[Any]:
        first = threaded.store.transact(doomed, a_job(1))
        second = threaded.store.transact(submit, a_job(1))
        return list(await asyncio.gather(first, second, return_exceptions=True))

    first, second = threaded.run(story())
    assert isinstance(first, ZeroDivisionError)
    assert [job.id for job in second] == ["j0001"]
    assert threaded.read(lambda r: r.last_seq()) == 1


def test_an_election_in_a_group_counts_for_those_after_it(threaded: Harness) -> None:
    async def story() -> list[Any]:
        old = threaded.store.bound(actor="old", epoch=1)
        new = threaded.store.bound(actor="new", epoch=2)
        gate = Gate()
        calls = [
            asyncio.create_task(call)
            for call in (
                threaded.store.transact(gate),
                old.transact(submit, a_job(1)),
                threaded.store.transact(lambda tx: tx.elect("new")),
                old.transact(submit, a_job(2)),
                new.transact(submit, a_job(3)),
            )
        ]
        await asyncio.sleep(0)
        gate.open()
        return await asyncio.gather(*calls, return_exceptions=True)

    threaded.transact(lambda tx: tx.elect("old"))
    outcomes = threaded.run(story())
    assert [type(outcome).__name__ for outcome in outcomes[1:]] == ["list", "Leader", "StaleLeader", "list"]
    assert isinstance(outcomes[3], StaleLeader)


def test_hundreds_of_callers_at_once_all_get_their_own_answer(threaded: Harness) -> None:
    async def story() -> list[list[Job]]:
        return await asyncio.gather(*(threaded.store.transact(submit, a_job(n)) for n in range(300)))

    answers = threaded.run(story())
    assert [jobs[0].id for jobs in answers] == [f"j{n:04}" for n in range(300)]
    assert threaded.read(lambda r: r.waiting_counts()) == {"main": 300}


def test_a_cancelled_caller_that_still_waits_never_runs(threaded: Harness) -> None:
    async def story() -> None:
        gate = Gate()
        first = asyncio.create_task(threaded.store.transact(gate))
        await asyncio.to_thread(gate.entered.wait, 10.0)
        given_up = asyncio.create_task(threaded.store.transact(submit, a_job(1)))
        kept = asyncio.create_task(threaded.store.transact(submit, a_job(2)))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        gate.open()
        await first
        await kept

    threaded.run(story())
    assert [event.id for event in threaded.read(lambda r: r.events(0, 9))] == ["j0002"]


def test_a_caller_cancelled_while_its_verb_runs_leaves_a_sound_store(threaded: Harness) -> None:
    async def story() -> None:
        for number in range(40):
            gate = Gate()

            def verb(tx: Transaction, gate: Gate = gate, number: int = number) -> None:
                submit(tx, a_job(number))
                gate(tx)

            call = asyncio.create_task(threaded.store.transact(verb))
            await asyncio.to_thread(gate.entered.wait, 10.0)
            call.cancel()
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await call
        await threaded.store.transact(submit, a_job(99))

    threaded.run(story())
    assert threaded.read(lambda r: r.last_seq()) == 41
    assert threaded.troubles() == []


def test_a_call_that_gets_no_answer_says_what_is_known(threaded: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> list[Any]:
        gate = Gate()
        with monkeypatch.context() as hurried:
            hurried.setattr(threads, "CALL_S", 2.0)
            calls = [
                asyncio.create_task(call)
                for call in (threaded.store.transact(gate), threaded.store.transact(submit, a_job(1)))
            ]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        gate.open()
        await threaded.store.transact(submit, a_job(2))
        return outcomes

    running, waiting = threaded.run(story())
    assert isinstance(running, UnknownOutcome)
    assert isinstance(waiting, Unavailable)
    assert [event.id for event in threaded.read(lambda r: r.events(0, 9))] == ["j0002"]


def test_a_time_out_raised_by_a_verb_is_the_verbs_own(threaded: Harness) -> None:
    def verb(tx: Transaction) -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        threaded.transact(verb)


def test_too_many_callers_are_turned_away_at_once(threaded: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> list[Any]:
        gate = Gate()
        first = asyncio.create_task(threaded.store.transact(gate))
        await asyncio.to_thread(gate.entered.wait, 10.0)
        calls = [asyncio.create_task(threaded.store.transact(submit, a_job(n))) for n in range(5)]
        await asyncio.sleep(0)
        gate.open()
        await first
        return await asyncio.gather(*calls, return_exceptions=True)

    monkeypatch.setattr(threads, "WAITING_MAX", 3)
    assert [type(outcome) for outcome in threaded.run(story())] == [list] * 3 + [Unavailable] * 2


def test_reads_go_on_beside_a_long_write_and_see_one_moment(threaded: Harness) -> None:
    async def story() -> tuple[int, int, int]:
        gate = Gate()

        def verb(tx: Transaction) -> None:
            submit(tx, a_job(2))
            tx.live_jobs()
            gate(tx)

        inside, go_on = threading.Event(), threading.Event()

        def twice(r: Any) -> tuple[int, int]:
            before = r.last_seq()
            inside.set()
            assert go_on.wait(10.0)
            return before, r.last_seq()

        writing = asyncio.create_task(threaded.store.transact(verb))
        await asyncio.to_thread(gate.entered.wait, 10.0)
        reading = asyncio.create_task(threaded.store.read(twice))
        await asyncio.to_thread(inside.wait, 10.0)
        gate.open()
        await writing
        go_on.set()
        before, after = await reading
        return before, after, await threaded.store.read(lambda r: r.last_seq())

    threaded.transact(submit, a_job(1))
    assert threaded.run(story()) == (1, 1, 2)


def test_a_failing_query_is_its_callers_and_the_reader_goes_on(threaded: Harness) -> None:
    for _ in range(2 * threads.READERS):
        with pytest.raises(ZeroDivisionError):
            threaded.read(lambda _: 1 // 0)
    assert threaded.read(lambda r: r.last_seq()) == 0


def test_closing_finishes_what_was_asked_and_refuses_what_comes_after(on: Harness) -> None:
    async def story() -> None:
        calls = [asyncio.create_task(on.store.transact(submit, a_job(n))) for n in range(20)]
        await asyncio.sleep(0)
        await on.store.close()
        await asyncio.gather(*calls)
        for late in (on.store.transact(submit, a_job(99)), on.store.read(lambda r: r.last_seq())):
            with pytest.raises(Unavailable, match="closed"):
                await late
        await on.store.close()

    before = threading.active_count()
    on.run(story())
    assert threading.active_count() <= before
    if on.threaded:
        assert on.run(_count(on)) == 20


async def _count(on: Harness) -> int:
    again = on.another()
    try:
        return await again.read(lambda r: r.last_seq())
    finally:
        await again.close()


def test_a_fault_of_the_store_itself_reaches_the_caller_and_ends_nothing(
    threaded: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Turns) -> bool:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(Turns, "commit", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            threaded.transact(submit, a_job(1))
    threaded.transact(submit, a_job(2))
    assert [event.id for event in threaded.read(lambda r: r.events(0, 9))] == ["j0002"]


def test_a_new_store_object_reads_what_the_old_one_wrote(threaded: Harness) -> None:
    job, _ = threaded.transact(lambda tx: place(tx, submit_one(tx, a_job(1)), an_attempt(1)))
    threaded.transact(fail, job)
    again = threaded.open_another()
    look: Callable[[Any], tuple[object, ...]] = lambda r: (r.job("j0001"), r.attempt("a0001"), r.events(0, 9))  # noqa: E731
    assert threaded.run(again.read(look)) == threaded.read(look)
