"""What would happen: a described fleet and job mix, run through the production controller in virtual time.

`tpu sim run FILE` reads a workload (zones with hidden rates, pools, queues, job classes), plays it without faults but
with preemptions and stockouts, and adds up makespan, cost, utilisation, waiting and waste. No rules are checked here
and nothing is recorded but sums, so that a day of ten thousand slices fits in minutes; see `sim.check` for the rules.
"""

from __future__ import annotations

import asyncio
import math
import random
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import msgspec
from typing_extensions import override

from penstock.capacity.fakecloud import ZoneModel
from penstock.controller import jobs
from penstock.controller.loop import Controller
from penstock.controller.witness import Evidence
from penstock.domain import catalogue
from penstock.domain.admission import BadInput
from penstock.domain.custody import SyncReply, SyncRequest
from penstock.domain.ids import IdMaker
from penstock.domain.nouns import Command, JobSpec, Pool, Queue, Resources, Rule, Team
from penstock.planner import zones as zone_order
from penstock.planner.actions import Place, Plan, Stop
from penstock.planner.snapshot import Snapshot
from penstock.ports.clock import Clock
from penstock.ports.store import Transaction
from penstock.sim.loop import VirtualClock, VirtualLoop, run
from penstock.sim.planted import swap
from penstock.sim.processes import Behaviour
from penstock.sim.tally import Tally
from penstock.sim.world import World
from penstock.store.sqlite import SqliteStore

LABEL = "penstock-sim"
HOUR = 3600.0


class ZoneSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One zone as it truly is: the planner has to find out."""

    name: str
    chips: int = 1_000_000
    refusal_rate: float = 0.0
    preemptions_per_hour: float = 0.0
    notice_s: float = 0.0
    ready_s: tuple[float, float] = (60.0, 180.0)
    flips_at_h: float | None = None  #: from then on `refusal_rate_after` holds
    refusal_rate_after: float = 0.0


class PoolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    accelerator: str
    zones: tuple[str, ...] = ()  #: all, when empty
    min: int = 0
    max: int = 1
    spot: bool = True
    idle_s: float = 600.0
    race: int = 1


class QueueSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    weight: float = 1.0
    band: int = 0
    quota_chips: int | None = None
    borrow_chips: int | None = None


class JobClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs of one kind, arriving evenly from `from_h` on over `over_h` hours (0: all at once)."""

    accelerator: str
    count: int
    queue: str = "default"
    duration_s: tuple[float, float] = (600.0, 3600.0)
    checkpoint_s: float = 600.0
    slices: int = 1
    from_h: float = 0.0
    over_h: float = 0.0
    priority: int = 0


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole question: zones, pools, queues, jobs. `order` compares learned zone odds with the order as written."""

    zones: tuple[ZoneSpec, ...]
    pools: tuple[PoolSpec, ...]
    jobs: tuple[JobClass, ...]
    queues: tuple[QueueSpec, ...] = (QueueSpec("default"),)
    name: str = "workload"
    seed: int = 0
    hours_max: float = 24.0 * 14
    order: Literal["learned", "fixed"] = "learned"


class WorkloadResult(msgspec.Struct, kw_only=True):
    """The answer, in hours, dollars and shares. Money is null when a price is unknown."""

    name: str
    seed: int
    jobs: int
    succeeded: int
    failed: int
    unfinished: int
    makespan_h: float
    usd: float | None
    utilisation: float  #: useful chip-hours of all chip-hours held
    useful_chip_h: float
    wasted_chip_h: float  #: run and lost because no checkpoint held it
    held_chip_h: float
    wait_mean_s: float
    wait_p50_s: float
    wait_p95_s: float
    preemptions: int
    creates: int
    refusals: int
    events: int
    ticks: int


def read_workload(path: Path, *, seed: int | None = None, order: str | None = None) -> Workload:
    """Read and check a workload file; what is wrong is said with its field."""
    try:
        fields = tomllib.loads(path.read_text())
        if seed is not None:
            fields["seed"] = seed
        if order is not None:
            fields["order"] = order
        return msgspec.convert(fields, Workload)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput("workload", str(path), f"is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise BadInput("workload", str(path), f"does not fit: {error}") from error


def run_workload(workload: Workload) -> WorkloadResult:
    """Play a workload to its end in virtual time."""
    with ExitStack() as stack:
        if workload.order == "fixed":
            stack.callback(swap(zone_order, "rank", _as_written))
        return run(_Play(workload).play())


def _as_written(snapshot: Snapshot, pool: Pool, now: float, ahead: int = 0) -> list[str]:  # noqa: ARG001
    """The order most scripts use: always the first zone that is not in back-off."""
    return list(pool.zones)


class _QuietEvidence(Evidence):
    """Hosts that are alive are heard: no sync has to happen for it."""

    def __init__(self, clock: Clock, world: World) -> None:
        super().__init__(clock)
        self._world = world

    @override
    def silent_slices(self, snapshot: Snapshot, steady: float) -> dict[str, float]:
        """Only slices the world knows a dead host of are looked at."""
        return {
            id: steady - since
            for id, since in self._world.dead_since().items()
            if id in snapshot.slices and snapshot.slices[id].ready_at is not None
        }


class _Play:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.rng = random.Random(f"workload {workload.seed}")
        self.clock = VirtualClock()
        self.tally = Tally()
        self.classes: dict[str, JobClass] = {}
        self.left_s: dict[str, float] = {}
        self.arrived = 0
        self.ticks = 0

    async def play(self) -> WorkloadResult:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        workload = self.workload
        self.store = SqliteStore.inline(self.clock)
        self.world = World(
            rng=self.rng, behaviour=self._behave, recorder=self.tally, server=self._serve, label=LABEL,
            delay_s=(0.0, 0.0), quiet=True,
        )  # fmt: skip
        self._set_zones(loop)
        entropy = random.Random(f"ids {workload.seed}")
        self.controller = Controller(
            store=self.store,
            capacities={"fake": self.world.capacity("fake")},
            objects=self.world.objects("controller"),
            clock=self.clock,
            ids=IdMaker(lambda: entropy.getrandbits(29)),
            label=LABEL,
            holder="simulated",
            evidence=_QuietEvidence(self.clock, self.world),
            ticked=self._ticked,
        )
        await self._set_up()
        serving = loop.create_task(self.controller.run())
        loop.watch(serving)
        arrivals = loop.create_task(self._arrive())
        loop.watch(arrivals)
        try:
            await self._until_done(arrivals)
        finally:
            serving.cancel()
            arrivals.cancel()
            await asyncio.gather(serving, arrivals, return_exceptions=True)
        return self._result()

    def _set_zones(self, loop: VirtualLoop) -> None:
        for zone in self.workload.zones:
            model = ZoneModel(
                chips=zone.chips,
                ready_s=zone.ready_s,
                delete_s=(5.0, 30.0),
                refusal_rate=zone.refusal_rate,
                preemptions_per_hour=zone.preemptions_per_hour,
                notice_s=zone.notice_s,
            )
            self.world.cloud.set_zone(zone.name, model)
            if zone.flips_at_h is not None:
                flipped = msgspec.structs.replace(model, refusal_rate=zone.refusal_rate_after)
                loop.call_at(zone.flips_at_h * HOUR, self.world.cloud.set_zone, zone.name, flipped)

    async def _set_up(self) -> None:
        commands = self.controller.commands
        await commands.put_team(Team(name="team"))
        for queue in self.workload.queues:
            await commands.put_queue(
                Queue(
                    name=queue.name, team="team", weight=queue.weight, band=queue.band,
                    quota_chips=queue.quota_chips, borrow_chips=queue.borrow_chips,
                )
            )  # fmt: skip
        all_zones = tuple(zone.name for zone in self.workload.zones)
        for pool in self.workload.pools:
            row = catalogue.find(pool.accelerator)
            await commands.put_pool(
                Pool(
                    name=pool.name, team="team", provider="fake", accelerator=row.name, chips=row.chips,
                    hosts=row.hosts, zones=pool.zones or all_zones, min=pool.min, max=pool.max, spot=pool.spot,
                    idle_s=pool.idle_s, race=pool.race,
                )
            )  # fmt: skip
            self.tally.price_of[row.chips] = row.usd_per_chip_hour_spot if pool.spot else row.usd_per_chip_hour

    async def _arrive(self) -> None:
        """Submit jobs as they come, in batches of one moment."""
        due = sorted(_arrivals(self.workload.jobs), key=lambda each: each[0])
        position = 0
        while position < len(due):
            when = due[position][0]
            await asyncio.sleep(max(0.0, when - asyncio.get_running_loop().time()))
            batch: list[JobClass] = []
            while position < len(due) and due[position][0] <= when + 5.0 and len(batch) < 5_000:
                batch.append(due[position][1])
                position += 1
            answers = await self.controller.commands.submit_many([(self._spec(each), None) for each in batch])
            for answer, each in zip(answers, batch, strict=True):
                self.classes[answer.id] = each
                self.tally.submitted(answer.id, each.checkpoint_s)
            self.arrived += len(batch)

    def _spec(self, each: JobClass) -> JobSpec:
        row = catalogue.find(each.accelerator)
        return JobSpec(
            team="team",
            queue=each.queue,
            resources=Resources(accelerators=(row.name,), chips=row.chips, slices=each.slices),
            payload=Command(("train",)),
            rule=Rule(preset="pre", infra_budget=10_000),
            priority=each.priority,
        )

    def _behave(self, job: str, attempt: str, rank: int, stage: int) -> Behaviour:  # noqa: ARG002
        if job not in self.left_s:
            self.left_s[job] = self.rng.uniform(*self.classes[job].duration_s)
        left_s = self.left_s[job] - self.tally.saved_s(job)
        return Behaviour(duration_s=max(0.001, left_s), start_s=1.0, stop_s=0.5)

    async def _serve(self, request: SyncRequest) -> SyncReply:
        return await self.controller.agents.sync(request)

    def _ticked(self, plan: Plan, epoch: int) -> None:  # noqa: ARG002
        """Agents do not poll here: tell those that have orders waiting."""
        self.ticks += 1
        snapshot = self.controller.snapshot
        for action in plan.actions:
            if isinstance(action, Place):
                for slice in action.slices:
                    self.world.poke(slice)
            elif isinstance(action, Stop) and action.attempt in snapshot.attempts:
                for bound in snapshot.attempts[action.attempt].slices:
                    self.world.poke(bound.slice)

    async def _until_done(self, arrivals: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < self.workload.hours_max * HOUR:
            await asyncio.sleep(30.0)
            await self._forget()
            if arrivals.done() and self.tally.ended >= self.arrived:
                return

    async def _forget(self) -> None:
        """Keep what lives: ended jobs and old events have been added up already."""
        ended = await self.store.read(self.tally.collect_ended)
        for start in range(0, len(ended), 5_000):
            await self.store.transact(jobs.purge, ended[start : start + 5_000], math.inf)
        for id in ended:
            self.left_s.pop(id, None)
            self.classes.pop(id, None)
        cursor = self.controller.cursor
        await self.store.transact(_forget_events, cursor - 1)

    def _result(self) -> WorkloadResult:
        tally = self.tally
        tally.close()
        return WorkloadResult(
            name=self.workload.name,
            seed=self.workload.seed,
            jobs=self.arrived,
            succeeded=tally.succeeded,
            failed=tally.failed,
            unfinished=self.arrived - tally.ended,
            makespan_h=tally.last_end / HOUR,
            usd=tally.usd,
            utilisation=tally.useful_chip_s / tally.held_chip_s if tally.held_chip_s else 0.0,
            useful_chip_h=tally.useful_chip_s / HOUR,
            wasted_chip_h=tally.wasted_chip_s / HOUR,
            held_chip_h=tally.held_chip_s / HOUR,
            wait_mean_s=tally.wait_mean_s,
            wait_p50_s=tally.wait_s(0.5),
            wait_p95_s=tally.wait_s(0.95),
            preemptions=tally.preemptions,
            creates=tally.creates,
            refusals=tally.refusals,
            events=self.store.seq,
            ticks=self.ticks,
        )


def _arrivals(classes: Sequence[JobClass]) -> Iterable[tuple[float, JobClass]]:
    for each in classes:
        for number in range(each.count):
            yield (each.from_h + each.over_h * number / max(1, each.count)) * HOUR, each


def _forget_events(tx: Transaction, up_to: int) -> int:
    return tx.forget_events(up_to)
