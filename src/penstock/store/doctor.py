"""Whether a store can be trusted: its schema, its file, its rows against its log, its counters, its attempts.

`tpu doctor --store` prints what `examine` finds; tests call it after every crash they cause. It reads rows as
they are, not through the port, because it must see what the port would trip over. It must not write, and it
must not stop at the first trouble.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Final

import msgspec

from penstock.domain import lifecycle
from penstock.domain.lifecycle import AttemptState, JobState, SliceState
from penstock.domain.nouns import Attempt, Slice
from penstock.ports.store import StoreError
from penstock.store import rows
from penstock.store.link import Link
from penstock.store.migrate import migrations, missing
from penstock.store.rows import Row

PAGE_ROWS: Final = 5_000  #: rows in memory at once, where rows are whole bodies
TROUBLES_SHOWN: Final = 5  #: of one check; the rest is counted

_ID_OF: Final = {
    "job": "id",
    "attempt": "id",
    "slice": "id",
    "pool": "name",
    "queue": "name",
    "team": "name",
    "zone": "id",
    "quota": "scope || '/' || name",
    "control": "id",
    "leader": "id",
}
_STATES: Final[dict[str, type[StrEnum]]] = {"job": JobState, "attempt": AttemptState, "slice": SliceState}


class Finding(msgspec.Struct, frozen=True):
    """The outcome of one check. `looked_at` says how much there was to check: 0 proves nothing."""

    check: str
    ok: bool
    looked_at: int
    troubles: tuple[str, ...] = ()
    more_troubles: int = 0


class _Look:
    """What one check has seen so far."""

    def __init__(self, check: str) -> None:
        self._check = check
        self._troubles: list[str] = []
        self._more = 0
        self.looked_at = 0

    def trouble(self, text: str) -> None:
        if len(self._troubles) < TROUBLES_SHOWN:
            self._troubles.append(text)
        else:
            self._more += 1

    def finding(self) -> Finding:
        ok = not self._troubles
        return Finding(self._check, ok, self.looked_at, tuple(self._troubles), self._more)


def examine(link: Link) -> list[Finding]:
    """Run all checks on one consistent moment of the store."""
    link.begin_reading()
    try:
        findings = [_run("schema", _schema, link)]
        if findings[0].ok:
            findings += [_run(name, check, link) for name, check in _CHECKS.items()]
        return findings
    finally:
        link.rollback()


def _run(name: str, check: Callable[[Link, _Look], None], link: Link) -> Finding:
    look = _Look(name)
    try:
        check(link, look)
    except (StoreError, msgspec.DecodeError) as error:
        look.trouble(f"{type(error).__name__}: {error}")
    return look.finding()


def _schema(link: Link, look: _Look) -> None:
    known = migrations(link.dialect)
    look.looked_at = len(known)
    for migration in missing(link, known):
        look.trouble(f"migration {migration.name} has not run; open the store with this release first")


def _integrity(link: Link, look: _Look) -> None:
    look.looked_at = 1
    for (verdict,) in link.rows(link.dialect.integrity):
        if verdict != "ok":
            look.trouble(str(verdict))


def _pages(link: Link, sql: str) -> Iterator[Row]:
    """All rows of a statement that takes the last id seen and a limit, and selects the id first."""
    last = ""
    while page := link.rows(sql, (last, PAGE_ROWS)):
        yield from page
        last = page[-1][0]


def _columns(link: Link, look: _Look) -> None:
    """The columns SQL filters by repeat what the bodies say."""
    for row in _pages(
        link,
        """select id, team, queue, state, priority, version, idempotency_key, body_hash, waiting, live,
        created_at, finished_at, place_in, held_by, spec, payload, rest from jobs
        where id > $1 order by id limit $2""",
    ):
        look.looked_at += 1
        spec, payload, rest = row[14:]
        if rows.JOBS.row(rows.whole_job(payload, spec, rest))[:14] != tuple(row[:14]):
            look.trouble(f"job {row[0]}: its columns and its body disagree")
    for row in _pages(
        link,
        """select id, job, replica, fence, state, version, body from attempts
        where id > $1 order by id limit $2""",
    ):
        look.looked_at += 1
        if rows.ATTEMPTS.row(rows.ATTEMPTS.decode(row[6:]))[:6] != tuple(row[:6]):
            look.trouble(f"attempt {row[0]}: its columns and its body disagree")
    for row in _pages(
        link,
        """select id, state, pool, team, provider, race, gone_at, version, body from slices
        where id > $1 order by id limit $2""",
    ):
        look.looked_at += 1
        if rows.SLICES.row(rows.SLICES.decode(row[8:]))[:8] != tuple(row[:8]):
            look.trouble(f"slice {row[0]}: its columns and its body disagree")


def _log(link: Link, look: _Look) -> None:
    ((count, first, last),) = link.rows("select count(*), coalesce(min(seq), 1), coalesce(max(seq), 0) from events")
    look.looked_at = count
    if count != last - first + 1:
        look.trouble(f"{count} events lie between seq {first} and {last}: {last - first + 1 - count} are missing")


def _entity_events(link: Link, entity: str) -> Iterator[tuple[str, list[Row]]]:
    """Per entity id its events (seq, version, kind), oldest first."""
    sql = """select seq, id, version, kind from events where entity = $1 and (id, seq) > ($2, $3)
        order by id, seq limit $4"""
    id_, seq, mine = "", 0, list[Row]()
    while page := link.rows(sql, (entity, id_, seq, PAGE_ROWS)):
        for row in page:
            if row[1] != id_:
                if mine:
                    yield id_, mine
                mine = []
            seq, id_ = row[0], row[1]
            mine.append((seq, row[2], row[3]))
    if mine:
        yield id_, mine


def _replay(entity: str, events: list[Row]) -> set[str | None]:
    """The states its events may have led to; more than one only when the log has forgotten the first."""
    steps = rows.TABLES_BY_ENTITY[entity].steps or {}
    possible: set[str | None] = {None} if events[0][1] == 1 else {state.value for state in _STATES[entity]}
    for _, _, kind in events:
        possible = {steps[state, kind] for state in possible if (state, kind) in steps}
    return possible


def _history(link: Link, look: _Look) -> None:
    """Each row stands where its last event left it, and versions rise by one."""
    ((forgotten,),) = link.rows("select coalesce(min(seq), 1) > 1 from events")
    for entity, table in rows.TABLES_BY_ENTITY.items():
        stands: dict[str, tuple[int, str | None]] = {}
        state = "state" if table.steps is not None else "null"
        sql = f"select {_ID_OF[entity]}, version, {state} from {table.name}"  # noqa: S608 - our own names
        for id_, version, now in link.rows(sql):
            stands[id_] = (version, now)
        for id_, events in _entity_events(link, entity):
            look.looked_at += 1
            _one_history(look, entity, id_, events, stands.pop(id_, None))
        for id_, (version, _) in stands.items():
            if version > 0 and not forgotten:
                look.trouble(f"{entity} {id_}: at version {version}, but the log has no event of it")


def _one_history(look: _Look, entity: str, id_: str, events: list[Row], stands: tuple[int, str | None] | None) -> None:
    versions = [version for _, version, _ in events]
    if versions != list(range(versions[0], versions[0] + len(versions))):
        look.trouble(f"{entity} {id_}: its versions do not rise by one")
    has_states = entity in lifecycle.TABLES
    purged = events[-1][2] == "job.purged"
    possible = _replay(entity, events) if has_states else set()
    if has_states and not possible:
        look.trouble(f"{entity} {id_}: its events are not a life cycle")
    elif stands is None:
        # The attempts of a purged job leave with it, without an event of their own.
        if not purged and not (entity == "attempt" and "closed" in possible):
            look.trouble(f"{entity} {id_}: its row is gone, but its last event is {events[-1][2]}")
    elif purged:
        look.trouble(f"{entity} {id_}: purged, but its row is there")
    elif stands[0] != versions[-1]:
        look.trouble(f"{entity} {id_}: row at version {stands[0]}, last event at version {versions[-1]}")
    elif has_states and stands[1] not in possible:
        look.trouble(f"{entity} {id_}: row is {stands[1]}, but its events lead to {', '.join(map(str, possible))}")


def _one_live(link: Link, look: _Look) -> None:
    ((look.looked_at,),) = link.rows("select count(*) from attempts where state <> 'closed'")
    for job, replica, count in link.rows(
        """select job, replica, count(*) from attempts where state <> 'closed'
        group by job, replica having count(*) > 1"""
    ):
        look.trouble(f"job {job} replica {replica}: {count} live attempts")


def sums(slices: list[Slice], attempts: list[Attempt]) -> Counter[tuple[str, str]]:
    """What the counters must say (S12): the one place that repeats how chips are counted.

    Team and pool count a slice until it is seen broken or leaving, and a racing set once, by its largest; the
    provider counts each until it is gone; a queue, and the cohort of a team's queues, count live attempts.
    """
    total: Counter[tuple[str, str]] = Counter()
    races: dict[str, Slice] = {}
    for one in slices:
        if one.state in lifecycle.BILLED_SLICE_STATES:
            total["provider", one.provider] += one.chips
        if one.state not in lifecycle.COUNTED_SLICE_STATES:
            continue
        if one.race is None:
            total["team", one.team] += one.chips
            total["pool", one.pool] += one.chips
        elif one.race not in races or races[one.race].chips < one.chips:
            races[one.race] = one
    for one in races.values():
        total["team", one.team] += one.chips
        total["pool", one.pool] += one.chips
    for attempt in attempts:
        if attempt.state in lifecycle.LIVE_ATTEMPT_STATES:
            total["queue", attempt.queue] += attempt.chips
            total["cohort", attempt.team] += attempt.chips
    return total


def _counters(link: Link, look: _Look) -> None:
    def nouns(table: rows.Table, sql: str) -> list[Any]:
        return [table.decode(row) for row in link.rows(sql)]

    must = sums(
        nouns(rows.SLICES, "select body from slices where state <> 'gone'"),
        nouns(rows.ATTEMPTS, "select body from attempts where state <> 'closed'"),
    )
    say = {(scope, name): used for scope, name, used in link.rows("select scope, name, used_chips from quotas")}
    for counter in sorted(must.keys() | say.keys()):
        look.looked_at += 1
        if say.get(counter, 0) != must[counter]:
            scope, name = counter
            look.trouble(f"{scope} {name}: the counter says {say.get(counter, 0)} chips, its holders {must[counter]}")


_CHECKS: Final[dict[str, Callable[[Link, _Look], None]]] = {
    "integrity": _integrity,
    "columns": _columns,
    "log": _log,
    "history": _history,
    "one live attempt": _one_live,
    "counters": _counters,
}
