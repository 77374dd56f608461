"""Where chip-seconds went: what each attempt and each slice used, split into parts that add up, and what that cost.

`server.cost` folds rows into a `Ledger` and shows it, `controller.jobs` sums up attempts by the hour before their job
is forgotten. The parts are defined in docs/adr/0026-where-chip-seconds-go.md. Pure: times are arguments. It must not
guess: what is not known is its own part, and a price that is not known never counts as zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from enum import StrEnum
from operator import attrgetter
from typing import Final

import msgspec

from penstock.domain.lifecycle import INFRASTRUCTURE_CAUSES, Cause, SliceState
from penstock.domain.nouns import Attempt, Save, Slice

HOUR_S: Final = 3600.0
NOBODY: Final = ""  #: whose idle slices and their set-up are
NAMELESS: Final = "?"  #: of attempts that were made before the ledger was


class By(StrEnum):
    JOB = "job"
    USER = "user"
    QUEUE = "queue"
    ZONE = "zone"


class Hold(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What the ledger needs of an attempt: a row of it can be read as this, without the rest."""

    job: str
    team: str
    queue: str
    chips: int
    created_at: float
    user: str = ""
    zone: str = ""
    usd_per_chip_hour: float | None = None
    started_at: float | None = None
    closed_at: float | None = None
    cause: Cause | None = None
    waited_s: float = 0.0
    saves: tuple[Save, ...] = ()


def hold_of(attempt: Attempt) -> Hold:
    return Hold(
        job=attempt.job,
        team=attempt.team,
        queue=attempt.queue,
        chips=attempt.chips,
        created_at=attempt.created_at,
        user=attempt.user,
        zone=attempt.zone,
        usd_per_chip_hour=attempt.usd_per_chip_hour,
        started_at=attempt.started_at,
        closed_at=attempt.closed_at,
        cause=attempt.cause,
        waited_s=attempt.waited_s,
        saves=attempt.saves,
    )


