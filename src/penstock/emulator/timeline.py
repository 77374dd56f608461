"""What will happen in an emulated cloud, in order of time.

The emulated APIs put things here; whoever has the clock lets time pass: a server by the system's, a test by hand.
While something happens `now` is the moment it was due, so a late caller changes nothing about what happened when.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Timeline:
    """Due things by time, then by the order in which they were put here."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ahead = 0.0
        self.begin = clock()
        self.now = self.begin
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._put = 0

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._put += 1
        heapq.heappush(self._due, (max(when, self.now), self._put, what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def catch_up(self) -> None:
        """Let everything happen that is due by the clock."""
        until = max(self.now, self._clock() + self._ahead)
        while self._due and self._due[0][0] <= until:
            when, _, what = heapq.heappop(self._due)
            self.now = max(self.now, when)
            what()
        self.now = until

    def advance(self, seconds: float) -> None:
        """Put this timeline's time ahead of the clock, and let happen what is due by then."""
        self._ahead += seconds
        self.catch_up()

    def next_in(self) -> float | None:
        """Seconds until something is due; None if nothing is."""
        if not self._due:
            return None
        return max(0.0, self._due[0][0] - self._clock() - self._ahead)
