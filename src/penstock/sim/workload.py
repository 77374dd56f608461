"""What would happen: a described fleet and job mix, run through the production controller in virtual time.

`tpu sim run FILE` has a workload (`sim.workload_file`) played here without faults but with preemptions and stockouts,
and gets makespan, cost, utilisation, waiting and waste added up. No rules are checked and nothing is recorded but sums,
so that a day of ten thousand slices fits in minutes; see `sim.check` for the rules.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Concatenate, ParamSpec, TypeVar

import msgspec
from typing_extensions import override

from penstock.capacity.fake import FakeCapacity
from penstock.capacity.fakecloud import ZoneModel
from penstock.controller import jobs
from penstock.controller.loop import Controller
from penstock.controller.witness import Evidence
from penstock.domain import catalogue
from penstock.domain.custody import SyncReply, SyncRequest
from penstock.domain.ids import IdMaker
from penstock.domain.nouns import Command, JobSpec, Pool, Queue, Resources, Rule, Slice, Team
from penstock.planner import growth
from penstock.planner.actions import Place, Plan, Stop
from penstock.planner.snapshot import Snapshot
from penstock.ports.capacity import Seen
from penstock.ports.clock import Clock
from penstock.ports.store import Reader, Store, Transaction
from penstock.sim.loop import VirtualClock, VirtualLoop, run
from penstock.sim.network import Network, Sync
from penstock.sim.planted import swap
from penstock.sim.processes import Behaviour
from penstock.sim.tally import Tally, ZoneSums
from penstock.sim.workload_file import JobClass, Workload
from penstock.sim.world import World
from penstock.store.sqlite import SqliteStore

LABEL = "penstock-sim"
HOUR = 3600.0
BATCH_S = 5.0  #: jobs due within this are submitted together, as a client's batch would be
FORGET_EVERY_S = 30.0  #: ended jobs and events taken in are dropped so often: memory follows what lives

T = TypeVar("T")
P = ParamSpec("P")


class WorkloadResult(msgspec.Struct, kw_only=True):
    """The answer, in hours, dollars and shares. Money is null when a price is unknown."""

    name: str
    seed: int
    jobs: int
    succeeded: int
    failed: int
    unfinished: int
    makespan_h: float | None  #: from the start to the end of the last job; null when not all ended
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
    zones: dict[str, ZoneSums]
    events: int
    ticks: int


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run has come."""

    virtual_h: float
    jobs: int
    submitted: int
    ended: int


Show = Callable[[Progress], None]
Asked = Callable[[float, str], None]  #: told of every request for a slice: virtual hours, zone


def run_workload(workload: Workload, progress: Show | None = None, asked: Asked | None = None) -> WorkloadResult:
    """Play a workload to its end in virtual time; `progress` is called every half virtual minute."""
    with ExitStack() as stack:
        # The default collector looks at all that lives over and over: a third of the time of a large run.
        stack.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(200_000, 20, 50)
        if workload.order == "fixed":
            stack.callback(swap(growth, "rank", _as_written))
            stack.callback(swap(growth, "slow_since", _never_slow))
        return run(_Play(workload, progress, asked).play())


def _as_written(snapshot: Snapshot, pool: Pool, now: float, ahead: int = 0) -> list[str]:  # noqa: ARG001
    """The order most scripts use: always the first zone that is not in back-off."""
    return list(pool.zones)


def _never_slow(snapshot: Snapshot, slice: Slice, now: float) -> None:
    """Nor do they know how long a creation usually takes, and so that another zone should be asked as well."""


