"""Time as the controller sees it. Two clocks: one for people and rows, one for waiting.

`now` may jump (NTP, a suspended laptop); `steady` never goes back. Whatever decides whether somebody else must have
given up by now is measured with `steady` of one process, never by comparing stamps of two machines.
"""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch, for stamps that people and rows keep."""

    def steady(self) -> float:
        """Seconds of this process, never going back, for waits."""

    async def sleep(self, seconds: float) -> None: ...
