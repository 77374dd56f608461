"""What the store needs of a database connection, so that transactions are written once.

`sqlite.py` and `postgres.py` implement `Link`; `reading.py`, `writing.py`, `turns.py`, `migrate.py` and
`doctor.py` use it. A link turns the driver's errors into the port's; it must not know the schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.store.dialects import Dialect
from penstock.store.rows import Arguments, Row

#: One statement and the argument rows it is to be run with, in order.
Run = tuple[str, list[Arguments]]


class Link(Protocol):
    """One connection, used by one thread at a time."""

    dialect: Dialect

    def rows(self, sql: str, arguments: Arguments = ()) -> list[Row]:
        """All rows of one statement."""

    def write(self, runs: Sequence[Run]) -> int:
        """Run the statements in order and answer how many rows they changed."""

    def script(self, sql: str) -> None:
        """Run several statements without arguments, as a migration has them."""

    def begin(self) -> None:
        """Start a write transaction once no other writer of the installation has one."""

    def begin_reading(self) -> None:
        """Start a transaction that sees one moment and may not write."""

    def mark(self) -> None:
        """Set the point `undo` returns to; the one set before is given up."""

    def undo(self) -> None:
        """Take back everything since `mark`."""

    def commit(self, grown_to: int | None) -> None:
        """Make the transaction durable; tell listeners of other processes that the log has grown to this seq.

        Raises `UnknownOutcome` when the database may or may not have done it.
        """

    def rollback(self) -> None:
        """Drop the transaction, if there is one."""

    @property
    def in_transaction(self) -> bool:
        """False when there is none, or when the database has given it up with all it held."""

    def close(self) -> None: ...
