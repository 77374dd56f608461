"""The writes of the port: compare-and-set, life cycles, counters, the log.

A verb gets a `RowTransaction`. Writes are held back and sent together: before a read that could see them, and
when the verb ends; one round trip then carries what many `add` and `save` calls asked for. Holding back is
safe because writers take turns: a version read in this transaction cannot change before it commits, so
compare-and-set is decided here and the statement only repeats the guard. What only the database can refuse (a
duplicate, a broken table) is therefore raised when the writes are sent, and ends the transaction: a verb
cannot catch `Refused` and go on. It must not commit; `turns.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from typing_extensions import override

from penstock.domain.cost import Hour
from penstock.domain.lifecycle import IllegalTransition
from penstock.domain.nouns import Event, Job, Leader
from penstock.ports.store import Conflict, E, QuotaFull, Refused, StaleLeader
from penstock.store import rows
from penstock.store.link import Link, Run
from penstock.store.reading import RowReader, key_mark
from penstock.store.rows import Arguments, Table

_EVENT_SQL = """insert into events (seq, at, kind, entity, id, version, actor, epoch, fence, body)
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"""
_DEPENDENCY_SQL = "insert into dependencies (job, needs) values ($1, $2)"
_COUNT_SQL = "update quotas set used_chips = used_chips + $1 where scope = $2 and name = $3"
_RENEW_SQL = "update leader set renewed = renewed + 1 where id = $1 and epoch = $2"


class RowTransaction(RowReader):
    """Reads and writes of one transaction."""

    __slots__ = (
        "_actor",
        "_at",
        "_counters",
        "_deltas",
        "_epoch",
        "_events_held",
        "_grouped",
        "_held",
        "_held_ids",
        "_known",
        "_refusal",
        "leader_epoch",
        "marked",
        "seq",
    )

    def __init__(
        self, link: Link, *, at: float, actor: str, epoch: int, seq: int, leader_epoch: int, grouped: bool
    ) -> None:
        super().__init__(link)
        self._at = at
        self._actor = actor
        self._epoch = epoch
        #: The last seq given out, and the epoch in force: as this transaction leaves them.
        self.seq = seq
        self.leader_epoch = leader_epoch
        #: In a group of transactions that commit together, a mark is set before the first write.
        self._grouped = grouped
        self.marked = False
        self._refusal: Refused | None = None
        self._held: dict[str, list[Run]] = {}
        self._held_ids: set[tuple[str, str]] = set()
        self._events_held: list[Arguments] = []
        self._known: dict[tuple[str, str], tuple[int, str | None]] = {}
        self._counters: dict[tuple[str, str], tuple[int | None, int]] = {}
        self._deltas: dict[tuple[str, str], int] = {}

    @property
    def at(self) -> float:
        return self._at

    # --- holding back ---

    def _hold(self, table: str, sql: str, arguments: Arguments) -> None:
        runs = self._held.get(table)
        if runs is None:
            self._held[table] = [(sql, [arguments])]
        elif runs[-1][0] is sql:
            runs[-1][1].append(arguments)
        else:
            runs.append((sql, [arguments]))

    def _release(self, table: Table) -> list[Run]:
        """What is held back for a table, in the order it was asked for."""
        runs = self._held.pop(table.name, [])
        if table is rows.JOBS:
            runs += self._held.pop("dependencies", [])
        elif table is rows.QUOTAS and self._deltas:
            runs.append((_COUNT_SQL, [(delta, *counter) for counter, delta in self._deltas.items() if delta]))
            self._deltas.clear()
        return runs

    def _send(self, runs: list[Run]) -> None:
        if self._grouped and not self.marked:
            self._link.mark()
            self.marked = True
        try:
            changed = self._link.write(runs)
        except Refused as refusal:
            self._refusal = refusal
            raise
        if changed != sum(len(arguments) for _, arguments in runs):
            # Cannot happen while writers take turns; somebody who does not is writing.
            raise Conflict(f"a row changed under this transaction: {runs[0][0].split(maxsplit=3)[:3]}")

    @override
    def _settle(self, table: Table) -> None:
        if table.name in self._held or (table is rows.QUOTAS and self._deltas):
            self._send(self._release(table))

    @override
    def _settle_one(self, table: Table, id: str) -> None:
        if (table.entity, id) in self._held_ids:
            self._settle(table)

    def finish(self) -> None:
        """Send everything still held back."""
        if self._refusal is not None:
            raise self._refusal
        if not self._held and not self._deltas and not self._events_held:
            return
        runs: list[Run] = []
        for held in self._held.values():
            runs += held
        self._held = {}
        runs += self._release(rows.QUOTAS)
        if self._events_held:
            runs.append((_EVENT_SQL, self._events_held))
            self._events_held = []
        self._send(runs)

    @override
    def _seen(self, table: Table, nouns: list[Any]) -> list[Any]:
        known, entity, id_of = self._known, table.entity, table.id
        if table.steps is None:
            for noun in nouns:
                known[entity, id_of(noun)] = (noun.version, None)
        else:
            for noun in nouns:
                known[entity, noun.id] = (noun.version, noun.state.value)
        return nouns

    # --- rows and events ---

    def _log(
        self,
        kind: str,
        entity: str,
        id: str,
        version: int,
        fence: int,
        body: Mapping[str, object] | None,
        epoch: int,
    ) -> None:
        self.seq += 1
        self._events_held.append(
            (
                self.seq,
                self._at,
                kind,
                entity,
                id,
                version,
                self._actor,
                epoch,
                fence,
                rows.text(body) if body else None,
            )
        )

    def _write(self, entity: Any, table: Table, sql: str, arguments: Arguments) -> str:
        id_ = table.id(entity)
        self._hold(table.name, sql, arguments)
        self._held_ids.add((table.entity, id_))
        self._known[table.entity, id_] = (entity.version, None if table.steps is None else entity.state.value)
        if table is rows.QUOTAS:
            self._counters.pop((entity.scope, entity.name), None)
        return id_

    def add(self, entity: E, kind: str, *, fence: int = 0, body: Mapping[str, object] | None = None) -> E:
        table = rows.TABLES[type(entity)]
        added: Any = msgspec.structs.replace(entity, version=1)
        if table.steps is not None and table.steps.get((None, kind)) != added.state.value:
            raise IllegalTransition(None, kind)
        id_ = self._write(added, table, table.insert_sql, table.row(added))
        if table is rows.JOBS:
            if added.key is not None:
                self._held_ids.add(("job", key_mark(added.spec.team, added.key)))
            for needed in dict.fromkeys(added.spec.after):
                self._hold("dependencies", _DEPENDENCY_SQL, (id_, needed))
        self._log(kind, table.entity, id_, 1, fence, body, self._epoch)
        return added  # type: ignore[no-any-return]

    def _expect(self, table: Table, entity: Any) -> str | None:
        """The state the row is in, once it is certain that the row has the version that was read."""
        known = self._known.get((table.entity, table.id(entity)))
        if known is None:
            found = self._rows(table.version_sql, tuple(getattr(entity, name) for name in table.key))
            if not found:
                raise Conflict(f"{table.entity} {table.id(entity)} does not exist")
            known = self._known[table.entity, table.id(entity)] = found[0][0], found[0][1]
        version, state = known
        if version != entity.version:
            raise Conflict(f"{table.entity} {table.id(entity)} is at version {version}, not {entity.version} as read")
        return state

    def save(self, entity: E, kind: str, *, fence: int = 0, body: Mapping[str, object] | None = None) -> E:
        table = rows.TABLES[type(entity)]
        old = self._expect(table, entity)
        saved: Any = msgspec.structs.replace(entity, version=entity.version + 1)
        if table.steps is not None and table.steps.get((old, kind)) != saved.state.value:
            raise IllegalTransition(None if old is None else type(saved.state)(old), kind)
        id_ = self._write(saved, table, table.change_sql, table.change(saved))
        self._log(kind, table.entity, id_, saved.version, fence, body, self._epoch)
        return saved  # type: ignore[no-any-return]

    # --- counters ---

    def reserve(self, scope: str, name: str, chips: int) -> None:
        counter = (scope, name)
        known = self._counters.get(counter)
        if known is None:
            self._settle_one(rows.QUOTAS, f"{scope}/{name}")
            sql = "select limit_chips, used_chips from quotas where scope = $1 and name = $2"
            found = self._rows(sql, counter)
            if found:
                known = found[0][0], found[0][1]
            else:
                self._hold("quotas", rows.QUOTAS.insert_sql, (scope, name, None, 0, 0))
                known = None, 0
        limit, used = known
        if chips > 0 and limit is not None and used + chips > limit:
            self._counters[counter] = known
            raise QuotaFull(scope, name, used, limit, chips)
        self._counters[counter] = limit, used + chips
        if chips:
            self._deltas[counter] = self._deltas.get(counter, 0) + chips

    # --- leadership ---

    def elect(self, holder: str) -> Leader:
        known = self.leader()
        if known is None:
            elected = Leader(epoch=1, holder=holder, version=1)
            self._write(elected, rows.LEADER, rows.LEADER.insert_sql, rows.LEADER.row(elected))
        else:
            elected = Leader(epoch=known.epoch + 1, holder=holder, version=known.version + 1)
            self._write(elected, rows.LEADER, rows.LEADER.change_sql, rows.LEADER.change(elected))
        self.leader_epoch = elected.epoch
        self._log("leader.elected", "leader", "leader", elected.version, 0, {"holder": holder}, elected.epoch)
        return elected

    def renew(self, epoch: int) -> None:
        if epoch != self.leader_epoch:
            raise StaleLeader(f"epoch {epoch} cannot be renewed: epoch {self.leader_epoch} leads")
        self._hold("leader", _RENEW_SQL, ("leader", epoch))
        self._held_ids.add(("leader", "leader"))

    # --- retention ---

    def purge(self, job: Job) -> None:
        old = self._expect(rows.JOBS, job)
        if old is None or (old, "job.purged") not in (rows.JOBS.steps or {}):
            raise IllegalTransition(job.state, "job.purged")
        for table in (rows.JOBS, rows.ATTEMPTS):
            self._settle(table)
        deletes: list[Run] = [
            ("delete from attempts where job = $1", [(job.id,)]),
            ("delete from dependencies where job = $1", [(job.id,)]),
            ("delete from jobs where id = $1", [(job.id,)]),
        ]
        self._directly(deletes)
        del self._known["job", job.id]
        self._log("job.purged", "job", job.id, job.version + 1, 0, None, self._epoch)

    def sum_up(self, hours: Sequence[Hour]) -> None:
        if hours:
            self._directly([(rows.SUM_UP_SQL, [rows.hour_row(hour) for hour in hours])])

    def forget_events(self, up_to: int) -> int:
        self._settle_events()
        # The newest event stays whatever is asked: the next seq is counted from it.
        sql = "delete from events where seq <= $1 and seq < (select max(seq) from events)"
        return self._directly([(sql, [(up_to,)])])

    def _directly(self, runs: list[Run]) -> int:
        """Send statements that may change any number of rows."""
        if self._grouped and not self.marked:
            self._link.mark()
            self.marked = True
        try:
            return self._link.write(runs)
        except Refused as refusal:
            self._refusal = refusal
            raise

    # --- the log, as this transaction sees it ---

    def _settle_events(self) -> None:
        if self._events_held:
            held, self._events_held = self._events_held, []
            self._send([(_EVENT_SQL, held)])

    @override
    def _events(self, sql: str, arguments: Arguments) -> list[Event]:
        self._settle_events()
        return super()._events(sql, arguments)

    @override
    def last_seq(self) -> int:
        return self.seq
