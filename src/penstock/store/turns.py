"""Running verbs one after the other in a transaction of the database: what every executor does the same way.

`inline.py` gives each verb a transaction of its own; `threads.py` lets many share one commit. Whatever a verb
raises undoes its own writes and nobody else's. It must not wait for anything but the database.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.ports.clock import Clock
from penstock.ports.store import StaleLeader
from penstock.store.link import Link
from penstock.store.writing import RowTransaction

_START_SQL = "select (select coalesce(max(seq), 0) from events), (select coalesce(max(epoch), 0) from leader)"


class Turns:
    """The verbs of one database transaction, in order."""

    __slots__ = ("_clock", "_epoch", "_link", "_rows", "_start", "seq")

    def __init__(self, link: Link, clock: Clock) -> None:
        self._link = link
        self._rows = link.rows
        self._clock = clock
        self._epoch = 0
        self._start = 0
        self.seq = 0

    def begin(self) -> None:
        self._link.begin()
        ((self.seq, self._epoch),) = self._rows(_START_SQL)
        self._start = self.seq

    def run(
        self,
        actor: str,
        epoch: int,
        grouped: bool,
        verb: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one verb; `grouped` verbs share the transaction with others and can be undone alone."""
        if epoch and epoch != self._epoch:
            raise StaleLeader(f"{actor} acts under epoch {epoch}, but epoch {self._epoch} leads")
        tx = RowTransaction(
            self._link,
            at=self._clock.now(),
            actor=actor,
            epoch=epoch,
            seq=self.seq,
            leader_epoch=self._epoch,
            grouped=grouped,
        )
        try:
            result = verb(tx, *args, **kwargs)
            tx.finish()
        except BaseException:
            if tx.marked:
                self._link.undo()
            raise
        self.seq = tx.seq
        self._epoch = tx.leader_epoch
        return result

    def commit(self) -> bool:
        """Make all of it durable; answers whether the log has grown."""
        grown = self.seq > self._start
        self._link.commit(self.seq if grown else None)
        return grown
