"""What the cost ledger reads: closed attempts by when they closed, by page, and sums of forgotten ones that add."""

from __future__ import annotations

from msgspec.structs import replace

from penstock.domain.cost import Hour, Parts, hold_of
from penstock.domain.lifecycle import AttemptState, Cause
from penstock.domain.nouns import Save
from penstock.ports.store import Transaction
from tests.contract.store.examples import an_attempt
from tests.contract.store.harness import Harness

SAVES = (Save(host=0, at=6.5, count=2, cost_s=0.5),)


def closed(tx: Transaction, number: int, at: float) -> None:
    one = tx.add(an_attempt(number, job=f"j{number:04}", user="ann", zone="z", waited_s=1.5), "attempt.created")
    done = replace(one, state=AttemptState.CLOSED, closed_at=at, cause=Cause.LOST, saves=SAVES)
    tx.save(done, "attempt.closed")


def test_closed_attempts_come_by_when_they_closed_and_only_what_the_ledger_needs(on: Harness) -> None:
    def verb(tx: Transaction) -> None:
        for number, at in ((1, 30.0), (2, 10.0), (3, 20.0), (4, 20.0)):
            closed(tx, number, at)
        tx.add(an_attempt(5, job="j0005"), "attempt.created")

    on.transact(verb)
    found = on.read(lambda r: r.holds((0.0, ""), 9))
    assert [place for place, _ in found] == [(10.0, "a0002"), (20.0, "a0003"), (20.0, "a0004"), (30.0, "a0001")]
    whole = on.read(lambda r: r.attempt("a0002"))
    assert whole is not None
    assert found[0][1] == hold_of(whole)
    assert (found[0][1].user, found[0][1].saves, found[0][1].cause) == ("ann", SAVES, Cause.LOST)


def test_pages_go_on_where_the_last_ended(on: Harness) -> None:
    def verb(tx: Transaction) -> None:
        for number in range(1, 8):
            closed(tx, number, float(number // 2))

    on.transact(verb)
    seen, after = [], (-1.0, "")
    while page := on.read(lambda r, after=after: r.holds(after, 2)):
        seen += [place for place, _ in page]
        after = page[-1][0]
    assert seen == sorted(seen)
    assert len(set(seen)) == 7


def an_hour(hour: int, price: float | None, **parts: float) -> Hour:
    return Hour(
        hour=hour,
        team="red",
        queue="main",
        user="ann",
        zone="z",
        usd_per_chip_hour=price,
        parts=Parts(**parts),  # type: ignore[arg-type]
    )


def test_sums_of_an_hour_add_up_and_an_unknown_price_stays_apart(on: Harness) -> None:
    on.transact(lambda tx: tx.sum_up([an_hour(7, 1.5, useful=2.0, attempts=1), an_hour(7, None, lost=1.0)]))
    on.transact(lambda tx: tx.sum_up([an_hour(7, 1.5, useful=3.0, losses=1, attempts=1), an_hour(9, 0.0, setup=4.0)]))
    found = on.read(lambda r: r.ledger_hours(7, 8))
    assert found == [an_hour(7, None, lost=1.0), an_hour(7, 1.5, useful=5.0, losses=1, attempts=2)]
    assert on.read(lambda r: r.ledger_hours(8, 99)) == [an_hour(9, 0.0, setup=4.0)]
    on.transact(lambda tx: tx.sum_up([]))
