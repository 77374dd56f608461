"""What issue 5 promises of a large fleet: one full reconcile, the pace of creates, and that nobody says "too often".

`make bench-fleet`, or `python bench/fleet.py [--nodes N] [--quick] [--out FILE]`. The real emulator is a process of its
own without VMs (`tpu emulator --no-vms`) that refuses the 92nd create of a minute; the real controller, store (SQLite
on disk) and Cloud TPU provider speak to it over HTTP, as `tpu serve` does. Without VMs there are no agents: the bench
joins in their place once the emulator shows a node READY, and stands for their syncs. It fills a fleet in four zones at
the real pace, which is why a thousand nodes take 17 minutes, and then reconciles by hand: every zone listed, what is
seen committed, planned, decisions committed and calls begun. How many creates came in any minute, and every 429, is
read from the emulator's own books. Exits with 1 when a bound is missed or the fleet is not what was asked for.

`--quick` is forty nodes that are soon ready. Forty never fill a minute, so what it proves of the pace is how far
creates ran ahead of it in any stretch of time; a test runs it, so that what is claimed of a thousand cannot rot unseen.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import resource
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from core import Bound, Row, table
from served import TPU, p
from typing_extensions import override

from penstock.capacity.startup import Boot, metadata
from penstock.capacity.tpu_rest import FixedTokens, TpuRest
from penstock.capacity.tpu_vm import TpuVmCapacity
from penstock.controller.loop import Controller
from penstock.controller.witness import Evidence
from penstock.domain.custody import SyncRequest
from penstock.domain.ids import IdMaker
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Pool, Queue, Slice, Team
from penstock.objects.memory import MemoryObjects
from penstock.planner.actions import Plan
from penstock.ports.capacity import READY
from penstock.store.sqlite import SqliteStore
from penstock.wiring.clock import SystemClock

ZONES = ("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a")
CREATES_A_MINUTE = 91  #: what the Cloud TPU API allows a project
RECONCILE_S = 2.0
#: Creates go out one a second; so many more than seconds, in any stretch, make the most that a minute may have.
AHEAD = CREATES_A_MINUTE - 60
#: A create takes as long as on a good day, or for `--quick` not long; 429 tells how long to wait, as the service does.
GOOD_DAY, SOON = "[5.0, 40.0]", "[1.0, 4.0]"
WORLD = f"""
seed = 5
create_calls_per_minute = {CREATES_A_MINUTE}
retry_after_s = 30
[delays]
delete = [1.0, 5.0]
create = """
ROUNDS = 20
SYNC_S = 2.0
NODES_A_MINUTE = 60
PART = "fleet"


class Emulator:
    """The emulator's own books, at its control address."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid

    def control(self, method: str, what: str, content: object = None) -> Any:
        body = None if content is None else msgspec.json.encode(content)
        request = urllib.request.Request(f"{self.url}/_emulator/tpu/{what}", body, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return msgspec.json.decode(answer.read() or b"null")

    def busiest_minute(self) -> int:
        """The most creates that came in any sixty seconds."""
        at = self._creates()
        most = first = 0
        for last, moment in enumerate(at):
            while at[first] <= moment - 60.0:
                first += 1
            most = max(most, last - first + 1)
        return most

    def most_ahead(self) -> float:
        """By how many at most creates outran one a second, from any of them to any later one."""
        lowest, most = float("inf"), 0.0
        for before, each in enumerate(self._creates()):
            lowest = min(lowest, before - each)
            most = max(most, before + 1 - each - lowest)
        return most

    def _creates(self) -> list[float]:
        return [each["t"] for each in self.control("GET", "history") if each["what"] == "node.CREATING"]

    def calls(self, method: str = "", status: int | None = None) -> int:
        return sum(
            each["calls"]
            for each in self.control("GET", "calls")
            if method in ("", each["method"]) and status in (None, each["status"])
        )


@contextlib.contextmanager
def emulator(folder: Path, create_s: str) -> Iterator[Emulator]:
    world = folder / "world.toml"
    world.write_text(WORLD + create_s)
    argv = [str(TPU), "emulator", "--no-vms", "--world", str(world)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url.startswith("http://"):
                raise RuntimeError(f"the emulator did not start: {argv}")
            yield Emulator(url, process.pid)
        finally:
            process.terminate()
            process.wait(30)


class Timed(Controller):
    """The controller, with how long each of its ticks took."""

    ticks: list[float]

    @override
    async def tick(self) -> Plan:
        began = time.perf_counter()
        chosen = await super().tick()
        self.ticks.append(time.perf_counter() - began)
        return chosen


class Bench:
    def __init__(self, folder: Path, cloud: Emulator) -> None:
        self.clock = SystemClock()
        self.cloud = cloud
        self.store = SqliteStore.open(folder / "fleet.db", self.clock)
        self.rest = TpuRest("p1", FixedTokens("emulated"), endpoint=cloud.url, clock=self.clock)
        self.capacity = TpuVmCapacity(
            self.rest,
            label="penstock",
            clock=self.clock,
            metadata=_startup,
            changed=lambda zone: self.controller.look("tpu_vm", zone),
        )
        self.evidence = Evidence(self.clock)
        self.controller = self._controller(self.evidence)

    def _controller(self, evidence: Evidence) -> Timed:
        made = Timed(
            store=self.store,
            capacities={"tpu_vm": self.capacity},
            objects=MemoryObjects(),
            clock=self.clock,
            ids=IdMaker(lambda: secrets.randbits(30)),
            label="penstock",
            holder="bench",
            evidence=evidence,
        )
        made.ticks = []
        return made

    async def fill(self, nodes: int, wait_s: float) -> float:
        """A fleet from nothing, at the real pace; how long until every slice was ready."""
        commands = self.controller.commands
        await commands.put_team(Team(name="team"))
        await commands.put_queue(Queue(name="queue", team="team"))
        await commands.put_pool(
            Pool(
                name="fleet", team="team", provider="tpu_vm", accelerator="v5e-8", chips=0, hosts=0, zones=ZONES,
                per_zone=nodes // len(ZONES), max=nodes,
            )
        )  # fmt: skip
        began = time.monotonic()
        async with self._running(), asyncio.timeout(wait_s):
            while (ready := self._ready()) < nodes:
                if int(time.monotonic() - began) % 60 < SYNC_S:
                    print(f"bench-fleet: {ready} of {nodes} ready", file=sys.stderr, flush=True)
                await self._be_agents()
                await asyncio.sleep(SYNC_S)
        return time.monotonic() - began

    @contextlib.asynccontextmanager
    async def _running(self) -> Any:
        tasks = [asyncio.create_task(self.controller.run()), asyncio.create_task(self.capacity.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ready(self) -> int:
        return sum(slice.state is SliceState.READY for slice in self.controller.snapshot.slices.values())

    async def _be_agents(self) -> None:
        """What the agents of the nodes would send: join once, then be heard."""
        for slice in list(self.controller.snapshot.slices.values()):
            if slice.state is SliceState.CREATING and slice.provider_state == READY:
                await self.controller.agents.sync(
                    SyncRequest(
                        slice=slice.id,
                        provider_id=slice.provider_id or "",
                        host=0,
                        incarnation=f"i-{slice.id}",
                        held=(),
                    )
                )
            elif slice.state is SliceState.READY:
                self.evidence.heard(slice.id, 0)

    async def reconcile(self) -> float:
        """One round by hand: list every zone, commit what is seen, plan, commit, begin the calls."""
        controller = self.controller
        began = time.perf_counter()
        for zone in ZONES:
            controller.look("tpu_vm", zone)
        # Each zone is listed anew, because nothing else lists now; `measure` checks that the emulator was asked.
        while any(controller._calls.running(f"list tpu_vm {zone}") for zone in ZONES):  # noqa: ASYNC110 (nothing tells)
            await asyncio.sleep(0.001)
        await controller.tick()
        return time.perf_counter() - began

    async def rounds(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            await self._be_agents()
            times.append(await self.reconcile())
        return times

    async def from_nothing(self) -> float:
        """The same by a controller that has just started: it reads all that lives first."""
        self.evidence = Evidence(self.clock)
        began = time.perf_counter()
        self.controller = self._controller(self.evidence)
        await self.controller._leadership.lead()
        await self.controller.tick()
        await self.reconcile()
        return time.perf_counter() - began

    async def after_losses(self, share: int) -> tuple[int, float]:
        """One node in so many is preempted: how many, and how long until all of that is committed and under way."""
        names = sorted(self.controller.snapshot.slices)[::share]
        happen = [{"what": "preempt", "name": name} for name in names]
        await asyncio.to_thread(self.cloud.control, "POST", "happen", happen)
        took = await self.reconcile()
        await self.controller._projection.catch_up()
        lost = [self.controller.snapshot.slices[name].state for name in names]
        if lost.count(SliceState.PREEMPTED) + lost.count(SliceState.DELETING) != len(names):
            raise RuntimeError(f"{len(names)} nodes were preempted, and one reconcile knows of fewer: {lost}")
        return len(names), took

    async def close(self) -> None:
        await self.controller._calls.stop()
        await self.rest.close()
        await self.store.close()


def _startup(slice: Slice) -> dict[str, str]:
    """As large as the real thing: listings carry it."""
    server = "http://127.0.0.1:1"
    boot = Boot(server=server, bundle_url=f"{server}/v1/agent/bundle/{'0' * 64}", sha256="0" * 64, built_for="2.31")
    return dict(metadata(boot, slice.id, secrets.token_urlsafe(32), ()))


async def measure(nodes: int, folder: Path, *, judged: bool) -> list[Row]:
    with emulator(folder, GOOD_DAY if judged else SOON) as cloud:
        bench = Bench(folder, cloud)
        try:
            filled = await bench.fill(nodes, 300.0 + 2 * nodes / NODES_A_MINUTE * 60)
            ticks = bench.controller.ticks
            polled, creates = cloud.calls("operations.get"), cloud.calls("nodes.create")
            granted = cloud.calls("nodes.create", 200)
            before = cloud.calls("nodes.list")
            steady = await bench.rounds(ROUNDS)
            listed = cloud.calls("nodes.list") - before
            if listed < ROUNDS * len(ZONES):
                raise RuntimeError(f"{ROUNDS} rounds listed {listed} times")
            cold = await bench.from_nothing()
            bench.controller.ticks = []
            lost, losses_s = await bench.after_losses(10)
            too_often, busiest, ahead = cloud.calls(status=429), cloud.busiest_minute(), cloud.most_ahead()
        finally:
            await bench.close()
    at_most_2_s = Bound(RECONCILE_S, at_most=True) if judged else None
    minutes = filled / 60.0
    return [
        Row(part=PART, what=f"reconcile, {nodes} ready, p50", measured=p(steady, 50), unit="s", bound=at_most_2_s),
        Row(part=PART, what=f"reconcile, {nodes} ready, max of {ROUNDS}", measured=max(steady), unit="s",
            bound=at_most_2_s),
        Row(part=PART, what="the same by a new process", measured=cold, unit="s", bound=at_most_2_s),
        Row(part=PART, what=f"the same after {lost} preemptions", measured=losses_s, unit="s", bound=at_most_2_s),
        Row(part=PART, what="ticks while it filled, p50", measured=1e3 * p(ticks, 50), unit="ms"),
        Row(part=PART, what=f"ticks while it filled, max of {len(ticks):,}", measured=1e3 * max(ticks), unit="ms"),
        Row(part=PART, what="creates in the busiest minute", measured=busiest, unit="",
            bound=Bound(CREATES_A_MINUTE, at_most=True)),
        Row(part=PART, what="creates ahead of one a second", measured=ahead, unit="",
            bound=Bound(AHEAD, at_most=True)),
        Row(part=PART, what="listings in a reconcile", measured=listed / ROUNDS, unit="",
            bound=None if judged else Bound(len(ZONES), at_most=True)),
        Row(part=PART, what="answers 429", measured=too_often, unit="", bound=Bound(0, at_most=True)),
        Row(part=PART, what="creates called for, all in all", measured=creates, unit=""),
        Row(part=PART, what="of those not granted", measured=creates - granted, unit=""),
        Row(part=PART, what="operations asked about, a minute", measured=polled / minutes, unit=""),
        Row(part=PART, what="until all were ready", measured=minutes, unit="min"),
        Row(part=PART, what="memory of the controller", measured=resource.getrusage(
            resource.RUSAGE_SELF).ru_maxrss / 1024, unit="MiB"),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="what issue 5 promises of a large fleet")
    parser.add_argument("--nodes", type=int, default=1_000, help="nodes, in four zones")
    parser.add_argument("--quick", action="store_true", help="forty nodes that are soon ready, times not judged")
    parser.add_argument("--out", type=Path, default=None, help="write the figures here as JSON")
    options = parser.parse_args()
    nodes = 40 if options.quick else options.nodes - options.nodes % len(ZONES)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=".", ignore_cleanup_errors=True) as folder:
        rows = asyncio.run(measure(nodes, Path(folder).absolute(), judged=not options.quick))
    print(table(rows))
    if options.out is not None:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        report = {"machine": machine, "rows": [{**msgspec.to_builtins(row), "ok": row.ok} for row in rows]}
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
