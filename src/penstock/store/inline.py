"""The executor without threads: verbs run on the caller's own thread and are done when `transact` returns.

The simulator uses it, under a loop whose time is virtual: nothing here waits for real time, and no call
yields to the loop in between. `sqlite.py` makes it. Not for servers: each commit would stop the loop for a
sync of the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from penstock.ports.clock import Clock
from penstock.ports.store import Reader, Transaction, Unavailable
from penstock.store.link import Link
from penstock.store.reading import RowReader
from penstock.store.turns import Turns
from penstock.store.wake import Waker

T = TypeVar("T")
P = ParamSpec("P")


class InlineCore:
    """What all bound views of one store share."""

    __slots__ = ("link", "open", "turns", "waker")

    def __init__(self, link: Link, clock: Clock) -> None:
        self.link = link
        self.turns = Turns(link, clock)
        self.waker = Waker(RowReader(link).last_seq())
        self.open = True


class InlineStore:
    """A store on the caller's thread."""

    __slots__ = ("_actor", "_core", "_epoch")

    def __init__(self, core: InlineCore, *, actor: str = "system", epoch: int = 0) -> None:
        self._core = core
        self._actor = actor
        self._epoch = epoch

    async def transact(self, verb: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        core = self._core
        if not core.open:
            raise Unavailable("the store is closed")
        turns = core.turns
        turns.begin()
        try:
            result: T = turns.run(self._actor, self._epoch, False, verb, args, kwargs)
            grown = turns.commit()
        except BaseException:
            core.link.rollback()
            raise
        if grown:
            core.waker.grown(turns.seq)
        return result

    async def read(self, query: Callable[Concatenate[Reader, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        link = self._core.link
        if not self._core.open:
            raise Unavailable("the store is closed")
        link.begin_reading()
        try:
            return query(RowReader(link), *args, **kwargs)
        finally:
            link.rollback()

    @property
    def seq(self) -> int:
        """The last event committed: the order in which a simulated world stamps its own history."""
        return self._core.turns.seq

    def bound(self, *, actor: str, epoch: int = 0) -> InlineStore:
        return InlineStore(self._core, actor=actor, epoch=epoch)

    async def wait(self, after: int, timeout_s: float) -> None:
        await self._core.waker.wait(after, timeout_s)

    async def close(self) -> None:
        if self._core.open:
            self._core.open = False
            self._core.link.close()
