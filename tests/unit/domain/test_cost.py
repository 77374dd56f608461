"""Where chip-seconds go: the parts add up to what existed, nothing counts twice, and what is not known stays so."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.domain.cost import (
    HOUR_S,
    NAMELESS,
    NOBODY,
    By,
    Hold,
    Ledger,
    Parts,
    Stand,
    bill,
    goodput,
    hours_of,
    pace,
    parts_of,
)
from penstock.domain.lifecycle import Cause
from penstock.domain.nouns import Save

END = 20_000


def hold(**changes: Any) -> Hold:
    made = Hold(job="j1", team="t", queue="q", chips=8, created_at=100.0, user="ann", zone="a", usd_per_chip_hour=1.0)
    return replace(made, **{"started_at": 110.0, "closed_at": 210.0, "cause": Cause.PREEMPTED, **changes})


def whole(it: Hold, until: float = 1e6) -> Parts:
    return parts_of(it, 0.0, until)


# --- one attempt ---
def test_what_succeeded_was_useful_from_its_start() -> None:
    assert whole(hold(cause=Cause.SUCCEEDED)) == Parts(useful=800.0, setup=80.0, attempts=1)


def test_what_ran_after_the_last_checkpoint_is_lost() -> None:
    found = whole(hold(saves=(Save(host=0, at=150.0),)))
    assert found == Parts(useful=320.0, lost=480.0, setup=80.0, attempts=1, losses=1)


def test_of_a_gang_the_checkpoint_counts_when_its_last_host_has_it() -> None:
    found = whole(hold(saves=(Save(host=1, at=190.0), Save(host=0, at=160.0))))
    assert (found.useful, found.lost) == (400.0, 400.0)


def test_without_a_known_checkpoint_nobody_can_tell() -> None:
    found = whole(hold())
    assert (found.useful, found.lost, found.unknown) == (0.0, 0.0, 800.0)


def test_of_what_runs_the_part_after_its_checkpoint_is_not_known_yet() -> None:
    live = hold(closed_at=None, cause=None, saves=(Save(host=0, at=150.0),))
    found = whole(live, until=300.0)
    assert (found.useful, found.lost, found.unknown) == (320.0, 0.0, 1200.0)


def test_an_attempt_that_never_started_was_set_up_only() -> None:
    assert whole(hold(started_at=None)) == Parts(setup=880.0, attempts=1, losses=1)


def test_a_checkpoint_that_arrived_after_the_end_saves_no_more_than_all() -> None:
    found = whole(hold(saves=(Save(host=0, at=900.0),)))
    assert (found.useful, found.lost) == (800.0, 0.0)


def test_waiting_is_counted_apart_and_nobody_held_it() -> None:
    found = whole(hold(waited_s=50.0))
    assert found.waited == 400.0
    assert found.total == 880.0


# --- properties ---
times = st.integers(0, END)
causes = st.sampled_from([Cause.SUCCEEDED, Cause.PREEMPTED, Cause.USER_ERROR, Cause.LOST, Cause.CANCELLED])


@st.composite
def holds(draw: st.DrawFn) -> Hold:
    moments = sorted(draw(st.lists(times, min_size=3, max_size=3)))
    live, started = draw(st.booleans()), draw(st.booleans())
    saves = draw(st.lists(st.integers(moments[0], END), max_size=2))
    return hold(
        job=draw(st.sampled_from(["j1", "j2"])),
        chips=draw(st.sampled_from([1, 4, 8])),
        created_at=float(moments[0]),
        started_at=float(moments[1]) if started else None,
        closed_at=None if live else float(moments[2]),
        cause=None if live else draw(causes),
        waited_s=float(draw(st.integers(0, 500))),
        saves=tuple(Save(host=host, at=float(at)) for host, at in enumerate(saves)),
        usd_per_chip_hour=draw(st.sampled_from([None, 0.0, 1.5])),
    )


@given(holds(), times, times)
def test_parts_of_an_attempt_add_up_to_what_it_held_in_the_window(it: Hold, one: int, other: int) -> None:
    since, until = float(min(one, other)), float(max(one, other))
    found = parts_of(it, since, until)
    closed = until if it.closed_at is None else it.closed_at
    assert found.held == pytest.approx(it.chips * max(0.0, min(closed, until) - max(it.created_at, since)))
    assert min(found.useful, found.lost, found.unknown, found.setup, found.waited) >= 0


@given(holds(), times, times)
def test_two_windows_side_by_side_are_one(it: Hold, one: int, other: int) -> None:
    middle, until = float(min(one, other)), float(END)
    if it.closed_at is None:
        return  # what runs is unknown until it is saved, and a window that ended earlier knows less
    first, second, both = parts_of(it, 0.0, middle), parts_of(it, middle, until), parts_of(it, 0.0, until)
    first.add(second)
    assert [getattr(first, name) for name in ("useful", "lost", "unknown", "setup", "waited")] == pytest.approx(
        [getattr(both, name) for name in ("useful", "lost", "unknown", "setup", "waited")]
    )
    assert first.losses == both.losses


@given(holds().filter(lambda it: it.closed_at is not None))
def test_the_hours_of_an_attempt_add_up_to_it(it: Hold) -> None:
    total = Parts()
    for hour in hours_of(it):
        total.add(hour.parts)
    expected = parts_of(it, -1e9, 1e9)
    assert total.held == pytest.approx(expected.held)
    assert total.waited == pytest.approx(expected.waited)
    assert (total.attempts, total.losses) == (expected.attempts, expected.losses)


class World:
    """Slices with attempts on them that never overlap, gangs over several; and the same counted second by second."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.stands: list[Stand] = []
        self.holds: list[Hold] = []
        for number in range(draw(st.integers(1, 4))):
            gang = draw(st.integers(1, 3))
            price = draw(st.sampled_from([None, 0.0, 2.0]))
            zone = draw(st.sampled_from(["a", "b"]))
            cuts = sorted(draw(st.lists(times, min_size=6, max_size=6)))
            ends = draw(st.booleans())
            ready = draw(st.booleans())
            for _ in range(gang):  # a race's losers stand as well, and never become ready
                self.stands.append(
                    Stand(
                        team="t",
                        zone=zone,
                        chips=4,
                        usd_per_chip_hour=price,
                        up_at=float(cuts[0]),
                        ready_at=float(cuts[1]) if ready else None,
                        ended_at=float(cuts[5]) if ends else None,
                    )
                )
            if ready:
                self.holds.append(
                    hold(
                        job=f"j{number}",
                        zone=zone,
                        chips=4 * gang,
                        usd_per_chip_hour=price,
                        created_at=float(cuts[2]),
                        started_at=float(cuts[3]),
                        closed_at=float(cuts[4]),
                        cause=draw(causes),
                    )
                )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    return World(draw)


