"""Recovery and scaling together, on any world: nothing held is let go, nothing is told two things, and it is cheap."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Exit, StopOrder
from penstock.planner.actions import Bury, Delete, Intend, Release
from penstock.planner.recovery import recover
from penstock.planner.scaling import grow, settle
from penstock.planner.snapshot import Snapshot, Witness
from tests.planner.live import (
    NOW,
    a_job,
    add_running,
    add_slice,
    change_attempt,
    change_slice,
    pool_with,
    subject,
    want,
    world,
)

AGES = st.sampled_from([0.0, 14.0, 16.0, 46.0, 61.0, 130.0, 700.0])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Snapshot, set[str]]:
    snapshot = world(
        pool_with(
            max=draw(st.integers(0, 8)),
            min=draw(st.integers(0, 3)),
            idle_s=draw(st.sampled_from([0.0, 600.0])),
            per_zone=draw(st.sampled_from([None, None, 1])),
            deleted=draw(st.integers(0, 9)) == 0,
        )
    )
    names = [f"s{number}" for number in range(draw(st.integers(1, 8)))]
    held = draw(st.integers(0, len(names)))
    free = names[held:]
    for number, name in enumerate(names[:held]):
        add_running(snapshot, f"x{number}", (name,), hosts=draw(st.integers(1, 2)))
    for name in names:
        if name in free:
            add_slice(snapshot, name)
        state = draw(st.sampled_from([SliceState.READY, SliceState.READY, *SliceState]))
        change_slice(
            snapshot,
            name,
            state=SliceState.DELETING if state is SliceState.GONE else state,
            zone=draw(st.sampled_from(["a", "b"])),
            race=draw(st.sampled_from([None, None, "r1", "r2"])),
            dirty=name in free and draw(st.booleans()),
            idle_since=NOW - draw(AGES),
            intended_at=NOW - draw(st.sampled_from([10.0, 5000.0])),
        )
    for number in range(held):
        why = draw(st.sampled_from([None, "cancelled", "gang", "timeout"]))
        change_attempt(
            snapshot,
            f"x{number}",
            stop=None if why is None else StopOrder(why, NOW - draw(AGES)),
            exits=draw(st.sampled_from([(), (Exit(host=0, code=0),), (Exit(host=0, code=1),)])),
            fencing_at=draw(st.sampled_from([None, NOW])),
        )
        cancel_at = draw(st.sampled_from([None, NOW]))
        snapshot.put_job(a_job(f"job-x{number}", cancel_at=cancel_at))
    ages = st.dictionaries(st.sampled_from(names), AGES)
    attempts = [f"x{number}" for number in range(held)] or ["none"]
    snapshot.witness = Witness(
        silent=draw(ages),
        absent=draw(ages),
        missing=draw(st.sets(st.sampled_from(names))),
        denied=draw(st.sets(st.sampled_from(names))),
        fenced=draw(st.dictionaries(st.sampled_from(attempts), AGES)),
        stopping=draw(st.dictionaries(st.sampled_from(attempts), AGES)),
        asked=draw(ages),
        deletes=draw(ages),
        busy=draw(st.sets(st.sampled_from(names))),
        overdue=draw(st.sets(st.sampled_from(attempts))),
        objects_down=draw(st.booleans()),
    )
    return snapshot, draw(st.sets(st.sampled_from(names)))


@given(worlds())
def test_no_held_slice_is_let_go_and_nothing_gets_two_actions(case: tuple[Snapshot, set[str]]) -> None:
    snapshot, keep = case
    actions = [*recover(snapshot, NOW), *settle(snapshot, NOW, keep)]
    subjects = [about for action in actions if (about := subject(action)) is not None]
    assert len(subjects) == len(set(subjects))
    for action in actions:
        if isinstance(action, Release | Bury | Delete):
            assert snapshot.slices[action.slice].attempt is None
            assert action.slice not in snapshot.holders
    assert actions == [*recover(snapshot, NOW), *settle(snapshot, NOW, keep)]


@given(worlds())
def test_intents_never_exceed_the_pool(case: tuple[Snapshot, set[str]]) -> None:
    snapshot, keep = case
    kept = [action for action in settle(snapshot, NOW, keep) if isinstance(action, Intend)]
    grown, _ = grow(snapshot, NOW, [want(f"j{number}", 1 + number % 2) for number in range(5)])
    pool = snapshot.pools["p"]
    # What races a slow slice counts together with it.
    new = [intent for intent in (*kept, *grown) if intent.beside is None]
    assert not (kept or grown) or snapshot.used["pool", "p"] // 4 + len(new) <= pool.max


def test_a_quiet_world_of_ten_thousand_busy_slices_costs_three_milliseconds() -> None:
    snapshot = world(pool_with(max=20_000, min=10, idle_s=600.0))
    for number in range(10_000):
        add_running(snapshot, f"x{number}", (f"s{number}",))
    assert [*recover(snapshot, NOW), *settle(snapshot, NOW, set())] == []
    best = min(_cost_s(snapshot) for _ in range(20))
    assert best <= 0.003


def _cost_s(snapshot: Snapshot) -> float:
    started = time.perf_counter()
    recover(snapshot, NOW)
    settle(snapshot, NOW, set())
    return time.perf_counter() - started
