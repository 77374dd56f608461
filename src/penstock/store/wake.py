"""Who waits for the log to grow, and how they are told.

The store's `wait` registers here; whoever commits calls `grown` (on the loop's thread) or `grown_elsewhere`
(from any other). Being told too often is harmless, being missed is not: the position is compared and the
waiter added under one lock. It must not read the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Waker:
    def __init__(self, seq: int) -> None:
        self._lock = threading.Lock()
        self._seq = seq
        self._waiting: dict[asyncio.Future[None], int] = {}

    async def wait(self, after: int, timeout_s: float) -> None:
        """Return when the log has grown past `after`, or after `timeout_s`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._seq > after:
                return
            self._waiting[future] = after
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return
        finally:
            with self._lock:
                self._waiting.pop(future, None)

    def _due(self, seq: int) -> list[asyncio.Future[None]]:
        with self._lock:
            self._seq = max(self._seq, seq)
            # Word of one commit may come twice, by the writer and by the listener: the second wakes nobody.
            due = [future for future, after in self._waiting.items() if after < seq]
            for future in due:
                del self._waiting[future]
        return due

    def grown(self, seq: int) -> None:
        """The log has grown to `seq`; called on the thread of the waiters' loop."""
        for future in self._due(seq):
            _tell(future)

    def grown_elsewhere(self, seq: int) -> None:
        """The same, from another thread."""
        for future in self._due(seq):
            # A closed loop has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                future.get_loop().call_soon_threadsafe(_tell, future)


def _tell(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
