"""Budgets of queues: how much may be spent in a calendar day, week or month, and how much of it is spent.

`controller.attempts` charges a queue when an attempt closes, `planner.budgets` adds what runs and asks whether new work
may start, `server` and `tpu queues` show it. Calendars are UTC. Pure. It must not decide what a refusal means: running
work always goes on.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Final

import msgspec

LIMIT_MAX: Final = 1e12
HOUR_S: Final = 3600.0


class Window(StrEnum):
    DAY = "day"
    WEEK = "week"  #: from Monday
    MONTH = "month"


class Unit(StrEnum):
    USD = "usd"
    CHIP_HOURS = "chip_hours"


class Budget(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """At this much spent in the current window nothing new of the queue starts."""

    limit: float
    unit: Unit = Unit.USD
    window: Window = Window.MONTH

    @property
    def text(self) -> str:
        return f"{amount(self.limit, self.unit)} per {self.window.value}"


class Spent(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What closed attempts used since `since`, the beginning of a window. Time without a price is kept apart."""

    window: Window
    since: float
    chip_s: float = 0.0
    usd: float = 0.0
    unpriced_chip_s: float = 0.0

    def of(self, unit: Unit) -> float:
        return self.usd if unit is Unit.USD else self.chip_s / HOUR_S

    def plus(self, chip_s: float, usd_per_chip_hour: float | None) -> Spent:
        return Spent(
            window=self.window,
            since=self.since,
            chip_s=self.chip_s + chip_s,
            usd=self.usd + chip_s * (usd_per_chip_hour or 0.0) / HOUR_S,
            unpriced_chip_s=self.unpriced_chip_s + (chip_s if usd_per_chip_hour is None else 0.0),
        )


def begins(window: Window, now: float) -> float:
    """When the current day, week or month began."""
    return _begins(window, math.floor(now / HOUR_S))


@lru_cache(maxsize=64)
def _begins(window: Window, hour: int) -> float:
    """Days begin with an hour; every charge asks for three windows, and the calendar is slow."""
    day = datetime.fromtimestamp(hour * HOUR_S, UTC).replace(hour=0)
    if window is Window.WEEK:
        day -= timedelta(days=day.weekday())
    elif window is Window.MONTH:
        day = day.replace(day=1)
    return day.timestamp()


def called(window: Window, since: float) -> str:
    """A window as people call it: November 2026, the week of 2026-11-09, 2026-11-15."""
    day = datetime.fromtimestamp(since, UTC)
    if window is Window.MONTH:
        return day.strftime("%B %Y")
    return f"the week of {day:%Y-%m-%d}" if window is Window.WEEK else f"{day:%Y-%m-%d}"


def amount(value: float, unit: Unit) -> str:
    if unit is Unit.USD:
        return f"${value:,.2f}"
    return f"{value:,.2f}".rstrip("0").rstrip(".") + " chip-hours"


def charged(
    spent: tuple[Spent, ...], began: float, closed: float, chips: int, price: float | None
) -> tuple[Spent, ...]:
    """The books of a queue after an attempt that held `chips` from `began` to `closed`."""
    known = {each.window: each for each in spent}
    books = []
    for window in Window:
        since = begins(window, closed)
        book = known.get(window)
        if book is None or book.since < since:
            book = Spent(window=window, since=since)
        # A clock that stepped back leaves a later window open: nothing is taken out of it.
        books.append(book.plus(chips * max(0.0, closed - max(began, book.since)), price))
    return tuple(books)


def current(spent: tuple[Spent, ...], window: Window, now: float) -> Spent:
    """The book of the window that is open now; an empty one when the last charge was in an earlier one."""
    since = begins(window, now)
    found = next((each for each in spent if each.window == window and each.since >= since), None)
    return found or Spent(window=window, since=since)
