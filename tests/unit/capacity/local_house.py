"""What the tests of local slices share: a machine with real processes, whose agents are stand-ins.

`conftest.py` makes a `House` per test and ends whatever a test left running.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from penstock.capacity import processes
from penstock.capacity.local import LocalCapacity
from penstock.capacity.processes import Process
from penstock.domain.nouns import Slice

STAND_IN = (sys.executable, "-S", str(Path(__file__).with_name("stand_in_agent.py")))
PATH_ONLY = {"PATH": os.environ["PATH"]}
T = TypeVar("T")


class Clock:
    """The machine's clocks, and a jump that tests may add."""

    ahead_s = 0.0

    def now(self) -> float:
        return 1_800_000_000.0 + self.steady()

    def steady(self) -> float:
        return time.monotonic() + self.ahead_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class House:
    """One machine with its slices directory; each `capacity` is what a server, or the next one, would have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self.told = 0
        self.manner = "steady"
        self.url = "http://127.0.0.1:1"

    def capacity(self, *, hosts_max: int = 8, command: tuple[str, ...] = STAND_IN) -> LocalCapacity:
        return LocalCapacity(
            self.folder,
            label="ours",
            clock=self.clock,
            server=lambda: self.url,
            join_token=lambda slice: f"token of {slice}",
            changed=self._note,
            command=command,
            environment={**PATH_ONLY, "STAND_IN": self.manner, "PENSTOCK_TOKEN": "x", "PENSTOCK_HOME": "/h"},
            hosts_max=hosts_max,
        )

    def _note(self) -> None:
        self.told += 1

    def file(self, slice: str, host: int, name: str) -> Path:
        return self.folder / slice / f"host-{host}" / name

    async def up(self, slice: str, hosts: int = 1) -> None:
        for host in range(hosts):
            await until(lambda host=host: self.file(slice, host, "ready").exists())  # type: ignore[misc]

    def starts(self, slice: str, host: int = 0) -> list[int]:
        file = self.file(slice, host, "starts")
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def family(self, slice: str) -> list[Process]:
        """Everything the agents of a slice noted, that still runs."""
        files = [*(self.folder / slice).glob("host-*/pids"), *(self.folder / slice).glob("host-*/starts")]
        pids = [int(line) for file in files for line in file.read_text().split()]
        return [found for pid in pids if (found := processes.find(pid)) is not None]


async def until(what: Callable[[], object], within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.02)


async def keeping(capacity: LocalCapacity, story: Callable[[], Awaitable[T]]) -> T:
    """Run a story while the capacity keeps its agents running."""
    keeper = asyncio.create_task(capacity.run())
    try:
        return await story()
    finally:
        keeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeper


def a_slice(id: str = "s1", hosts: int = 1) -> Slice:
    return Slice(
        id=id, team="red", pool="p", provider="local", zone="local", accelerator="v5e-8", chips=8, hosts=hosts,
        intended_at=0.0,
    )  # fmt: skip


async def state_of(capacity: LocalCapacity, name: str = "s1") -> str | None:
    seen = await capacity.get(name, "local")
    return None if seen is None else seen.state


def start(code: str, *words: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A Python process that nobody but the test started."""
    return subprocess.Popen([sys.executable, "-S", "-c", code, *words], env={**PATH_ONLY, **env})