class Stand(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What the ledger needs of a slice. It exists from `up_at`, when its provider said READY, to `ended_at`."""

    team: str
    zone: str
    chips: int
    usd_per_chip_hour: float | None
    up_at: float
    ready_at: float | None = None
    ended_at: float | None = None


def stand_of(slice: Slice) -> Stand | None:
    """None for a slice that never existed: it was refused, or is still being made."""
    up = slice.up_at if slice.up_at is not None else slice.ready_at
    if up is None or not slice.chips:
        return None
    ended = slice.deleting_at
    if ended is None and slice.state is SliceState.GONE:
        ended = slice.gone_at
    return Stand(
        team=slice.team,
        zone=slice.zone,
        chips=slice.chips,
        usd_per_chip_hour=slice.usd_per_chip_hour,
        up_at=up,
        ready_at=slice.ready_at,
        ended_at=ended,
    )


class Parts(msgspec.Struct, gc=False):
    """Chip-seconds at one price. `waited` is time that jobs waited for chips: nobody held those, nobody pays."""

    useful: float = 0.0
    lost: float = 0.0
    unknown: float = 0.0
    setup: float = 0.0
    idle: float = 0.0
    waited: float = 0.0
    attempts: int = 0  #: that closed in the window, or live
    losses: int = 0  #: attempts that capacity took away in the window

    @property
    def held(self) -> float:
        """By attempts."""
        return self.useful + self.lost + self.unknown + self.setup

    @property
    def total(self) -> float:
        return self.held + self.idle

    def add(self, other: Parts) -> None:
        self.useful += other.useful
        self.lost += other.lost
        self.unknown += other.unknown
        self.setup += other.setup
        self.idle += other.idle
        self.waited += other.waited
        self.attempts += other.attempts
        self.losses += other.losses


def parts_of(hold: Hold, since: float, until: float) -> Parts:
    """What of an attempt lies in the window. The window must end by now: what lives is taken to live until then."""
    parts = Parts()
    pour(hold, since, until, parts)
    return parts


def pour(hold: Hold, since: float, until: float, into: Parts) -> float:
    """Add what of an attempt lies in the window; answers what it held. A hundred thousand of these make one page."""
    began, closed_at, cause, chips = hold.created_at, hold.closed_at, hold.cause, hold.chips
    closed, started = closed_at, hold.started_at
    if closed is None or started is None or not began <= started <= closed:
        # It lives, never started, or a clock stepped back: nothing becomes negative.
        closed = max(began, until if closed is None else closed)
        started = closed if started is None else max(began, min(started, closed))
    # Kept is what ran before the newest checkpoint, and all of what ended well.
    kept = closed if cause is Cause.SUCCEEDED else started
    if hold.saves and kept < closed:
        kept = min(max(kept, min(save.at for save in hold.saves)), closed)
    waits = began - hold.waited_s
    if closed_at is None or since <= closed_at < until:
        into.attempts += 1
        if cause in INFRASTRUCTURE_CAUSES:
            into.losses += 1
    if waits < since or closed > until:
        waits, began, started, kept, closed = (
            min(max(moment, since), until) for moment in (waits, began, started, kept, closed)
        )
    into.waited += chips * (began - waits)
    into.setup += chips * (started - began)
    into.useful += chips * (kept - started)
    # Of what still runs, and of what may have saved elsewhere, nobody can tell.
    if cause is None or not hold.saves:
        into.unknown += chips * (closed - kept)
    else:
        into.lost += chips * (closed - kept)
    return chips * (closed - began)


def _within(begin: float, end: float, since: float, until: float) -> float:
    return max(0.0, min(end, until) - max(begin, since))


class Hour(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Attempts of jobs that are forgotten, summed up: what they used in one hour of the calendar."""

    hour: int  #: since the epoch
    team: str
    queue: str
    user: str
    zone: str
    usd_per_chip_hour: float | None
    parts: Parts


def hours_of(hold: Hold) -> Iterator[Hour]:
    """A closed attempt, cut at the hours; they add up to it."""
    assert hold.closed_at is not None
    first = math.floor((hold.created_at - hold.waited_s) / HOUR_S)
    for hour in range(first, math.floor(hold.closed_at / HOUR_S) + 1):
        yield Hour(
            hour=hour,
            team=hold.team,
            queue=hold.queue,
            user=hold.user,
            zone=hold.zone,
            usd_per_chip_hour=hold.usd_per_chip_hour,
            parts=parts_of(hold, hour * HOUR_S, (hour + 1) * HOUR_S),
        )


Key = tuple[str, float | None]  #: a name, and dollars per chip and hour


class Ledger:
    """The sums of one window: by a name, and within it by price."""

    def __init__(self, by: By, since: float, until: float) -> None:
        self.by, self.since, self.until = by, since, until
        self.rows: dict[Key, Parts] = {}
        self.forgotten: dict[Key, Parts] = {}  #: of jobs that are not there any more
        self._key = attrgetter(by.value)
        self._existed: dict[Key, float] = {}  #: of a zone: chip-seconds
        self._used: dict[Key, float] = {}

    def hold(self, hold: Hold) -> None:
        price = hold.usd_per_chip_hour
        key = self._key(hold) or NAMELESS, price
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = Parts()
        held = pour(hold, self.since, self.until, row)
        at = hold.zone, price
        self._used[at] = self._used.get(at, 0.0) + held

    def hour(self, hour: Hour) -> None:
        """A sum of an hour that lies in the window only in part counts by that part."""
        share = _within(hour.hour * HOUR_S, (hour.hour + 1) * HOUR_S, self.since, self.until) / HOUR_S
        if not share:
            return
        whole, price = hour.parts, hour.usd_per_chip_hour
        parts = Parts(
            useful=whole.useful * share,
            lost=whole.lost * share,
            unknown=whole.unknown * share,
            setup=whole.setup * share,
            waited=whole.waited * share,
            attempts=round(whole.attempts * share),
            losses=round(whole.losses * share),
        )
        if self.by is By.JOB:
            self.forgotten.setdefault((NOBODY, price), Parts()).add(parts)
        else:
            self._row(self._key(hour) or NAMELESS, price).add(parts)
        self._use(hour.zone, price, parts.held)

    def stand(self, stand: Stand) -> None:
        """Set-up is nobody's: the slice is not ready for anybody. What is neither that nor held is idle."""
        ended = self.until if stand.ended_at is None else stand.ended_at
        ready = ended if stand.ready_at is None else min(stand.ready_at, ended)
        price, chips = stand.usd_per_chip_hour, stand.chips
        setup = chips * _within(stand.up_at, ready, self.since, self.until)
        existed = chips * _within(stand.up_at, ended, self.since, self.until)
        if not existed:
            return
        self._row(stand.zone if self.by is By.ZONE else NOBODY, price).setup += setup
        self._use(stand.zone, price, setup)
        at = stand.zone, price
        self._existed[at] = self._existed.get(at, 0.0) + existed

    def close(self) -> None:
        """Call once, after all facts: what existed and was not used was idle."""
        for (zone, price), existed in self._existed.items():
            idle = existed - self._used.get((zone, price), 0.0)
            if idle > 0:
                self._row(zone if self.by is By.ZONE else NOBODY, price).idle += idle

    def _row(self, name: str, price: float | None) -> Parts:
        found = self.rows.get((name, price))
        if found is None:
            found = self.rows[name, price] = Parts()
        return found

    def _use(self, zone: str, price: float | None, chip_s: float) -> None:
        self._used[zone, price] = self._used.get((zone, price), 0.0) + chip_s


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all prices. `usd` is None as soon as any of it has no known price."""

    parts: Parts
    usd: float | None
    usd_known: float
    unpriced_chip_s: float


def bill(sums: Iterable[tuple[float | None, Parts]]) -> Bill:
    total, known, unpriced = Parts(), 0.0, 0.0
    for price, parts in sums:
        total.add(parts)
        if price is None:
            unpriced += parts.total
        else:
            known += parts.total * price / HOUR_S
    return Bill(parts=total, usd=None if unpriced else known, usd_known=known, unpriced_chip_s=unpriced)


def goodput(parts: Parts) -> float | None:
    """The share that is known to be useful; None of nothing. What is unknown may be useful as well."""
    return parts.useful / parts.total if parts.total else None


# --- how often to save ---
class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How often a job saves, loses its capacity, and how often it should save (Young and Daly)."""

    losses: int
    saves: int
    between_losses_s: float | None = None
    save_s: float | None = None  #: what one save costs; None: the payload does not say
    every_s: float | None = None  #: None: something is not known


def pace(holds: list[Hold], now: float, life_s: float | None) -> Pace:
    """From the attempts of one job; `life_s` is what history says of its kind of capacity, for a job never lost."""
    ran = sum(
        max(0.0, (now if hold.closed_at is None else hold.closed_at) - hold.started_at)
        for hold in holds
        if hold.started_at is not None
    )
    losses = sum(1 for hold in holds if hold.cause in INFRASTRUCTURE_CAUSES and hold.started_at is not None)
    between = ran / losses if losses and ran > 0 else life_s
    saves = [save for hold in holds for save in hold.saves]
    timed = [save for save in saves if save.cost_s is not None]
    count = sum(save.count for save in timed)
    cost = sum((save.cost_s or 0.0) * save.count for save in timed) / count if count else None
    return Pace(
        losses=losses,
        saves=sum(max((save.count for save in hold.saves), default=0) for hold in holds),
        between_losses_s=between,
        save_s=cost,
        every_s=math.sqrt(2 * cost * between) if cost is not None and between is not None else None,
    )
