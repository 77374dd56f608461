"""Journeys of queues and replicas: lending and taking back, bands, elastic work that grows and shrinks."""

from __future__ import annotations

import random

from penstock.domain.ledger import split
from penstock.domain.lifecycle import Cause, JobState
from penstock.domain.nouns import Rule
from penstock.sim.workers import Extraction, replica_of
from tests.journeys.stage import QUEUE, Behaviour, Stage, journey

LONG = Behaviour(duration_s=600.0, start_s=1.0, stop_s=5.0)


@journey(proves=("S12", "S15"))
async def test_what_a_queue_lends_it_gets_back_and_the_borrower_goes_on_later(stage: Stage) -> None:
    await stage.queue(QUEUE, quota_chips=0, borrow_chips=0)
    await stage.queue("night", quota_chips=16, borrow_chips=16)
    await stage.queue("day", quota_chips=16, borrow_chips=0)
    await stage.pool(max=4)
    night = [await stage.submit(queue="night", behave=LONG) for _ in range(4)]
    await stage.until_running(*night)
    assert [stage.live_attempt(job).borrowed for job in night] == [False, False, True, True]
    day = [await stage.submit(queue="day", behave=LONG) for _ in range(2)]
    await stage.until_running(*day, within_s=60.0)
    taken = [job for job in night if stage.job(job).state is JobState.QUEUED]
    assert taken == night[2:], "the borrowed ones gave way, the owned ones did not"
    assert [stage.causes(job) for job in taken] == [[Cause.PREEMPTED]] * 2
    found = await stage.leader().why(taken[0])
    assert found is not None
    assert found[0].code in ("quota", "behind_head")
    await stage.succeeds(*day, *night, within_s=3000.0)
    for job in taken:
        assert [attempt.stage for attempt in stage.attempts(job)] == [0, 1]
        assert stage.job(job).chain(0).failures == 0
    assert [len(stage.attempts(job)) for job in (*night[:2], *day)] == [1, 1, 1, 1]


@journey(proves=("S7",))
async def test_replicas_come_with_open_work_and_go_with_it(stage: Stage) -> None:
    await stage.pool(max=4, idle_s=60.0)
    extraction = Extraction(plan=split("run-0", 100, 10), unit_s=60.0, lease_s=120.0)
    work = replica_of(extraction, random.Random(0))
    job = await stage.submit(
        replicas=(1, 4), behave=Behaviour(work=work, start_s=1.0), rule=Rule(failure_budget=2), timeout_s=7200.0
    )
    await stage.until(lambda: len(stage.job(job).live_chains) == 4, 200.0, "four replicas")
    await stage.until(lambda: (stage.job(job).open_units or 99) < 4, 900.0, "little work left")
    await stage.succeeds(job, within_s=900.0)
    assert stage.job(job).open_units == 0
    complete = stage.records("dataset.complete")
    assert len(complete) == 1
    units = complete[0].body["units"]
    assert isinstance(units, list)
    assert sorted(unit[1] for unit in units) == list(range(0, 100, 10))
    claims = stage.records("shard.claimed")
    assert len(claims) == len({each.subject for each in claims}) == 10, "nobody was stopped with a unit in hand"
    assert {each.replica for each in stage.attempts(job)} == {0, 1, 2, 3}
    assert all(each.cause in (Cause.SUCCEEDED, Cause.CANCELLED) for each in stage.attempts(job))
    assert stage.job(job).chain(0).losses == 0, "a replica that was not needed any more is nobody's loss"


@journey(proves=("S7", "L2"))
async def test_a_lost_replica_is_replaced_and_no_row_is_lost_or_doubled(stage: Stage) -> None:
    await stage.pool(max=3, idle_s=60.0)
    extraction = Extraction(plan=split("run-0", 120, 10), unit_s=60.0, lease_s=120.0)
    work = replica_of(extraction, random.Random(0))
    job = await stage.submit(replicas=(1, 3), behave=Behaviour(work=work, start_s=1.0), timeout_s=7200.0)
    await stage.until(lambda: len(stage.job(job).live_chains) == 3, 200.0, "three replicas")
    await stage.sleep(60.0)
    victim = next(each for each in stage.attempts(job) if each.replica == 1)
    stage.cloud.preempt(victim.slices[0].slice)
    await stage.until(
        lambda: len([each for each in stage.attempts(job) if each.replica == 1]) == 2, 200.0, "the replica's return"
    )
    await stage.succeeds(job, within_s=1800.0)
    assert len(stage.records("dataset.complete")) == 1
    assert stage.job(job).chain(1).losses == 1


@journey(proves=("L6",))
async def test_two_queues_of_equal_weight_get_their_turns(stage: Stage) -> None:
    """A queue that came late and has had nothing yet is served first, then both in turn."""
    await stage.queue("early")
    await stage.queue("late")
    await stage.pool(max=2)
    short = Behaviour(duration_s=100.0, start_s=1.0)
    early = [await stage.submit(queue="early", behave=short) for _ in range(8)]
    await stage.until_running(*early[:2])
    await stage.sleep(30.0)
    late = [await stage.submit(queue="late", behave=short) for _ in range(4)]
    await stage.succeeds(*early, *late, within_s=2000.0)
    order = [str(event.body["queue"]) for event in stage.events("attempt.created")]
    assert order[:3] == ["early", "early", "late"], "the one that has had nothing comes next"
    turns = order[2 : len(order) - order[::-1].index("late")]  # until the late queue is empty
    for so_far in range(1, len(turns) + 1):
        ahead = turns[:so_far].count("late") - turns[:so_far].count("early")
        assert ahead in (0, 1), f"from then on they take turns: {turns}"
