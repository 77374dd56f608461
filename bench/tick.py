"""How long a tick takes with a million jobs waiting and ten thousand slices at work, on SQLite on disk.

`python bench/tick.py [--queued N] [--slices N] [--ticks N] [--json]`. The production controller, store and planner;
only the provider is a table that lists what exists. Each tick one percent of the slices report something new and a
hundred jobs are submitted, outside the timed part; what is timed is `Controller.tick` as the loop calls it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from penstock.controller.loop import Controller
from penstock.controller.witness import Evidence
from penstock.domain.custody import Held, Phase, SyncRequest
from penstock.domain.ids import IdMaker
from penstock.domain.nouns import Attempt, Command, Exit, JobSpec, Pool, Queue, Resources, Slice, Team
from penstock.objects.memory import MemoryObjects
from penstock.ports.capacity import READY, Listing, Seen
from penstock.store.sqlite import SqliteStore

QUEUES = 50
ZONES = tuple(f"zone-{number}" for number in range(8))
SUBMITS_PER_TICK = 100


class SystemClock:
    def now(self) -> float:
        return time.time()  # noqa: TID251

    def steady(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class TableCapacity:
    """A provider that grants everything at once and lists what it has."""

    name = "table"

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Seen]] = {zone: {} for zone in ZONES}

    async def create(self, wanted: Slice) -> Seen:
        seen = Seen(name=wanted.id, zone=wanted.zone, provider_id=f"vm-{wanted.id}", state=READY, label="bench")
        self.seen[wanted.zone][wanted.id] = seen
        return seen

    async def list(self, zone: str) -> Listing:
        return Listing(zone=zone, slices=tuple(self.seen[zone].values()))

    async def get(self, name: str, zone: str) -> Seen | None:
        return self.seen[zone].get(name)

    async def delete(self, name: str, zone: str) -> None:
        self.seen[zone].pop(name, None)


class Figures(msgspec.Struct, kw_only=True):
    """Seconds and bytes of one size."""

    queued: int
    slices: int
    running: int
    ticks: int
    tick_p50_ms: float
    tick_p99_ms: float
    tick_max_ms: float
    placed_per_tick: float
    steady_p50_ms: float
    steady_p99_ms: float
    dispatch_s: float  #: the one tick that places a job on every slice
    submit_100_p99_ms: float
    report_p99_ms: float
    rss_mib: float


class Bench:
    def __init__(self, directory: Path, slices: int) -> None:
        self.clock = SystemClock()
        self.store = SqliteStore.open(directory / "bench.db", self.clock)
        self.capacity = TableCapacity()
        entropy = random.Random(7)
        self.evidence = Evidence(self.clock)
        self.controller = Controller(
            store=self.store,
            capacities={"table": self.capacity},
            objects=MemoryObjects(),
            clock=self.clock,
            ids=IdMaker(lambda: entropy.getrandbits(29)),
            label="bench",
            holder="bench",
            evidence=self.evidence,
        )
        self.slices = slices
        self.number = 0
        self.placed: dict[str, str] = {}  #: slice -> attempt told to it

    def spec(self) -> JobSpec:
        self.number += 1
        return JobSpec(
            team="team",
            queue=f"queue-{self.number % QUEUES}",
            resources=Resources(accelerators=("v5e-8",), chips=8),
            payload=Command(("python", "train.py")),
            name=f"job-{self.number}",
            outputs=(),
        )

    async def set_up(self, queued: int) -> float:
        """Slices made, every one at work, and `queued` jobs waiting; how long placing on all of them took."""
        commands = self.controller.commands
        await commands.put_team(Team(name="team"))
        for number in range(QUEUES):
            await commands.put_queue(Queue(name=f"queue-{number}", team="team", weight=1 + number % 3))
        pool = Pool(
            name="pool", team="team", provider="table", accelerator="v5e-8", chips=8, hosts=1, zones=ZONES,
            min=self.slices, max=self.slices,
        )  # fmt: skip
        await self.controller._leadership.lead()
        await self._make_slices(pool)
        await self.submit(self.slices)
        started = time.perf_counter()
        await self.controller.tick()
        dispatch_s = time.perf_counter() - started
        await self.controller._projection.catch_up()
        await self.report(list(self.controller.snapshot.slices.values()))
        while queued > 0:
            await self.submit(min(queued, 10_000))
            queued -= 10_000
        await self.controller.tick()
        return dispatch_s

    async def _make_slices(self, pool: Pool) -> None:
        """Intents and sightings as the executor would commit them, without its sixty calls a minute."""
        from penstock.controller import slices as verbs

        await self.controller.commands.put_pool(pool)
        pool = (await self.store.read(lambda reader: reader.pool("pool"))) or pool
        names = [f"s{number:08d}" for number in range(self.slices)]
        for start in range(0, len(names), 1000):
            part = [(name, ZONES[int(name[1:]) % len(ZONES)]) for name in names[start : start + 1000]]
            await self.store.transact(verbs.intend, "pool", "team", part, None)
            seen = []
            for name, zone in part:
                wanted = Slice(
                    id=name, team="team", pool="pool", provider="table", zone=zone, accelerator="v5e-8", chips=8,
                    hosts=1, intended_at=0.0,
                )  # fmt: skip
                seen.append(await self.capacity.create(wanted))
            await self.store.transact(verbs.observe, seen)
        await self.controller._projection.catch_up()
        for name in names:
            await self.controller.agents.sync(self._request(name, ()))

    def _request(self, slice: str, held: tuple[Held, ...]) -> SyncRequest:
        return SyncRequest(slice=slice, provider_id=f"vm-{slice}", host=0, incarnation=f"i-{slice}", held=held)

    async def submit(self, count: int) -> float:
        started = time.perf_counter()
        await self.controller.commands.submit_many([(self.spec(), None) for _ in range(count)])
        return time.perf_counter() - started

    async def report(self, slices: list[Slice], *, ends: bool = False) -> list[float]:
        """These slices say that their attempt runs, or has ended well."""
        times = []
        attempts = self.controller.snapshot.attempts
        for slice in slices:
            attempt: Attempt | None = attempts.get(slice.attempt or "")
            if attempt is None:
                continue
            ended = Exit(host=0, code=0) if ends else None
            phase = Phase.EXITED if ends else Phase.RUNNING
            held = Held(attempt=attempt.id, fence=attempt.fence, phase=phase, exit=ended)
            started = time.perf_counter()
            await self.controller.agents.sync(self._request(slice.id, (held,)))
            times.append(time.perf_counter() - started)
        return times

    def hear_everyone(self) -> None:
        """The ninety-nine percent whose syncs bring nothing new."""
        for name in self.controller.snapshot.slices:
            self.evidence.heard(name, 0)

    async def busy_ticks(self, count: int) -> tuple[list[float], list[float], list[float], int]:
        ticks, submits, reports, placed = [], [], [], 0
        turn = 0
        for _ in range(count):
            snapshot = self.controller.snapshot
            ids = sorted(snapshot.slices)
            share = max(1, len(ids) // 200)
            ending = [snapshot.slices[ids[(turn + n) % len(ids)]] for n in range(share)]
            turn += share
            fresh = [
                snapshot.slices[bound.slice]
                for attempt in snapshot.attempts.values()
                if not attempt.started
                for bound in attempt.slices
            ]
            reports += await self.report(fresh[:share])
            reports += await self.report(ending, ends=True)
            submits.append(await self.submit(SUBMITS_PER_TICK))
            self.hear_everyone()
            started = time.perf_counter()
            chosen = await self.controller.tick()
            ticks.append(time.perf_counter() - started)
            placed += len(chosen.actions)
            await asyncio.sleep(0)
        return ticks, submits, reports, placed

    async def steady_ticks(self, count: int) -> list[float]:
        """Nothing happens but renewals, once everything has its place."""
        while (await self.controller.tick()).actions:
            pass
        ticks = []
        for _ in range(count):
            self.hear_everyone()
            started = time.perf_counter()
            await self.controller.tick()
            ticks.append(time.perf_counter() - started)
            await asyncio.sleep(0)
        return ticks


def share(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


async def measure(queued: int, slices: int, ticks: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=".") as directory:
        bench = Bench(Path(directory), slices)
        dispatch_s = await bench.set_up(queued)
        steady = await bench.steady_ticks(ticks)
        gc.collect()
        busy, submits, reports, placed = await bench.busy_ticks(ticks)
        running = len(bench.controller.snapshot.attempts)
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        await bench.controller._calls.stop()
        await bench.store.close()
    return Figures(
        queued=queued,
        slices=slices,
        running=running,
        ticks=ticks,
        tick_p50_ms=1e3 * share(busy, 0.5),
        tick_p99_ms=1e3 * share(busy, 0.99),
        tick_max_ms=1e3 * max(busy),
        placed_per_tick=placed / ticks,
        steady_p50_ms=1e3 * share(steady, 0.5),
        steady_p99_ms=1e3 * share(steady, 0.99),
        dispatch_s=dispatch_s,
        submit_100_p99_ms=1e3 * share(submits, 0.99),
        report_p99_ms=1e3 * share(reports, 0.99),
        rss_mib=rss,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queued", type=int, default=1_000_000)
    parser.add_argument("--slices", type=int, default=10_000)
    parser.add_argument("--ticks", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.queued, options.slices, options.ticks))
    if options.json:
        sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
    else:
        sys.stdout.write(json.dumps(msgspec.to_builtins(figures), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
