"""Numbered migrations: which have run, which are missing, and whether any was changed after it ran.

`sqlite.py` and `postgres.py` call `migrate` when a store is opened; `doctor` asks `missing`. A migration is
`NNNN_name.sql`, then `NNNN_name.sqlite.sql` or `NNNN_name.postgres.sql`, run in one transaction that both
databases take back whole when it fails. A migration that has run anywhere is never edited: the next number
corrects it.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final

import msgspec

from penstock.ports.clock import Clock
from penstock.ports.store import StoreError
from penstock.store.dialects import Dialect
from penstock.store.link import Link

_TABLE_SQL: Final = """create table if not exists migrations (
  number integer not null primary key,
  name text not null,
  checksum text not null,
  applied_at double precision not null
)"""


class SchemaMismatch(StoreError):
    """The store was made by other migrations than this release has."""


class Migration(msgspec.Struct, frozen=True):
    number: int
    name: str
    sql: str
    checksum: str


def migrations(dialect: Dialect) -> list[Migration]:
    """All migrations of this release for one database, in order."""
    texts: dict[str, list[str]] = {}
    folder = files("penstock.store") / "migrations"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        name, _, rest = file.name.partition(".")
        # "0001_first.sql" sorts after "0001_first.postgres.sql", but runs first.
        if rest == "sql":
            texts.setdefault(name, []).insert(0, file.read_text("utf-8"))
        elif rest == f"{dialect.name}.sql":
            texts.setdefault(name, []).append(file.read_text("utf-8"))
    return [
        Migration(int(name[:4]), name, sql := "\n".join(parts), hashlib.sha256(sql.encode()).hexdigest())
        for name, parts in sorted(texts.items())
    ]


def missing(link: Link, known: list[Migration]) -> list[Migration]:
    """Those that have not run yet; raises `SchemaMismatch` when the others are not what this release has."""
    applied = link.rows("select number, name, checksum from migrations order by number")
    by_number = {migration.number: migration for migration in known}
    for number, name, checksum in applied:
        here = by_number.get(number)
        if here is None:
            raise SchemaMismatch(
                f"the store has migration {name}, this release has none of that number;"
                " use the release that made the store, or a newer one"
            )
        if here.checksum != checksum:
            raise SchemaMismatch(
                f"migration {name} was changed after it ran on this store; restore the file it ran from"
            )
    done = {number for number, _, _ in applied}
    return [migration for migration in known if migration.number not in done]


def migrate(link: Link, clock: Clock, known: list[Migration] | None = None) -> list[Migration]:
    """Bring the store up to `known` (this release's migrations) and answer those that were run now."""
    todo = migrations(link.dialect) if known is None else known
    ran: list[Migration] = []
    link.begin()
    try:
        link.script(_TABLE_SQL)
        link.commit(None)
    finally:
        link.rollback()
    for migration in todo:
        link.begin()
        try:
            # Asked again under the writers' lock: another process may be opening the same store.
            if any(one.number == migration.number for one in missing(link, todo)):
                link.script(migration.sql)
                insert = "insert into migrations (number, name, checksum, applied_at) values ($1, $2, $3, $4)"
                values = (migration.number, migration.name, migration.checksum, clock.now())
                link.write([(insert, [values])])
                link.commit(None)
                ran.append(migration)
        finally:
            link.rollback()
    return ran
