"""Background calls of one controller: each named, at most one per name at a time, bounded per lane and rate-limited.

The executor and the observer start provider and bucket calls here, so that no tick waits for the outside. Whoever calls
a zone does so in that zone's lane: a zone that hangs fills its own lane and delays no other. Errors the callers did not
expect are kept and reported by the loop, never lost with the task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine

from penstock.domain import limits
from penstock.ports.clock import Clock
from penstock.ports.store import StoreError


class Calls:
    """`at_once` is how many calls a lane lets through at a time."""

    def __init__(self, at_once: int) -> None:
        self._width = at_once
        self._lanes: dict[str, asyncio.Semaphore] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self.failures: deque[BaseException] = deque(maxlen=100)  #: unexpected ones, for the loop to raise or report

    def lane(self, name: str) -> asyncio.Semaphore:
        """To be held while calling one zone, or one bucket."""
        return self._lanes.setdefault(name, asyncio.Semaphore(self._width))

    def running(self, name: str) -> bool:
        return name in self._running

    def start(self, name: str, call: Callable[[], Coroutine[object, object, None]]) -> bool:
        """Start a call unless one of that name runs; false when it does."""
        if name in self._running:
            return False
        task = asyncio.get_running_loop().create_task(call(), name=name)
        self._running[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))
        return True

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._running.pop(name, None)
        if not task.cancelled():
            error = task.exception()
            # A store that is away, or a lost lead, shows in the tick as well: the call is simply made again.
            if error is not None and not isinstance(error, StoreError):
                self.failures.append(error)

    async def stop(self) -> None:
        """Cancel everything in flight and wait until it has ended."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Pace:
    """So many creates in any minute and no more, of which `at_once` may come together; and holds after "too often".

    One of them serves all zones of a provider. The rest of a minute's creates come one by one, because what left us
    evenly also arrives so: a burst that was slow on its way would meet the next one at the provider. A hold is for the
    kind of call that was refused: providers count them apart, and what is deleted makes room.
    """

    def __init__(self, clock: Clock, per_minute: int, at_once: int) -> None:
        self._clock = clock
        self._at_once = at_once
        self._per_s = (per_minute - at_once) / 60.0
        self._left = float(at_once)
        self._counted_at = clock.steady()
        self._held_until: dict[str, float] = {}

    def hold(self, call: str, seconds: float | None) -> None:
        """The provider asked for a rest from this kind of call."""
        until = self._clock.steady() + min(limits.RATE_REST_S if seconds is None else seconds, limits.RATE_REST_S_MAX)
        self._held_until[call] = max(self._held_until.get(call, 0.0), until)

    def held(self, call: str) -> bool:
        return self.left_s(call) > 0.0

    def left_s(self, call: str) -> float:
        """For how long the provider is to be left alone with this kind of call."""
        return max(0.0, self._held_until.get(call, 0.0) - self._clock.steady())

    @property
    def open(self) -> bool:
        """Whether a create may start now."""
        now = self._clock.steady()
        self._left = min(float(self._at_once), self._left + (now - self._counted_at) * self._per_s)
        self._counted_at = now
        # Sixty seconds of a sixtieth each are not quite one.
        return self._left >= 1.0 - 1e-9 and not self.held("create")

    def take(self) -> bool:
        """Whether a create may start now; it counts if so."""
        if not self.open:
            return False
        self._left -= 1.0
        return True
