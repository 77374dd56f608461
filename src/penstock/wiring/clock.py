"""The clocks of this machine, for processes that really run. Everything else takes a clock as an argument."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """Implements `ports.clock.Clock`."""

    def now(self) -> float:
        return time.time()  # noqa: TID251 (a process is where time comes from)

    def steady(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
