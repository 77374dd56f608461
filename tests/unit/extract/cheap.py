"""A whole small run in memory or in a directory, for tests of reading, sealing and checking."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

from penstock.domain import ledger
from penstock.domain.ledger import Unit
from penstock.extract.calls import Calls
from penstock.extract.layout import Compute, Piece, UnitFacts
from penstock.extract.plan import RunPlan, publish
from penstock.extract.unit_writer import Hands, UnitWriter
from penstock.extract.worker import Settings, Worker
from penstock.objects.directory import DirectoryObjects
from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import Draft, Ranged
from tests.process.extraction import cheap_compute, cheap_plan

T = TypeVar("T")


def calls_to(objects: Ranged) -> Calls:
    return Calls(objects, random.Random(1), patience_s=30)


async def finish(calls: Calls, plan: RunPlan, name: str = "one", compute: Compute | None = None) -> None:
    """Run one worker until the run is sealed."""
    await publish(calls, plan)
    settings = Settings(worker=name, lease_s=30, look_s=0.01, code="test")
    made = compute or cheap_compute()
    await Worker(calls, plan, made, settings, rng=random.Random(name), steady=time.monotonic).work()


def finished(objects: Ranged, rows: int = 30, unit_rows: int = 7) -> tuple[Calls, RunPlan]:
    calls, plan = calls_to(objects), cheap_plan(rows, unit_rows)
    asyncio.run(finish(calls, plan))
    return calls, plan


def kept(root: Path, rows: int) -> str:
    """The address of a run that was finished there."""
    _, plan = finished(DirectoryObjects(root), rows)
    return f"{root}/runs/{plan.run}"


def encode_unit(plan: RunPlan, unit: Unit, pieces: Iterable[Piece]) -> tuple[dict[str, bytes], UnitFacts]:
    """A unit's objects as bytes, and what is known of them."""
    hands, bucket = Hands(2), memory()
    writer = UnitWriter(plan, unit, hands, calls_to(bucket).draft)
    try:
        for piece in pieces:
            writer.add(piece)
        content = writer.finish(seconds=1.0, worker="w", code="c")
    finally:
        hands.close()
    objects: dict[str, bytes] = {}
    for name, made in content.objects.items():
        if isinstance(made.data, bytes):
            objects[name] = made.data
        else:
            asyncio.run(_named(made.data, name))
            stored = bucket.peek(name)
            assert stored is not None
            objects[name] = stored.data
        assert len(objects[name]) == made.size
        assert ledger.matches(objects[name], made.checksum)
    return objects, content.facts


async def _named(draft: Draft, name: str) -> None:
    await draft.name(name)


def memory() -> MemoryObjects:
    return MemoryObjects(now=time.time)  # noqa: TID251 (as a bucket's own clock)


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def call() -> T:
        return await work()

    return asyncio.run(call())
