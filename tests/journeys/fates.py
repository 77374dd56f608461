"""What befalls a journey's controllers and provider calls, by address: this point, that zone, so many times.

`stage` hands these to the wrapped ports and stories set them. Nothing is drawn: the same story always goes the same
way. What they count (`passed`) is how a story knows which points lie on its way.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from penstock.capacity.fakecloud import Fault, FaultKind


class Fates:
    """The fate of every call of every controller; `of` gives the part of one (`sim.points.Fates`)."""

    def __init__(self) -> None:
        self.passed: Counter[tuple[str, str]] = Counter()
        self.struck = 0  #: crashes that happened
        self.down_until = -1.0
        self.blind_until = -1.0
        self._doomed: tuple[str, str, int] | None = None
        self._awaited: tuple[str, str, str, Callable[[], None]] | None = None

    def crash_at(self, point: str, side: str, nth: int = 1) -> None:
        """Let whoever passes the point for the n-th time from now on die there."""
        self._doomed = (point, side, nth)

    def when(self, controller: str, point: str, side: str, happens: Callable[[], None]) -> None:
        """Let something happen once, the next time that controller passes the point."""
        self._awaited = (controller, point, side, happens)

    def blind(self, seconds: float) -> None:
        """Reads of changes show nothing new, and no wake-up comes."""
        self.blind_until = asyncio.get_running_loop().time() + seconds

    def of(self, controller: str) -> FatesOf:
        return FatesOf(self, controller)

    def crash(self, controller: str, point: str, side: str) -> bool:
        self.passed[point, side] += 1
        if self._awaited is not None and self._awaited[:3] == (controller, point, side):
            happens = self._awaited[3]
            self._awaited = None
            happens()
        if self._doomed is None or (point, side) != self._doomed[:2]:
            return False
        nth = self._doomed[2] - 1
        self._doomed = None if nth == 0 else (point, side, nth)
        self.struck += nth == 0
        return nth == 0


class FatesOf:
    """What befalls the calls of one controller."""

    def __init__(self, fates: Fates, controller: str) -> None:
        self._fates = fates
        self._controller = controller

    def crash(self, point: str, side: str) -> bool:
        return self._fates.crash(self._controller, point, side)

    def store_down(self) -> bool:
        return asyncio.get_running_loop().time() < self._fates.down_until

    def stale_read(self) -> bool:
        return asyncio.get_running_loop().time() < self._fates.blind_until

    def commit_lost(self, point: str) -> bool:
        return False

    def commit_aborted(self, point: str) -> bool:
        return False

    def wake_lost(self) -> bool:
        """Who is blind is not woken either: it would look again and again at the same instant."""
        return self.stale_read()


class _Order(msgspec.Struct):
    """One fault that waits for its call."""

    verb: str
    fault: Fault | None
    where: str | None
    left: int
    skip: int
    once_struck: Callable[[str], None] | None


class CallFaults:
    """Faults of provider calls (`capacity.fake.Faults`), by verb and by zone or name of the slice."""

    def __init__(self, zone_of: Callable[[str], str]) -> None:
        self._zone_of = zone_of
        self._orders: list[_Order] = []

    def add(
        self,
        verb: str,
        kind: FaultKind | None,
        *,
        seconds: float = 0.0,
        where: str | None = None,
        times: int = 1,
        skip: int = 0,
        once_struck: Callable[[str], None] | None = None,
    ) -> None:
        """Strike `times` calls after `skip` have passed; `where` is a zone or a slice, None any.

        With no kind of fault the call goes well, and only `once_struck` happens right before it.
        """
        fault = None if kind is None else Fault(kind, seconds)
        self._orders.append(_Order(verb, fault, where, times, skip, once_struck))

    def clear(self) -> None:
        self._orders.clear()

    async def before(self, verb: str, name: str) -> Fault | None:
        for order in self._orders:
            if order.verb != verb or not order.left or order.where not in (None, name, self._zone_of(name)):
                continue
            if order.skip:
                order.skip -= 1
                continue
            order.left -= 1
            if order.once_struck is not None:
                order.once_struck(name)
            return order.fault
        return None

    async def after(self, verb: str, name: str) -> None:
        """Lost and slow replies are faults of `before`."""
