"""Which store an address means: a PostgreSQL address or the path of an SQLite file.

Every process that keeps state opens its store here. The drivers are imported when they are needed, so that an
installation on SQLite does without psycopg. It must not decide anything else about the process.
"""

from __future__ import annotations

from errno import ENOENT
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.ports.clock import Clock
from penstock.ports.store import Store, Unavailable

if TYPE_CHECKING:
    from penstock.store.doctor import Finding
    from penstock.store.link import Link

_POSTGRES_SCHEMES = ("postgresql://", "postgres://")


def is_postgres(address: str) -> bool:
    return address.startswith(_POSTGRES_SCHEMES)


def open_store(address: str | Path, clock: Clock) -> Store:
    """The store at an address, made or brought up to this release's schema where needed."""
    if is_postgres(str(address)):
        from penstock.store.postgres import PostgresStore

        return PostgresStore.open(str(address), clock)
    from penstock.store.sqlite import SqliteStore

    return SqliteStore.open(address, clock)


def examine_store(address: str | Path) -> list[Finding]:
    """What `tpu doctor` says of the store at an address; the store is only read."""
    from penstock.store.doctor import examine

    try:
        link = _link(address)
    except Unavailable as error:
        # Commands know the operating system's errors; the port's are not theirs.
        raise ConnectionError(str(error)) from error
    try:
        return examine(link)
    finally:
        link.close()


def _link(address: str | Path) -> Link:
    if is_postgres(str(address)):
        from penstock.store.postgres import PostgresLink

        return PostgresLink(str(address))
    from penstock.store.sqlite import SqliteLink

    if not Path(address).is_file():
        raise FileNotFoundError(
            ENOENT, "there is no store here; name an SQLite file or a postgresql:// address", str(address)
        )
    return SqliteLink(str(address), reading=True)
