"""Work that the code under test leaves to the background, and the quick patience with which it tries again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

Stage = TypeVar("Stage")


class Crew:
    """Runs what it is given, and can be waited for."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def rest(self) -> None:
        while self.tasks:
            await asyncio.gather(*self.tasks)


def played(made: Callable[[], Stage], play: Callable[[Stage], Awaitable[None]]) -> None:
    """A play on a fresh stage."""

    async def run() -> None:
        await play(made())

    asyncio.run(run())


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.firestore.patience.FIRST_S", 0.001)
    monkeypatch.setattr("penstock.firestore.patience.MOST_S", 0.001)
