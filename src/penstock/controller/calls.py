"""Background calls of one controller: each named, at most one per name at a time, bounded and rate-limited.

The executor and the observer start provider and bucket calls here, so that no tick waits for the outside. Errors the
callers did not expect are kept and reported by the loop, never lost with the task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine

from penstock.ports.clock import Clock
from penstock.ports.store import StoreError


class Calls:
    def __init__(self, at_once: int) -> None:
        self._at_once = asyncio.Semaphore(at_once)
        self._running: dict[str, asyncio.Task[None]] = {}
        self.failures: deque[BaseException] = deque(maxlen=100)  #: unexpected ones, for the loop to raise or report

    def running(self, name: str) -> bool:
        return name in self._running

    def start(self, name: str, call: Callable[[], Coroutine[object, object, None]]) -> bool:
        """Start a call unless one of that name runs; false when it does."""
        if name in self._running:
            return False
        task = asyncio.get_running_loop().create_task(self._run(call), name=name)
        self._running[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))
        return True

    async def _run(self, call: Callable[[], Coroutine[object, object, None]]) -> None:
        async with self._at_once:
            await call()

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
    """At most so many starts per minute, evenly allowed in bursts; and a hold after "asked too often"."""

    def __init__(self, clock: Clock, per_minute: int) -> None:
        self._clock = clock
        self._per_minute = per_minute
        self._starts: deque[float] = deque()
        self._held_until = 0.0

    def hold(self, seconds: float) -> None:
        self._held_until = max(self._held_until, self._clock.steady() + seconds)

    def take(self) -> bool:
        """Whether a start is allowed now; it counts if so."""
        now = self._clock.steady()
        while self._starts and now - self._starts[0] >= 60.0:
            self._starts.popleft()
        if now < self._held_until or len(self._starts) >= self._per_minute:
            return False
        self._starts.append(now)
        return True
