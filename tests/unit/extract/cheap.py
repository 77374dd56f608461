"""A whole small run in memory or in a directory, for tests of reading, sealing and checking."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.extract.calls import Calls
from penstock.extract.plan import RunPlan, publish
from penstock.extract.worker import Settings, Worker
from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import Ranged
from tests.process.extraction import cheap_compute, cheap_plan

T = TypeVar("T")


def calls_to(objects: Ranged) -> Calls:
    return Calls(objects, random.Random(1), patience_s=30)


async def finish(calls: Calls, plan: RunPlan, name: str = "one") -> None:
    """Run one worker until the run is sealed."""
    await publish(calls, plan)
    settings = Settings(worker=name, lease_s=30, look_s=0.01, code="test")
    await Worker(calls, plan, cheap_compute(), settings, rng=random.Random(name), steady=time.monotonic).work()


def finished(objects: Ranged, rows: int = 30, unit_rows: int = 7) -> tuple[Calls, RunPlan]:
    calls, plan = calls_to(objects), cheap_plan(rows, unit_rows)
    asyncio.run(finish(calls, plan))
    return calls, plan


def memory() -> MemoryObjects:
    return MemoryObjects(now=time.time)  # noqa: TID251 (as a bucket's own clock)


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def call() -> T:
        return await work()

    return asyncio.run(call())
