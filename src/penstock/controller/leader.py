"""Who may perform effects when several controllers share a store: a term that must be renewed, counted by epochs.

The loop asks `lead` before each tick. A standby watches the holder's renewal counter with its own steady clock and
takes over when it has not moved for a term: no two clocks are compared. Every effect commits under its epoch, so a
leader that slept through its term can do nothing to the store.
"""

from __future__ import annotations

from penstock.controller.verbs import verb
from penstock.domain import limits
from penstock.domain.nouns import Leader
from penstock.ports.clock import Clock
from penstock.ports.store import Reader, StaleLeader, Store, Transaction


@verb
def elect(tx: Transaction, holder: str, seen: tuple[int, int] | None) -> Leader | None:
    """Take the lead unless somebody renewed or took it since `seen` (epoch, renewals) was read."""
    leader = tx.leader()
    if leader is not None and (leader.epoch, leader.renewed) != seen:
        return None
    return tx.elect(holder)


@verb
def renew(tx: Transaction, epoch: int) -> None:
    tx.renew(epoch)


def _read_leader(reader: Reader) -> Leader | None:
    return reader.leader()


class Leadership:
    """One controller's view of who leads."""

    def __init__(self, store: Store, holder: str, clock: Clock) -> None:
        self._store = store
        self._holder = holder
        self._clock = clock
        self._watched: tuple[int, int] | None = None
        self._watched_since = clock.steady()
        self._renewed_at = 0.0
        self.epoch = 0  #: above 0 while this process leads

    async def lead(self) -> bool:
        """Renew or try to take the lead; whether this process leads now."""
        now = self._clock.steady()
        if self.epoch:
            return await self._hold(now)
        leader = await self._store.read(_read_leader)
        seen = (leader.epoch, leader.renewed) if leader is not None else None
        if seen != self._watched:
            self._watched, self._watched_since = seen, now
            if leader is not None and leader.holder != self._holder:
                return False
        if leader is not None and now - self._watched_since < self._patience(leader):
            return False
        elected = await self._store.transact(elect, self._holder, seen)
        if elected is None:
            return False
        self.epoch = elected.epoch
        self._renewed_at = now
        return True

    def _patience(self, leader: Leader) -> float:
        """Our own earlier incarnation cannot come back: the next one under the same name need not wait."""
        return 0.0 if leader.holder == self._holder else limits.LEADER_TTL_S

    async def _hold(self, now: float) -> bool:
        if now - self._renewed_at < limits.LEADER_RENEW_S:
            return True
        try:
            await self._store.transact(renew, self.epoch)
        except StaleLeader:
            self.step_down()
            return False
        self._renewed_at = now
        return True

    def step_down(self) -> None:
        self.epoch = 0
        self._watched = None
        self._watched_since = self._clock.steady()
