"""Looks at a zone when the connection of one of its hosts breaks: what is taken away without a word ends like that.

`wiring.serve` hangs it on the bells of agents. A break proves nothing: the provider is asked, a few times because it
may know later than the machine did, and what it shows is taken in as by any other listing. Hosts that flap cost their
zone a bounded number of listings. It must not decide what became of a slice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from penstock.domain.nouns import Slice
from penstock.ports.clock import Clock

#: When to look after a break. Silence, which is waited for otherwise, takes longer (`limits.SILENCE_S`).
AFTER_S: Final = (0.0, 2.0, 6.0)
APART_S: Final = 0.5  #: between two looks at one zone, however many of its connections break

Zone = tuple[str, str]  #: provider, name


class Drops:
    """One per server; `look` lists a zone out of turn."""

    def __init__(
        self, clock: Clock, look: Callable[[str, str], None], slices: Callable[[], Mapping[str, Slice]]
    ) -> None:
        self._clock = clock
        self._look = look
        self._slices = slices
        self._looked: dict[Zone, float] = {}
        self._planned: dict[Zone, set[float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def dropped(self, slice: str) -> None:
        """A host of this slice is not there any more, or only its connection."""
        found = self._slices().get(slice)
        if found is None:
            return
        zone = (found.provider, found.zone)
        now = self._clock.steady()
        for after_s in AFTER_S:
            self._plan(zone, now, max(now + after_s, self._soonest(zone)))

    def _soonest(self, zone: Zone) -> float:
        return self._looked.get(zone, float("-inf")) + APART_S

    def _plan(self, zone: Zone, now: float, at: float) -> None:
        """A look at that moment, unless one is planned for it or soon after: that one serves as well."""
        planned = self._planned.setdefault(zone, set())
        if any(at <= other < at + APART_S for other in planned):
            return
        planned.add(at)
        task = asyncio.get_running_loop().create_task(self._look_later(zone, at - now, at))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look_later(self, zone: Zone, wait_s: float, at: float) -> None:
        try:
            await self._clock.sleep(wait_s)
        finally:
            self._planned[zone].discard(at)
        now = self._clock.steady()
        if now < self._soonest(zone):  # another break came meanwhile, and was looked after
            self._plan(zone, now, self._soonest(zone))
            return
        self._looked[zone] = now
        self._look(*zone)
