"""SQLite by apsw: the connection, its settings, and the two ways to open a store on it.

Wiring opens a file with a writer thread; the simulator opens one inline. Only apsw may touch the file: the
standard library's sqlite3 in the same process would drop apsw's locks. `synchronous=FULL` makes a commit
durable before anyone is told of it; the log is checkpointed rarely because a checkpoint is what the slowest
commits wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import apsw

from penstock.ports.clock import Clock
from penstock.ports.store import Refused, StoreError, Unavailable, UnknownOutcome
from penstock.store.dialects import SQLITE
from penstock.store.inline import InlineCore, InlineStore
from penstock.store.link import Link, Run
from penstock.store.migrate import migrate
from penstock.store.reading import RowReader
from penstock.store.rows import Arguments, Row
from penstock.store.threads import READERS, ThreadedStore
from penstock.store.wake import Waker

BUSY_S: Final = 10.0  #: how long a writer of another process is waited for
CHECKPOINT_PAGES: Final = 8000  #: 32 MB of log between checkpoints: p99 of a commit 3 ms instead of 4.5 ms
#: Pages kept in memory, in KiB, for the writer and for each reader. The living jobs' rows fit; ended ones must not fill
#: the server's memory, and the kernel keeps their pages anyway.
WRITER_CACHE_KIB: Final = 16_384
READER_CACHE_KIB: Final = 4_096
STATEMENTS_KEPT: Final = 200  #: prepared statements per connection; the store has fewer than a hundred texts

_READING: Final = ("query_only = on", f"cache_size = -{READER_CACHE_KIB}")
_WRITING: Final = (
    "journal_mode = wal",
    "synchronous = full",
    f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
    f"cache_size = -{WRITER_CACHE_KIB}",
)
_READ_WRITE: Final = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_URI
_CREATE: Final = _READ_WRITE | apsw.SQLITE_OPEN_CREATE


def _translate(error: apsw.Error) -> StoreError:
    text = str(error)
    if isinstance(error, apsw.ConstraintError):
        return Refused(text)
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return Unavailable(f"another process holds the store for longer than {BUSY_S:g} s: {text}")
    return Unavailable(f"SQLite failed: {type(error).__name__}: {text}")


class SqliteLink:
    """One connection to a file or to memory."""

    __slots__ = ("_connection", "_execute", "_lost", "_marked", "_path", "_reading", "_vfs", "dialect")

    def __init__(self, path: str, *, reading: bool = False, vfs: str | None = None) -> None:
        """Open `path`. A link for reading neither makes the file nor changes anything about it."""
        self.dialect = SQLITE
        self._path = path
        self._reading = reading
        self._vfs = vfs
        self._marked = False
        self._connect()

    def _connect(self) -> None:
        flags = _READ_WRITE if self._reading else _CREATE
        try:
            self._connection = apsw.Connection(
                self._path, flags=flags, vfs=self._vfs, statementcachesize=STATEMENTS_KEPT
            )
            self._execute = self._connection.execute
            self._connection.set_busy_timeout(int(BUSY_S * 1000))
            for pragma in _READING if self._reading else _WRITING:
                self._execute(f"pragma {pragma}").fetchall()
        except apsw.Error as error:
            raise Unavailable(f"{self._path}: {error}") from error
        self._lost = False

    def rows(self, sql: str, arguments: Arguments = ()) -> list[Row]:
        try:
            return self._execute(sql, arguments).fetchall()
        except apsw.Error as error:
            raise _translate(error) from error

    def write(self, runs: Sequence[Run]) -> int:
        connection = self._connection
        before = connection.total_changes()
        try:
            for sql, many in runs:
                if len(many) == 1:
                    self._execute(sql, many[0])
                else:
                    connection.executemany(sql, many)
        except apsw.Error as error:
            raise _translate(error) from error
        return connection.total_changes() - before

    def script(self, sql: str) -> None:
        try:
            self._execute(sql).fetchall()
        except apsw.Error as error:
            raise _translate(error) from error

    def begin(self) -> None:
        self._marked = False
        if self._lost:
            self._connect()
        self.script("begin immediate")

    def begin_reading(self) -> None:
        if self._lost:
            self._connect()
        self.script("begin")

    def mark(self) -> None:
        if self._marked:
            self.script("release verb")
        self.script("savepoint verb")
        self._marked = True

    def undo(self) -> None:
        # A disk error has rolled back everything already, the savepoint with it.
        if self._connection.in_transaction:
            self.script("rollback to verb")

    def commit(self, grown_to: int | None) -> None:  # noqa: ARG002
        try:
            self._execute("commit")
        except apsw.Error as error:
            # The commit record may have reached the file before the sync failed: after a crash it would count.
            raise UnknownOutcome(f"SQLite failed at commit: {type(error).__name__}: {error}") from error

    def rollback(self) -> None:
        if not self._connection.in_transaction:
            return
        try:
            self._execute("rollback")
        except apsw.Error:
            # Closing takes the transaction back as a crash would; the next one gets a connection of its own.
            self._connection.close(True)
            self._lost = True

    @property
    def in_transaction(self) -> bool:
        return not self._lost and self._connection.in_transaction

    def close(self) -> None:
        self._connection.close()


class SqliteStore:
    """Ways to open a store on SQLite."""

    @staticmethod
    def open(path: str | Path, clock: Clock, *, vfs: str | None = None) -> ThreadedStore:
        """A store on a file, with a writer thread; made when it does not exist."""
        writer = SqliteLink(str(path), vfs=vfs)
        migrate(writer, clock)
        readers: list[Link] = [SqliteLink(str(path), reading=True, vfs=vfs) for _ in range(READERS)]
        return ThreadedStore.over(writer, readers, clock, Waker(RowReader(writer).last_seq()))

    @staticmethod
    def inline(clock: Clock, path: str | Path = ":memory:") -> InlineStore:
        """A store without threads, for the simulator and for tests."""
        link = SqliteLink(str(path))
        migrate(link, clock)
        return InlineStore(InlineCore(link, clock))
