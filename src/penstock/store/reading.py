"""The reads of the port, each as one statement or a few, over any link.

Transaction functions get a `RowReader` (or the `RowTransaction` made from it); `doctor` and nobody else looks
at rows directly. Every statement here runs on an index whose size is what is live or asked for, except
`waiting_counts`. It must not write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.domain.cost import Hold, Hour
from penstock.domain.lifecycle import JobState
from penstock.domain.nouns import (
    Attempt,
    Control,
    Event,
    Job,
    Leader,
    Pool,
    Queue,
    Quota,
    Slice,
    Team,
    Zone,
)
from penstock.store import rows
from penstock.store.link import Link
from penstock.store.rows import Arguments, Row, Table

#: Sorts after every id and name we make: the open end of a range.
_LAST = "\U0010ffff"


class RowReader:
    """Reads of one consistent moment."""

    __slots__ = ("_dialect", "_link", "_rows")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._rows = link.rows
        self._dialect = link.dialect

    # A transaction overrides these three: it holds writes back, and remembers what it has read.

    def _settle(self, table: Table) -> None:
        """Before a read that may list any row of `table`."""

    def _settle_one(self, table: Table, id: str) -> None:
        """Before a read of one row."""

    def _seen(self, table: Table, nouns: list[Any]) -> list[Any]:  # noqa: ARG002
        return nouns

    def _list(self, table: Table, sql: str, arguments: Arguments = ()) -> list[Any]:
        self._settle(table)
        decode = table.decode
        return self._seen(table, [decode(row) for row in self._rows(sql, arguments)])

    def _one(self, table: Table, id: str, sql: str) -> Any:
        self._settle_one(table, id)
        found = self._rows(sql, (id,))
        return self._seen(table, [table.decode(found[0])])[0] if found else None

    def _chosen(self, table: Table, ids: Sequence[str], sql: str) -> list[Any]:
        """The rows of some ids, in the order asked for."""
        if not ids:
            return []
        for id_ in ids:
            self._settle_one(table, id_)
        decode = table.decode
        found = {noun.id: noun for noun in map(decode, self._rows(sql, (self._dialect.pack(ids),)))}
        return self._seen(table, [found[id_] for id_ in dict.fromkeys(ids) if id_ in found])

    def job(self, id: str) -> Job | None:
        self._settle_one(rows.JOBS, id)
        found = self._rows("select payload, spec, rest from jobs where id = $1", (id,))
        if not found:
            return None
        job = rows.whole_job(*found[0])
        self._seen(rows.JOBS, [job])
        return job

    def jobs(self, ids: Sequence[str]) -> list[Job]:
        return self._chosen(rows.JOBS, ids, self._dialect.jobs_by_ids)

    def payload_kinds(self, ids: Sequence[str]) -> dict[str, str]:
        if not ids:
            return {}
        self._settle(rows.JOBS)
        found = self._rows(self._dialect.payloads_by_ids, (self._dialect.pack(ids),))
        return {id_: rows.payload_kind(start) for id_, start in found}

    def job_by_key(self, team: str, key: str) -> Job | None:
        self._settle_one(rows.JOBS, key_mark(team, key))
        sql = "select spec, rest from jobs where team = $1 and idempotency_key = $2"
        found = self._rows(sql, (team, key))
        if not found:
            return None
        job = rows.light_job(*found[0])
        self._seen(rows.JOBS, [job])
        return job

    def jobs_page(self, *, team: str | None, states: Sequence[str], after: str | None, limit: int) -> list[Job]:
        below = _LAST if after is None else after
        if team is None and not states:
            return self._list(
                rows.JOBS,
                "select spec, rest from jobs where id < $1 order by id desc limit $2",
                (below, limit),
            )
        wanted = [state.value for state in JobState] if not states else [str(state) for state in states]
        found: list[Job] = []
        for state in dict.fromkeys(wanted):
            if team is None:
                sql = """select spec, rest from jobs where state = $1 and id < $2
                    order by id desc limit $3"""
                found += self._list(rows.JOBS, sql, (state, below, limit))
            else:
                sql = """select spec, rest from jobs where team = $1 and state = $2 and id < $3
                    order by id desc limit $4"""
                found += self._list(rows.JOBS, sql, (team, state, below, limit))
        found.sort(key=lambda job: job.id, reverse=True)
        return found[:limit]

    def jobs_with_prefix(self, prefix: str, limit: int) -> list[str]:
        self._settle(rows.JOBS)
        sql = "select id from jobs where id >= $1 and id < $2 order by id limit $3"
        return [row[0] for row in self._rows(sql, (prefix, prefix + _LAST, limit))]

    def snapshots_page(self, after: str, limit: int) -> list[tuple[str, str | None]]:
        self._settle(rows.JOBS)
        return [(id_, snapshot) for id_, snapshot in self._rows(self._dialect.snapshots, (after, limit))]

    def resumed_by_live(self) -> list[str]:
        # The pattern only spares most rows from being decoded; `parent` is left out of the text unless it is set.
        sql = """select spec, rest from jobs where state in ('queued', 'provisioning', 'running')
            and rest like '%"parent":"%'"""
        found = self._list(rows.JOBS, sql)
        return sorted({job.parent for job in found if job.parent is not None})

    def dependants(self, job: str) -> list[str]:
        self._settle(rows.JOBS)
        sql = """select dependencies.job from dependencies join jobs on jobs.id = dependencies.job
            where dependencies.needs = $1 and jobs.state in ('queued', 'provisioning', 'running')
            order by dependencies.job"""
        return [row[0] for row in self._rows(sql, (job,))]

    def under_way(self, array: str) -> int:
        self._settle(rows.JOBS)
        count: int = self._rows("select count(*) from jobs where place_in = $1", (array,))[0][0]
        return count

    def first_held(self, array: str) -> Job | None:
        sql = "select spec, rest from jobs where held_by = $1 order by priority desc, id limit 1"
        found = self._list(rows.JOBS, sql, (array,))
        return found[0] if found else None

    def queue_in_use(self, queue: str) -> str | None:
        self._settle(rows.JOBS)
        sql = """select id from jobs where queue = $1 and state in ('queued', 'provisioning', 'running')
            order by id limit 1"""
        found = self._rows(sql, (queue,))
        return found[0][0] if found else None

    def heads(self, queues: Sequence[str], limit: int) -> dict[str, list[Job]]:
        self._settle(rows.JOBS)
        answer: dict[str, list[Job]] = {queue: [] for queue in queues}
        if self._dialect.heads_at_once:
            for queue, spec, rest in self._rows(self._dialect.heads, (list(answer), limit)):
                answer[queue].append(rows.light_job(spec, rest))
        else:
            for queue, jobs in answer.items():
                jobs += [rows.light_job(*row) for row in self._rows(self._dialect.heads, (queue, limit))]
        for jobs in answer.values():
            self._seen(rows.JOBS, jobs)
        return answer

    def waiting_ahead(self, job: Job) -> int:
        self._settle(rows.JOBS)
        sql = (
            "select count(*) from jobs where waiting = 1 and queue = $1"
            " and (priority > $2 or (priority = $2 and id < $3))"
        )
        count: int = self._rows(sql, (job.spec.queue, job.priority, job.id))[0][0]
        return count

    def waiting_counts(self) -> dict[str, int]:
        self._settle(rows.JOBS)
        counts = self._rows("select queue, count(*) from jobs where waiting = 1 group by queue order by queue")
        return dict(counts)

    def live_jobs(self) -> list[Job]:
        return self._list(rows.JOBS, "select spec, rest from jobs where live = 1 order by id")

    def attempt(self, id: str) -> Attempt | None:
        found: Attempt | None = self._one(rows.ATTEMPTS, id, "select body from attempts where id = $1")
        return found

    def attempts(self, ids: Sequence[str]) -> list[Attempt]:
        return self._chosen(rows.ATTEMPTS, ids, self._dialect.attempts_by_ids)

    def live_attempts(self) -> list[Attempt]:
        return self._list(rows.ATTEMPTS, "select body from attempts where state <> 'closed' order by id")

    def attempts_of(self, job: str) -> list[Attempt]:
        return self._list(rows.ATTEMPTS, "select body from attempts where job = $1 order by fence", (job,))

    def holds(self, after: tuple[float, str], limit: int) -> list[tuple[tuple[float, str], Hold]]:
        self._settle(rows.ATTEMPTS)
        sql = """select closed_at, id, body from attempts where (closed_at, id) > ($1, $2)
            and closed_at is not null order by closed_at, id limit $3"""
        return [((at, id_), rows.hold(body)) for at, id_, body in self._rows(sql, (*after, limit))]

    def ledger_hours(self, first: int, last: int) -> list[Hour]:
        sql = """select hour, team, queue, owner, zone, price, useful, lost, unknown, setup, waited, attempts, losses
            from ledger where hour >= $1 and hour <= $2 order by hour, team, queue, owner, zone, price"""
        return [rows.hour(row) for row in self._rows(sql, (first, last))]

    def slice(self, id: str) -> Slice | None:
        found: Slice | None = self._one(rows.SLICES, id, "select body from slices where id = $1")
        return found

    def slices(self, ids: Sequence[str]) -> list[Slice]:
        return self._chosen(rows.SLICES, ids, self._dialect.slices_by_ids)

    def live_slices(self) -> list[Slice]:
        return self._list(rows.SLICES, "select body from slices where state <> 'gone' order by id")

    def race(self, race: str) -> list[Slice]:
        sql = "select body from slices where race = $1 and state <> 'gone' order by id"
        return self._list(rows.SLICES, sql, (race,))

    def tombstones(self, since: float) -> list[Slice]:
        sql = "select body from slices where state = 'gone' and gone_at >= $1 order by gone_at, id"
        return self._list(rows.SLICES, sql, (since,))

    def pool(self, name: str) -> Pool | None:
        found: Pool | None = self._one(rows.POOLS, name, "select body from pools where name = $1")
        return found

    def pools(self) -> list[Pool]:
        return self._list(rows.POOLS, "select body from pools order by name")

    def queue(self, name: str) -> Queue | None:
        found: Queue | None = self._one(rows.QUEUES, name, "select body from queues where name = $1")
        return found

    def queues(self) -> list[Queue]:
        return self._list(rows.QUEUES, "select body from queues order by name")

    def team(self, name: str) -> Team | None:
        found: Team | None = self._one(rows.TEAMS, name, "select body from teams where name = $1")
        return found

    def teams(self) -> list[Team]:
        return self._list(rows.TEAMS, "select body from teams order by name")

    def zone(self, id: str) -> Zone | None:
        found: Zone | None = self._one(rows.ZONES, id, "select body from zones where id = $1")
        return found

    def zones(self) -> list[Zone]:
        return self._list(rows.ZONES, "select body from zones order by id")

    def quota(self, scope: str, name: str) -> Quota | None:
        sql = """select scope, name, limit_chips, used_chips, version from quotas
            where scope = $1 and name = $2"""
        found = self._list(rows.QUOTAS, sql, (scope, name))
        return found[0] if found else None

    def quotas(self) -> list[Quota]:
        sql = "select scope, name, limit_chips, used_chips, version from quotas order by scope, name"
        return self._list(rows.QUOTAS, sql)

    def control(self) -> Control:
        found: Control = self._one(rows.CONTROL, "control", "select body from control where id = $1")
        return found

    def leader(self) -> Leader | None:
        sql = "select epoch, holder, version, renewed from leader where id = $1"
        found: Leader | None = self._one(rows.LEADER, "leader", sql)
        return found

    def _events(self, sql: str, arguments: Arguments) -> list[Event]:
        return [rows.event(row) for row in self._rows(sql, arguments)]

    def events(self, after: int, limit: int) -> list[Event]:
        sql = """select seq, at, kind, entity, id, version, actor, epoch, fence, body from events
            where seq > $1 order by seq limit $2"""
        return self._events(sql, (after, limit))

    def events_of(self, entity: str, id: str) -> list[Event]:
        sql = """select seq, at, kind, entity, id, version, actor, epoch, fence, body from events
            where entity = $1 and id = $2 order by seq"""
        return self._events(sql, (entity, id))

    def last_seq(self) -> int:
        found: list[Row] = self._rows("select coalesce(max(seq), 0) from events")
        return int(found[0][0])


def key_mark(team: str, key: str) -> str:
    """How a pending job is found by its idempotency key; no id contains a NUL."""
    return f"{team}\0{key}"
