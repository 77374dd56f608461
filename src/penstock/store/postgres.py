"""PostgreSQL by psycopg: the connection, its settings, and the way to open a store on it.

Wiring opens it. All writers of an installation, in whatever process, take one advisory lock per transaction,
so that `seq` is commit order here too; other processes hear of new events by NOTIFY. While the server is away
calls fail with `Unavailable` and the next one tries again; a connection lost during COMMIT is
`UnknownOutcome`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.types.numeric import Int8Dumper

from penstock.ports.clock import Clock
from penstock.ports.store import Refused, StoreError, Unavailable, UnknownOutcome
from penstock.store.dialects import POSTGRES
from penstock.store.link import Link, Run
from penstock.store.migrate import migrate
from penstock.store.reading import RowReader
from penstock.store.rows import Arguments, Row
from penstock.store.threads import CLOSE_S, READERS, ThreadedStore
from penstock.store.wake import Waker

CONNECT_S: Final = 5  #: whole seconds; a server that does not answer by then is away
STATEMENT_S: Final = 20  #: no statement of ours takes a tenth of it
LOCK_S: Final = 10  #: how long another writer is waited for
IDLE_S: Final = 60  #: the server ends a stopped process's open transaction: others wait for its lock
LISTEN_S: Final = 1.0  #: how often the listener looks whether it should stop
RECONNECT_S: Final = 1.0  #: between attempts of the listener

# Every statement of ours has its index: a plan made while a table was small must not stay a scan when it has grown,
# and none is long enough to be worth compiling.
_SETTINGS: Final = f"""
set statement_timeout = '{STATEMENT_S}s'; set lock_timeout = '{LOCK_S}s';
set idle_in_transaction_session_timeout = '{IDLE_S}s';
set synchronous_commit = on; set client_encoding = 'UTF8';
set enable_seqscan = off; set jit = off
"""


def _translate(error: psycopg.Error) -> StoreError:
    text = " ".join(str(error).split())
    if isinstance(error, psycopg.IntegrityError | psycopg.DataError):
        return Refused(text)
    return Unavailable(f"PostgreSQL failed: {type(error).__name__}: {text}")


class PostgresLink:
    """One connection, made again when it was lost."""

    def __init__(self, url: str) -> None:
        self.dialect = POSTGRES
        self._url = url
        self._marked = False
        self._mark_next = False
        self._connection = self._connect()

    def _connect(self) -> psycopg.Connection[Any]:
        connection: psycopg.Connection[Any] | None = None
        try:
            connection = psycopg.connect(
                self._url,
                autocommit=True,
                prepare_threshold=0,
                connect_timeout=CONNECT_S,
                keepalives_idle=5,
                keepalives_interval=5,
                keepalives_count=3,
                tcp_user_timeout=STATEMENT_S * 1000,
                cursor_factory=psycopg.RawCursor,
            )
            connection.execute(_SETTINGS, prepare=False)
            # One type for all integers: otherwise each size of a number would be a prepared statement of its
            # own.
            connection.adapters.register_dumper(int, Int8Dumper)
            schema = connection.execute("select current_schema()").fetchall()[0][0]
        except psycopg.Error as error:
            if connection is not None:
                connection.close()
            raise Unavailable(f"PostgreSQL cannot be reached: {' '.join(str(error).split())}") from error
        if schema is None:
            connection.close()
            raise Unavailable("PostgreSQL has no schema in the search_path; create it, or name another")
        digest = hashlib.sha256(f"penstock/{schema}".encode()).digest()
        self._lock = int.from_bytes(digest[:8], "big", signed=True)
        #: Where this installation's commits are announced.
        self.channel = f"penstock_{digest.hex()[:16]}"
        return connection

    def _open(self, sql: str) -> None:
        """Start a transaction. A connection that died while it was idle is replaced: nothing was asked of it."""
        if not self._connection.closed:
            try:
                self._connection.execute(sql, prepare=False)
                return
            except psycopg.Error as error:
                if not self._connection.closed:
                    raise _translate(error) from error
        self._connection = self._connect()
        try:
            self._connection.execute(sql, prepare=False)
        except psycopg.Error as error:
            raise _translate(error) from error

    def rows(self, sql: str, arguments: Arguments = ()) -> list[Row]:
        try:
            return self._connection.execute(sql, arguments).fetchall()
        except psycopg.Error as error:
            raise _translate(error) from error

    def write(self, runs: Sequence[Run]) -> int:
        connection = self._connection
        try:
            cursors: list[psycopg.Cursor[Any]] = []
            # One round trip for all of it: nothing here depends on an answer.
            with connection.pipeline():
                if self._mark_next:
                    if self._marked:
                        connection.execute("release savepoint verb")
                    connection.execute("savepoint verb")
                    self._mark_next, self._marked = False, True
                for sql, many in runs:
                    cursor = connection.cursor()
                    cursors.append(cursor)
                    if len(many) == 1:
                        cursor.execute(sql, many[0])
                    else:
                        cursor.executemany(sql, many)
            return sum(cursor.rowcount for cursor in cursors)
        except psycopg.Error as error:
            raise _translate(error) from error

    def script(self, sql: str) -> None:
        try:
            self._connection.execute(sql, prepare=False)
        except psycopg.Error as error:
            raise _translate(error) from error

    def begin(self) -> None:
        self._marked = self._mark_next = False
        self._open(f"begin; select pg_advisory_xact_lock({self._lock})")

    def begin_reading(self) -> None:
        self._open("begin isolation level repeatable read read only")

    def mark(self) -> None:
        # Sent with the writes that follow.
        self._mark_next = True

    def undo(self) -> None:
        if self._mark_next or not self._marked or self._connection.closed:
            return
        try:
            self._connection.execute("rollback to savepoint verb")
        except psycopg.Error:
            # Then the transaction as a whole is lost, and `in_transaction` says so.
            self._connection.close()

    def commit(self, grown_to: int | None) -> None:
        tell = "" if grown_to is None else f"notify {self.channel}, '{grown_to}'; "
        try:
            cursor = self._connection.execute(f"{tell}commit", prepare=False)
            while cursor.nextset():
                pass
            verdict = cursor.statusmessage
        except psycopg.Error as error:
            if self._connection.closed:
                raise UnknownOutcome(f"PostgreSQL went away during a commit: {error}") from error
            raise _translate(error) from error
        if verdict != "COMMIT":
            raise Unavailable(f"PostgreSQL answered {verdict} to a commit; nothing was written")

    def rollback(self) -> None:
        connection = self._connection
        if connection.closed or connection.info.transaction_status == pq.TransactionStatus.IDLE:
            return
        try:
            connection.execute("rollback", prepare=False)
        except psycopg.Error:
            # The server ends the transaction of a connection that is gone.
            connection.close()

    @property
    def in_transaction(self) -> bool:
        return not self._connection.closed and self._connection.info.transaction_status == pq.TransactionStatus.INTRANS

    def hear(self, seconds: float) -> list[str]:
        """What was announced on the channel within some seconds; returns early with what there is."""
        try:
            return [notice.payload for notice in self._connection.notifies(timeout=seconds, stop_after=1)]
        except psycopg.Error as error:
            raise _translate(error) from error

    def close(self) -> None:
        self._connection.close()


class _Listener:
    """The thread that hears of other processes' commits."""

    def __init__(self, url: str, waker: Waker) -> None:
        self._url = url
        self._waker = waker
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="store-listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; called where waiting is allowed."""
        self._stopping.set()
        try:
            link = PostgresLink(self._url)
            link.script(f"notify {link.channel}, '0'")
            link.close()
        except StoreError:
            # The server is away: the thread sees the flag within LISTEN_S all the same.
            self._stopping.set()
        self._thread.join(CLOSE_S)

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except StoreError:
                # Nobody is misled: waiting ends by its own time-out, and truth is what is read.
                self._stopping.wait(RECONNECT_S)

    def _listen(self) -> None:
        link = PostgresLink(self._url)
        try:
            link.script(f"listen {link.channel}")
            # What was announced before this point is caught up with at once.
            self._waker.grown_elsewhere(RowReader(link).last_seq())
            while not self._stopping.is_set():
                for payload in link.hear(LISTEN_S):
                    self._waker.grown_elsewhere(int(payload))
        finally:
            link.close()


class PostgresStore:
    """The way to open a store on PostgreSQL."""

    @staticmethod
    def open(url: str, clock: Clock) -> ThreadedStore:
        """A store in the schema the address leads to; its tables are made when they do not exist."""
        writer = PostgresLink(url)
        migrate(writer, clock)
        readers: list[Link] = [PostgresLink(url) for _ in range(READERS)]
        waker = Waker(RowReader(writer).last_seq())
        return ThreadedStore.over(writer, readers, clock, waker, _Listener(url, waker).stop)