class _PacedStore:
    """The store as the controller sees it, woken not more often than `pace_s` allows.

    In virtual time a round takes no time, so without this there would be one for every event; a real controller takes
    in what came while it was busy.
    """

    def __init__(self, store: Store, pace_s: float) -> None:
        self._store = store
        self._pace_s = pace_s

    async def transact(self, verb: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._store.transact(verb, *args, **kwargs)

    async def read(self, query: Callable[Concatenate[Reader, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._store.read(query, *args, **kwargs)

    def bound(self, *, actor: str, epoch: int = 0) -> Store:
        return self._store.bound(actor=actor, epoch=epoch)

    async def wait(self, after: int, timeout_s: float) -> None:
        if self._pace_s > 0:
            await asyncio.sleep(self._pace_s)
        if timeout_s > self._pace_s:
            await self._store.wait(after, timeout_s - self._pace_s)

    async def close(self) -> None:
        await self._store.close()


class _NearNetwork(Network):
    """A network without distance: a sync is the server's answer, with no task and no timer in between."""

    def __init__(self, rng: random.Random, answer: Sync) -> None:
        super().__init__(rng=rng)
        self._answer = answer

    @override
    async def sync(self, request: SyncRequest) -> SyncReply:
        return await self._answer(request)


class _Counted(FakeCapacity):
    """The provider, which tells the tally whose machine each create is for."""

    def __init__(self, world: World, tally: Tally, asked: Asked | None) -> None:
        super().__init__(world.cloud, label=world.label, recorder=world.recorder, rng=world.rng)
        self._tally = tally
        self._asked = asked

    @override
    async def create(self, wanted: Slice) -> Seen:
        self._tally.asked(wanted.id, wanted.pool)
        if self._asked is not None:
            self._asked(asyncio.get_running_loop().time() / HOUR, wanted.zone)
        return await super().create(wanted)


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
    def __init__(self, workload: Workload, progress: Show | None, asked: Asked | None) -> None:
        self.workload = workload
        self.progress = progress
        self.asked = asked
        self.rng = random.Random(f"workload {workload.seed}")
        self.clock = VirtualClock()
        self.tally = Tally([zone.name for zone in workload.zones], self.clock.epoch)
        self.specs: dict[JobClass, JobSpec] = {}
        self.classes: dict[str, JobClass] = {}
        self.left_s: dict[str, float] = {}
        self.ordered: list[str] = []  #: slices whose agents the last round has orders for
        self.jobs = sum(each.count for each in workload.jobs)
        self.arrived = 0
        self.ticks = 0

    async def play(self) -> WorkloadResult:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        workload = self.workload
        self.store = SqliteStore.inline(self.clock)
        self.world = World(rng=self.rng, behaviour=self._behave, recorder=self.tally, label=LABEL, quiet=True)
        self.world.network = _NearNetwork(self.rng, self._serve)
        self._set_zones(loop)
        entropy = random.Random(f"ids {workload.seed}")
        self.controller = Controller(
            store=_PacedStore(self.store, workload.pace_s),
            capacities={"fake": _Counted(self.world, self.tally, self.asked)},
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
                refusal_s=zone.refusal_s,
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
            self.tally.price_of[pool.name] = row.usd_per_chip_hour_spot if pool.spot else row.usd_per_chip_hour

    async def _arrive(self) -> None:
        """Submit jobs as they come, in batches of one moment."""
        due = _arrivals(self.workload.jobs)
        following = next(due, None)
        while following is not None:
            when = following[0]
            await asyncio.sleep(max(0.0, when - asyncio.get_running_loop().time()))
            batch: list[JobClass] = []
            while following is not None and following[0] <= when + BATCH_S and len(batch) < 5_000:
                batch.append(self.workload.jobs[following[1]])
                following = next(due, None)
            answers = await self.controller.commands.submit_many([(self._spec(each), None) for each in batch])
            for answer, each in zip(answers, batch, strict=True):
                self.classes[answer.id] = each
                self.tally.submitted(answer.id, each.checkpoint_s)
            self.arrived += len(batch)

    def _spec(self, each: JobClass) -> JobSpec:
        spec = self.specs.get(each)
        if spec is None:
            row = catalogue.find(each.accelerator)
            spec = self.specs[each] = JobSpec(
                team="team",
                queue=each.queue,
                resources=Resources(accelerators=(row.name,), chips=row.chips, slices=each.slices),
                payload=Command(("train",)),
                rule=Rule(preset="pre", infra_budget=10_000),
                priority=each.priority,
            )
        return spec

    def _behave(self, job: str, attempt: str, rank: int, stage: int) -> Behaviour:  # noqa: ARG002
        if job not in self.left_s:
            self.left_s[job] = self.rng.uniform(*self.classes[job].duration_s)
        left_s = self.left_s[job] - self.tally.saved_s(job)
        return Behaviour(duration_s=max(0.001, left_s), start_s=1.0, stop_s=0.5)

    async def _serve(self, request: SyncRequest) -> SyncReply:
        return await self.controller.agents.sync(request)

    def _ticked(self, plan: Plan, epoch: int) -> None:  # noqa: ARG002
        """Agents do not poll here: tell those that have orders waiting, once the snapshot they are answered from knows.

        That is one round later, where a real agent's next sync would be up to `SYNC_S` later.
        """
        self.ticks += 1
        for slice in self.ordered:
            self.world.poke(slice)
        self.ordered.clear()
        attempts = self.controller.snapshot.attempts
        for action in plan.actions:
            if isinstance(action, Place):
                self.ordered.extend(action.slices)
            elif isinstance(action, Stop) and action.attempt in attempts:
                self.ordered.extend(bound.slice for bound in attempts[action.attempt].slices)

    async def _until_done(self, arrivals: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < self.workload.hours_max * HOUR:
            await asyncio.sleep(FORGET_EVERY_S)
            await self._forget()
            if self.progress is not None:
                self.progress(
                    Progress(
                        virtual_h=loop.time() / HOUR, jobs=self.jobs, submitted=self.arrived, ended=self.tally.ended
                    )
                )
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
            jobs=self.jobs,
            succeeded=tally.succeeded,
            failed=tally.failed,
            unfinished=self.jobs - tally.ended,
            makespan_h=tally.last_end / HOUR if tally.ended == self.jobs else None,
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
            zones=tally.zones,
            events=self.store.seq,
            ticks=self.ticks,
        )


def _arrivals(classes: Sequence[JobClass]) -> Iterator[tuple[float, int]]:
    """When each job comes, and its class, in order of time; made as they are asked for."""
    return heapq.merge(*[_arrivals_of(number, each) for number, each in enumerate(classes)])


def _arrivals_of(number: int, each: JobClass) -> Iterator[tuple[float, int]]:
    for index in range(each.count):
        yield (each.from_h + each.over_h * index / each.count) * HOUR, number


def _forget_events(tx: Transaction, up_to: int) -> int:
    return tx.forget_events(up_to)