@given(worlds(), st.sampled_from(By), times, times)
def test_all_rows_together_are_what_the_slices_existed(world: World, by: By, one: int, other: int) -> None:
    since, until = float(min(one, other)), float(max(one, other))
    ledger = Ledger(by, since, until)
    for it in world.holds:
        ledger.hold(it)
    for stand in world.stands:
        ledger.stand(stand)
    ledger.close()
    existed = sum(
        stand.chips
        * max(0.0, min(until if stand.ended_at is None else stand.ended_at, until) - max(stand.up_at, since))
        for stand in world.stands
    )
    total = sum(parts.total for parts in ledger.rows.values())
    assert total == pytest.approx(existed, abs=1e-6)
    money = bill((price, parts) for (_, price), parts in ledger.rows.items()).usd_known
    priced = sum(
        (stand.usd_per_chip_hour or 0.0)
        * stand.chips
        * max(0.0, min(until if stand.ended_at is None else stand.ended_at, until) - max(stand.up_at, since))
        for stand in world.stands
    )
    assert money == pytest.approx(priced / HOUR_S, abs=1e-6)


@given(worlds(), st.sampled_from([By.USER, By.QUEUE, By.ZONE]))
def test_forgetting_jobs_changes_no_sum(world: World, by: By) -> None:
    kept, summed = Ledger(by, 0.0, float(END)), Ledger(by, 0.0, float(END))
    until = math.ceil(END / HOUR_S) * HOUR_S
    kept.until = summed.until = until
    for it in world.holds:
        kept.hold(it)
        for hour in hours_of(it):
            summed.hour(hour)
    for ledger in (kept, summed):
        for stand in world.stands:
            ledger.stand(stand)
        ledger.close()
    for key, parts in kept.rows.items():
        mine = summed.rows[key]
        assert (mine.held, mine.idle, mine.attempts) == pytest.approx(
            (parts.held, parts.idle, parts.attempts), abs=1e-6
        )


