"""The routes about cost: chip-seconds and money per job, user, queue or zone, and of one job with its checkpoints.

Rows are folded page by page, so that a month of attempts neither fills memory nor holds a reader for long; one request
looks at no more than a year. A team sees its own slices and attempts alone (S17). What the parts mean is in
`domain.cost`. It must not guess a price, nor whether something was saved.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from heapq import nsmallest
from itertools import chain
from typing import Final

import msgspec

from penstock.domain import cost
from penstock.domain.cost import By, Hold, Hour, Ledger, Parts, bill, goodput, hold_of, stand_of
from penstock.domain.nouns import Attempt, Job, Slice, untried
from penstock.ports.store import Reader
from penstock.server.routing import Call, Parameter, Refusal, Route
from penstock.server.service import Service
from penstock.wire.cost import CostPage, CostRow, JobCost

PAGE: Final = 5_000  #: attempts of one read
WINDOW_S_MAX: Final = 366 * 86_400.0
WEEK_S: Final = 7 * 86_400.0
ROWS: Final = 100
ROWS_MAX: Final = 1_000
_TIME_MAX: Final = 1e11
_Place = tuple[float, str]
_Sums = dict[float | None, Parts]  #: by price
_SAVING: Final = "wrap what saves in `with penstock.payload.saving():`"


# --- reading ---
def _read_standing(reader: Reader, since: float) -> tuple[list[Slice], list[Attempt], list[Hour]]:
    """Slices that existed after `since`, attempts that live, and sums of forgotten jobs."""
    slices = [*reader.live_slices(), *reader.tombstones(since)]
    return slices, reader.live_attempts(), _read_hours(reader, since)


def _read_hours(reader: Reader, since: float) -> list[Hour]:
    return reader.ledger_hours(math.floor(since / cost.HOUR_S), 1 << 30)


def _read_page(reader: Reader, after: _Place) -> list[tuple[_Place, Hold]]:
    return reader.holds(after, PAGE)


async def _fold(service: Service, by: By, since: float, until: float, team: str | None) -> Ledger:
    """All facts of a window. Should jobs be forgotten meanwhile, they would be missed or met twice: begin again."""
    for _ in range(3):
        slices, live, hours = await service.store.read(_read_standing, since)
        ledger = Ledger(by, since, until)
        seen: set[str] = {attempt.id for attempt in live}
        for attempt in live:
            if team in (None, attempt.team):
                ledger.hold(hold_of(attempt))
        async for page in _pages(service, (since, "")):
            for (_, id), hold in page:
                if (team is None or team == hold.team) and id not in seen:
                    ledger.hold(hold)
        if await service.store.read(_read_hours, since) != hours:
            continue
        for hour in hours:
            if team in (None, hour.team):
                ledger.hour(hour)
        for slice in slices:
            stand = stand_of(slice)
            if stand is not None and team in (None, stand.team):
                ledger.stand(stand)
        ledger.close()
        return ledger
    raise Refusal("unavailable", "jobs are being cleaned away; the sums would be wrong", retry_after_s=5.0)


async def _pages(service: Service, after: _Place) -> AsyncIterator[list[tuple[_Place, Hold]]]:
    """All closed attempts after a place. While one page is folded, the store's thread reads the next."""
    reading = asyncio.create_task(service.store.read(_read_page, after))
    try:
        while page := await reading:
            if len(page) == PAGE:
                reading = asyncio.create_task(service.store.read(_read_page, page[-1][0]))
                await asyncio.sleep(0)  # it begins, and others get their turn
            yield page
            if len(page) < PAGE:
                return
    finally:
        reading.cancel()


# --- showing ---
def _row(key: str, kind: str, sums: Iterable[tuple[float | None, Parts]]) -> CostRow:
    found = bill(sums)
    parts = found.parts
    return CostRow(
        key=key,
        kind=kind,  # type: ignore[arg-type]  # the callers' words are those of the struct
        chip_s=parts.total,
        useful_chip_s=parts.useful,
        lost_chip_s=parts.lost,
        unknown_chip_s=parts.unknown,
        setup_chip_s=parts.setup,
        idle_chip_s=parts.idle,
        waited_chip_s=parts.waited,
        usd=found.usd,
        usd_known=found.usd_known,
        unpriced_chip_s=found.unpriced_chip_s,
        goodput=goodput(parts),
        attempts=parts.attempts,
        losses=parts.losses,
    )


