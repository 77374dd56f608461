"""How nouns become rows and rows become nouns: columns for what SQL filters by, JSON for everything.

`reading.py` decodes and `writing.py` encodes with what stands here, through `TABLES`. A job is split in three
texts: the spec and the payload, written once, and the rest, written with each change; a light read never
touches the payload. This module must not know of connections or transactions.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

import msgspec

from penstock.domain import lifecycle
from penstock.domain.cost import Hold, Hour, Parts
from penstock.domain.nouns import (
    Attempt,
    Control,
    Event,
    Job,
    JobSpec,
    Leader,
    Pool,
    Queue,
    Quota,
    Slice,
    Team,
    Zone,
)

Row = tuple[Any, ...]
Arguments = tuple[object, ...]

_encode = msgspec.json.Encoder().encode


def text(value: object) -> str:
    """JSON as text: both databases show it readably and neither has to understand it."""
    return _encode(value).decode()


def _part(noun: type[msgspec.Struct], name: str, left_out: str) -> type[msgspec.Struct]:
    """A struct with the fields of `noun` but one, which leaves out what is empty.

    Only empty defaults are left out: a default that says something (a timeout, a budget) may change in a
    later release, and a stored spec must keep meaning what it meant.
    """
    fields: list[Any] = []
    for field in msgspec.structs.fields(noun):
        if field.name == left_out:
            continue
        if field.default_factory in (dict, list):
            fields.append((field.name, field.type, msgspec.field(default_factory=field.default_factory)))
        elif field.default is not msgspec.NODEFAULT and not field.default:
            fields.append((field.name, field.type, field.default))
        else:
            fields.append((field.name, field.type))
    # Required fields first, so that the parts can be filled by position.
    fields.sort(key=len)
    return msgspec.defstruct(name, fields, omit_defaults=True)


_Spec: Final[Any] = _part(JobSpec, "Spec", "payload")
_Rest: Final[Any] = _part(Job, "Rest", "spec")
_spec_fields = attrgetter(*_Spec.__struct_fields__)
_rest_fields = attrgetter(*_Rest.__struct_fields__)

_decode_job = msgspec.json.Decoder(Job).decode
_decode_body = msgspec.json.Decoder(dict[str, object]).decode


def light_job(spec: str, rest: str) -> Job:
    """A job without its payload."""
    return _decode_job(f'{{"spec":{spec},{rest[1:]}')


def whole_job(payload: str, spec: str, rest: str) -> Job:
    return _decode_job(f'{{"spec":{{"payload":{payload},{spec[1:]},{rest[1:]}')


def payload_kind(start: str) -> str:
    """The tag of a payload from the first characters of its text, which is `{"type":"…",`."""
    return start.split('"', 4)[3]


def rest_text(job: Job) -> str:
    return text(_Rest(*_rest_fields(job)))


def lives(job: Job) -> bool:
    """Whether `live_jobs` lists the job: placed at least once, not finished."""
    return bool(job.chains) and job.state in lifecycle.LIVE_JOB_STATES


def _places(job: Job) -> tuple[str | None, str | None]:
    """The limited array that the job takes a place of, and the one that it waits for a place of."""
    if job.spec.throttle is None:
        return None, None
    array = job.spec.throttle.array
    return array if job.under_way else None, array if job.held else None


def event(row: Row) -> Event:
    seq, at, kind, entity, id_, version, actor, epoch, fence, body = row
    return Event(
        seq=seq,
        at=at,
        kind=kind,
        entity=entity,
        id=id_,
        version=version,
        actor=actor,
        epoch=epoch,
        fence=fence,
        body={} if body is None else _decode_body(body),
    )


def _job_row(job: Job) -> Arguments:
    spec = job.spec
    return (
        job.id,
        spec.team,
        spec.queue,
        job.state.value,
        job.priority,
        job.version,
        job.key,
        job.body_hash,
        1 if job.waiting else 0,
        1 if lives(job) else 0,
        job.created_at,
        job.finished_at,
        *_places(job),
        text(_Spec(*_spec_fields(spec))),
        text(spec.payload),
        rest_text(job),
    )


def _job_change(job: Job) -> Arguments:
    return (
        job.state.value,
        job.priority,
        job.version,
        1 if job.waiting else 0,
        1 if lives(job) else 0,
        job.finished_at,
        *_places(job),
        rest_text(job),
        job.id,
        job.version - 1,
    )


def _attempt_row(it: Attempt) -> Arguments:
    return (it.id, it.job, it.replica, it.fence, it.state.value, it.version, it.closed_at, text(it))


def _attempt_change(it: Attempt) -> Arguments:
    return (it.state.value, it.version, it.closed_at, text(it), it.id, it.version - 1)


def _slice_row(it: Slice) -> Arguments:
    return (it.id, it.state.value, it.pool, it.team, it.provider, it.race, it.gone_at, it.version, text(it))


def _slice_change(it: Slice) -> Arguments:
    return (it.state.value, it.race, it.gone_at, it.version, text(it), it.id, it.version - 1)


def _named_row(it: Pool | Queue | Team) -> Arguments:
    return (it.name, it.version, text(it))


def _named_change(it: Pool | Queue | Team) -> Arguments:
    return (it.version, text(it), it.name, it.version - 1)


def _id_row(it: Zone | Control) -> Arguments:
    return (it.id, it.version, text(it))


def _id_change(it: Zone | Control) -> Arguments:
    return (it.version, text(it), it.id, it.version - 1)


def _quota_row(it: Quota) -> Arguments:
    return (it.scope, it.name, it.limit_chips, it.used_chips, it.version)


def _quota_change(it: Quota) -> Arguments:
    return (it.limit_chips, it.version, it.scope, it.name, it.version - 1)


def _leader_row(it: Leader) -> Arguments:
    return (it.id, it.epoch, it.holder, it.renewed, it.version)


def _leader_change(it: Leader) -> Arguments:
    return (it.epoch, it.holder, it.renewed, it.version, it.id, it.version - 1)


#: Of an attempt only what the ledger needs: a tenth of the time that a whole one takes.
hold = msgspec.json.Decoder(Hold).decode

SUM_UP_SQL: Final = """insert into ledger (hour, team, queue, owner, zone, price,
    useful, lost, unknown, setup, waited, attempts, losses)
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
    on conflict (hour, team, queue, owner, zone, price) do update set
    useful = ledger.useful + excluded.useful, lost = ledger.lost + excluded.lost,
    unknown = ledger.unknown + excluded.unknown, setup = ledger.setup + excluded.setup,
    waited = ledger.waited + excluded.waited, attempts = ledger.attempts + excluded.attempts,
    losses = ledger.losses + excluded.losses"""
_UNPRICED: Final = -1.0


def hour_row(it: Hour) -> Arguments:
    price = _UNPRICED if it.usd_per_chip_hour is None else it.usd_per_chip_hour
    sums = it.parts
    amounts = (sums.useful, sums.lost, sums.unknown, sums.setup, sums.waited, sums.attempts, sums.losses)
    return (it.hour, it.team, it.queue, it.user, it.zone, price, *amounts)


def hour(row: Row) -> Hour:
    number, team, queue, user, zone, price, useful, lost, unknown, setup, waited, attempts, losses = row
    return Hour(
        hour=number,
        team=team,
        queue=queue,
        user=user,
        zone=zone,
        usd_per_chip_hour=None if price == _UNPRICED else price,
        parts=Parts(
            useful=useful,
            lost=lost,
            unknown=unknown,
            setup=setup,
            waited=waited,
            attempts=attempts,
            losses=losses,
        ),
    )


def _quota(row: Row) -> Quota:
    scope, name, limit_chips, used_chips, version = row
    return Quota(scope=scope, name=name, limit_chips=limit_chips, used_chips=used_chips, version=version)


def _leader(row: Row) -> Leader:
    epoch, holder, version, renewed = row
    return Leader(epoch=epoch, holder=holder, version=version, renewed=renewed)


def _from_body(noun: type[msgspec.Struct]) -> Callable[[Row], Any]:
    decode = msgspec.json.Decoder(noun).decode
    return lambda row: decode(row[0])


class Table:
    """One noun's table: how it is written and read. `decode` takes a row as reads select it."""

    __slots__ = (
        "change",
        "change_sql",
        "decode",
        "entity",
        "id",
        "insert_sql",
        "key",
        "name",
        "row",
        "steps",
        "version_sql",
    )

    def __init__(
        self,
        entity: str,
        name: str,
        *,
        row: Callable[[Any], Arguments],
        change: Callable[[Any], Arguments],
        decode: Callable[[Row], Any],
        insert_sql: str,
        change_sql: str,
        version_sql: str,
        id: str = "id",
        key: tuple[str, ...] = (),
    ) -> None:
        self.entity = entity
        self.name = name
        self.row = row
        self.change = change
        self.decode = decode
        self.insert_sql = insert_sql
        self.change_sql = change_sql
        self.version_sql = version_sql
        self.id: Callable[[Any], str] = attrgetter(id)
        #: Attributes that `version_sql` finds the row by.
        self.key = key or (id,)
        #: (old state, kind) -> new state, as plain text; None for nouns without a life cycle.
        self.steps: dict[tuple[str | None, str], str] | None = None
        if entity in lifecycle.TABLES:
            self.steps = {
                (old.value if old else None, kind): new.value for (old, kind), new in lifecycle.TABLES[entity].items()
            }


