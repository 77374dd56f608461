"""Budgets: when windows begin, what is charged to which, and how amounts are said."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.budgets import Budget, Spent, Unit, Window, amount, begins, called, charged, current


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


NOW = at("2026-11-15T12:00")  # a Sunday


def test_windows_begin_at_midnight_monday_and_the_first() -> None:
    assert begins(Window.DAY, NOW) == at("2026-11-15T00:00")
    assert begins(Window.WEEK, NOW) == at("2026-11-09T00:00")
    assert begins(Window.MONTH, NOW) == at("2026-11-01T00:00")


def test_windows_are_called_as_people_call_them() -> None:
    assert called(Window.MONTH, begins(Window.MONTH, NOW)) == "November 2026"
    assert called(Window.WEEK, begins(Window.WEEK, NOW)) == "the week of 2026-11-09"
    assert called(Window.DAY, begins(Window.DAY, NOW)) == "2026-11-15"


def test_an_attempt_over_midnight_is_charged_to_each_day_by_its_part() -> None:
    spent = charged((), at("2026-11-14T23:00"), at("2026-11-15T02:00"), 8, 1.5)
    day, month = current(spent, Window.DAY, NOW), current(spent, Window.MONTH, NOW)
    assert (day.chip_s, day.usd) == (8 * 7200.0, 24.0)
    assert (month.chip_s, month.usd) == (8 * 10800.0, 36.0)


def test_a_new_window_begins_with_nothing() -> None:
    spent = charged((), at("2026-11-15T01:00"), at("2026-11-15T02:00"), 8, 1.0)
    assert current(spent, Window.DAY, at("2026-11-16T00:00")).chip_s == 0
    assert current(spent, Window.WEEK, at("2026-11-15T23:59")).chip_s == 8 * 3600.0
    assert current(spent, Window.MONTH, at("2026-12-01T00:00")).usd == 0
    again = charged(spent, at("2026-12-01T01:00"), at("2026-12-01T02:00"), 1, 1.0)
    assert current(again, Window.MONTH, at("2026-12-02T00:00")).chip_s == 3600.0


def test_time_without_a_price_is_kept_apart() -> None:
    spent = charged((), NOW, NOW + 3600.0, 4, None)
    book = current(spent, Window.MONTH, NOW + 3600.0)
    assert (book.of(Unit.USD), book.of(Unit.CHIP_HOURS), book.unpriced_chip_s) == (0.0, 4.0, 14_400.0)


@given(st.lists(st.tuples(st.floats(0, 5e6), st.floats(0, 1e5), st.integers(1, 64)), max_size=8))
def test_the_month_is_charged_no_more_than_was_held(attempts: list[tuple[float, float, int]]) -> None:
    spent: tuple[Spent, ...] = ()
    since = begins(Window.MONTH, NOW)
    ends = sorted((NOW + began + ran, NOW + began, chips) for began, ran, chips in attempts)
    for closed, began, chips in ends:
        spent = charged(spent, began, closed, chips, 1.0)
    for book in spent:
        assert 0 <= book.chip_s <= sum(chips * (closed - began) for closed, began, chips in ends) + 1e-3
        assert book.usd == pytest.approx(book.chip_s / 3600.0)
        assert book.since >= since - 7 * 86400


def test_amounts_and_budgets_in_words() -> None:
    assert amount(1234.5, Unit.USD) == "$1,234.50"
    assert amount(1000.0, Unit.CHIP_HOURS) == "1,000 chip-hours"
    assert Budget(limit=500.0).text == "$500.00 per month"