def page_of(ledger: Ledger, limit: int) -> CostPage:
    """The largest rows first, by chip-seconds; what is beyond the limit is one row, so that the rows add up."""
    size: dict[str, float] = {}
    for (name, _), parts in ledger.rows.items():
        total = parts.useful + parts.lost + parts.unknown + parts.setup + parts.idle  # a property of properties is slow
        size[name] = size[name] + total if name in size else total
    size.pop(cost.NOBODY, None)
    largest = nsmallest(limit, ((-chip_s, name) for name, chip_s in size.items()))
    groups: dict[str, _Sums] = {name: {} for _, name in largest}
    others: _Sums = {}
    nobody: _Sums = {}
    for (name, price), parts in ledger.rows.items():
        group = nobody if name == cost.NOBODY else groups.get(name, others)
        found = group.get(price)
        if found is None:
            found = group[price] = Parts()
        found.add(parts)
    forgotten = {price: parts for (_, price), parts in ledger.forgotten.items()}
    rows = [_row(name, "one", sums.items()) for name, sums in groups.items()]
    for kind, sums in (("others", others), ("forgotten", forgotten), ("nobody", nobody)):
        if sums:
            rows.append(_row("", kind, sums.items()))
    everything = chain.from_iterable(sums.items() for sums in (*groups.values(), others, forgotten, nobody))
    whole = _row("", "total", everything)
    return CostPage(by=ledger.by.value, since=ledger.since, until=ledger.until, rows=tuple(rows), total=whole)


async def get_cost(service: Service, call: Call) -> CostPage:
    """Where chip-seconds and money went in a time, by job, user, queue or zone."""
    now = service.clock.now()
    until = min(now, float(call.query.get("until", now)))
    # The answer says which time it is about: no more than a year of it, and nothing if it ends before it begins.
    since = min(until, max(until - WINDOW_S_MAX, float(call.query.get("since", until - WEEK_S))))
    ledger = await _fold(service, By(call.query.get("by", By.JOB.value)), since, until, call.walls)
    return page_of(ledger, call.whole("limit", ROWS))


# --- one job ---
def read_life(reader: Reader, attempt: Attempt | None) -> float | None:
    """How long a gang like this one's lives before capacity takes it away, as zones have learned it."""
    if attempt is None or not attempt.slices:
        return None
    slice = reader.slice(attempt.slices[0].slice)
    if slice is None:
        return None
    zone = reader.zone(untried(slice, slice.zone).id)
    return None if zone is None or zone.life_s is None else zone.life_s / len(attempt.slices)


def job_cost(job: Job, attempts: list[Attempt], life_s: float | None, now: float) -> JobCost:
    """The whole life of a job; pure."""
    ledger = Ledger(By.JOB, 0.0, now)
    holds = [hold_of(attempt) for attempt in attempts]
    for hold in holds:
        ledger.hold(hold)
    found = cost.pace(holds, now, life_s)
    return JobCost(
        id=job.id,
        row=_row(job.id, "one", [(price, parts) for (_, price), parts in ledger.rows.items()]),
        saves=found.saves,
        losses=found.losses,
        save_s=found.save_s,
        between_losses_s=found.between_losses_s,
        save_every_s=found.every_s,
        advice=_advice(found),
    )


def _advice(found: cost.Pace) -> str:
    if found.every_s is not None:
        return ""
    if found.between_losses_s is None:
        return "it was never lost, and nothing is known of how long its kind of capacity lives"
    return f"what a save costs is not known: {_SAVING}"


def _read_job(reader: Reader, id: str) -> tuple[list[Attempt], float | None]:
    attempts = reader.attempts_of(id)
    return attempts, read_life(reader, attempts[-1] if attempts else None)


async def get_job_cost(service: Service, call: Call) -> JobCost:
    """What one job used, and how often it should save."""
    job = await service.find_job(call, call.params["id"])
    attempts, life = await service.store.read(_read_job, job.id)
    now = service.clock.now()
    each = tuple(_row(one.id, "one", [(one.usd_per_chip_hour, _parts(one, now))]) for one in attempts)
    return msgspec.structs.replace(job_cost(job, attempts, life, now), attempts=each)


def _parts(attempt: Attempt, now: float) -> Parts:
    return cost.parts_of(hold_of(attempt), 0.0, now)


_QUERY: Final = (
    Parameter("by", "What the rows are.", choices=tuple(by.value for by in By)),
    Parameter("since", "From this moment on, in seconds; default: a week before.", "number", least=0, most=_TIME_MAX),
    Parameter("until", "Until this moment; default: now.", "number", least=0, most=_TIME_MAX),
    Parameter("limit", "Rows at most; the others are summed up.", "integer", least=1, most=ROWS_MAX),
)

ROUTES: Final = (
    Route("GET", "/v1/cost", get_cost, gives=CostPage, query=_QUERY),
    Route("GET", "/v1/jobs/{id}/cost", get_job_cost, gives=JobCost),
)