JOBS: Final = Table(
    "job",
    "jobs",
    row=_job_row,
    change=_job_change,
    decode=lambda row: light_job(*row),
    insert_sql="""insert into jobs (id, team, queue, state, priority, version, idempotency_key, body_hash,
        waiting, live, created_at, finished_at, place_in, held_by, spec, payload, rest)
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)""",
    change_sql="""update jobs set state = $1, priority = $2, version = $3, waiting = $4, live = $5,
        finished_at = $6, place_in = $7, held_by = $8, rest = $9 where id = $10 and version = $11""",
    version_sql="select version, state from jobs where id = $1",
)
ATTEMPTS: Final = Table(
    "attempt",
    "attempts",
    row=_attempt_row,
    change=_attempt_change,
    decode=_from_body(Attempt),
    insert_sql="""insert into attempts (id, job, replica, fence, state, version, closed_at, body)
        values ($1, $2, $3, $4, $5, $6, $7, $8)""",
    change_sql="""update attempts set state = $1, version = $2, closed_at = $3, body = $4
        where id = $5 and version = $6""",
    version_sql="select version, state from attempts where id = $1",
)
SLICES: Final = Table(
    "slice",
    "slices",
    row=_slice_row,
    change=_slice_change,
    decode=_from_body(Slice),
    insert_sql="""insert into slices (id, state, pool, team, provider, race, gone_at, version, body)
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9)""",
    change_sql="""update slices set state = $1, race = $2, gone_at = $3, version = $4, body = $5
        where id = $6 and version = $7""",
    version_sql="select version, state from slices where id = $1",
)
POOLS: Final = Table(
    "pool",
    "pools",
    row=_named_row,
    change=_named_change,
    decode=_from_body(Pool),
    insert_sql="insert into pools (name, version, body) values ($1, $2, $3)",
    change_sql="update pools set version = $1, body = $2 where name = $3 and version = $4",
    version_sql="select version, null from pools where name = $1",
    id="name",
)
QUEUES: Final = Table(
    "queue",
    "queues",
    row=_named_row,
    change=_named_change,
    decode=_from_body(Queue),
    insert_sql="insert into queues (name, version, body) values ($1, $2, $3)",
    change_sql="update queues set version = $1, body = $2 where name = $3 and version = $4",
    version_sql="select version, null from queues where name = $1",
    id="name",
)
TEAMS: Final = Table(
    "team",
    "teams",
    row=_named_row,
    change=_named_change,
    decode=_from_body(Team),
    insert_sql="insert into teams (name, version, body) values ($1, $2, $3)",
    change_sql="update teams set version = $1, body = $2 where name = $3 and version = $4",
    version_sql="select version, null from teams where name = $1",
    id="name",
)
ZONES: Final = Table(
    "zone",
    "zones",
    row=_id_row,
    change=_id_change,
    decode=_from_body(Zone),
    insert_sql="insert into zones (id, version, body) values ($1, $2, $3)",
    change_sql="update zones set version = $1, body = $2 where id = $3 and version = $4",
    version_sql="select version, null from zones where id = $1",
)
QUOTAS: Final = Table(
    "quota",
    "quotas",
    row=_quota_row,
    change=_quota_change,
    decode=_quota,
    insert_sql="""insert into quotas (scope, name, limit_chips, used_chips, version)
        values ($1, $2, $3, $4, $5)""",
    change_sql="""update quotas set limit_chips = $1, version = $2
        where scope = $3 and name = $4 and version = $5""",
    version_sql="select version, null from quotas where scope = $1 and name = $2",
    key=("scope", "name"),
)
CONTROL: Final = Table(
    "control",
    "control",
    row=_id_row,
    change=_id_change,
    decode=_from_body(Control),
    insert_sql="insert into control (id, version, body) values ($1, $2, $3)",
    change_sql="update control set version = $1, body = $2 where id = $3 and version = $4",
    version_sql="select version, null from control where id = $1",
)
LEADER: Final = Table(
    "leader",
    "leader",
    row=_leader_row,
    change=_leader_change,
    decode=_leader,
    insert_sql="insert into leader (id, epoch, holder, renewed, version) values ($1, $2, $3, $4, $5)",
    change_sql="""update leader set epoch = $1, holder = $2, renewed = $3, version = $4
        where id = $5 and version = $6""",
    version_sql="select version, null from leader where id = $1",
)

TABLES: Final[dict[type, Table]] = {
    Job: JOBS,
    Attempt: ATTEMPTS,
    Slice: SLICES,
    Pool: POOLS,
    Queue: QUEUES,
    Team: TEAMS,
    Zone: ZONES,
    Quota: QUOTAS,
    Control: CONTROL,
    Leader: LEADER,
}
TABLES_BY_ENTITY: Final[dict[str, Table]] = {table.entity: table for table in TABLES.values()}