# --- keys, money ---
def test_rows_are_by_what_was_asked_and_idle_is_nobodys() -> None:
    for by, key in ((By.JOB, "j1"), (By.USER, "ann"), (By.QUEUE, "q")):
        ledger = Ledger(by, 0.0, 1000.0)
        ledger.hold(hold())
        ledger.stand(Stand(team="t", zone="a", chips=8, usd_per_chip_hour=1.0, up_at=50.0, ready_at=100.0))
        ledger.close()
        assert set(ledger.rows) == {(key, 1.0), (NOBODY, 1.0)}
        nobody = ledger.rows[NOBODY, 1.0]
        assert (nobody.setup, nobody.idle) == (400.0, 8 * (900.0 - 110.0))


def test_an_attempt_of_before_the_ledger_has_no_user_but_is_not_idle_time() -> None:
    ledger = Ledger(By.USER, 0.0, 1000.0)
    ledger.hold(hold(user=""))
    assert set(ledger.rows) == {(NAMELESS, 1.0)}


def test_money_is_unknown_as_soon_as_a_part_has_no_price() -> None:
    priced = bill([(2.0, Parts(useful=3600.0))])
    assert (priced.usd, priced.unpriced_chip_s) == (2.0, 0.0)
    mixed = bill([(2.0, Parts(useful=3600.0)), (None, Parts(idle=60.0))])
    assert (mixed.usd, mixed.usd_known, mixed.unpriced_chip_s) == (None, 2.0, 60.0)
    assert bill([(0.0, Parts(useful=3600.0))]).usd == 0.0  # this machine's own capacity is known to cost nothing


def test_goodput_is_the_useful_share() -> None:
    assert goodput(Parts(useful=6.0, lost=2.0, setup=1.0, idle=1.0)) == 0.6
    assert goodput(Parts(waited=5.0)) is None


# --- how often to save ---
def test_the_interval_is_youngs() -> None:
    lost = hold(started_at=0.0, closed_at=3600.0, saves=(Save(host=0, at=3000.0, count=4, cost_s=2.0),))
    found = pace([lost, hold(started_at=4000.0, closed_at=7600.0)], 9000.0, None)
    assert (found.losses, found.saves, found.between_losses_s, found.save_s) == (2, 4, 3600.0, 2.0)
    assert found.every_s == pytest.approx(120.0)  # sqrt(2 * 2 s * 3600 s)


def test_a_job_never_lost_goes_by_what_zones_have_learned() -> None:
    fine = hold(cause=Cause.SUCCEEDED, saves=(Save(host=0, at=150.0, cost_s=8.0),))
    assert pace([fine], 300.0, 10_000.0).every_s == pytest.approx(400.0)
    assert pace([fine], 300.0, None).every_s is None


def test_a_save_of_unknown_cost_gives_no_interval() -> None:
    assert pace([hold(saves=(Save(host=0, at=150.0),))], 300.0, None).every_s is None
