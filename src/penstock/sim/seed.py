"""One seed: the production controller on the real SQLite store in a world that breaks, then heals, then is judged.

Phase 1 injects faults for a virtual hour or less; at `heal` they stop, and phase 2 runs until everything has settled or
a deadline shows that it never will. The result is a `History`; `sim.check` applies the rules to it. Same seed, same
history, in any process.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Coroutine
from math import inf
from typing import TypeVar

import msgspec

from penstock.controller.agents import NotLeading
from penstock.controller.commands import Commands
from penstock.controller.loop import Controller
from penstock.controller.projection import Projection
from penstock.domain import limits
from penstock.domain.custody import SyncReply, SyncRequest
from penstock.domain.ids import IdMaker
from penstock.domain.invariants.history import History, Recorder
from penstock.domain.lifecycle import TERMINAL_JOB_STATES
from penstock.domain.nouns import Event, Job, Slice
from penstock.planner.actions import Plan
from penstock.planner.snapshot import Snapshot
from penstock.ports.store import Reader
from penstock.sim import scenario as scenarios
from penstock.sim.clients import Clients
from penstock.sim.faults import BucketChaos, Chaos
from penstock.sim.loop import VirtualClock, VirtualLoop, run
from penstock.sim.network import Unreachable
from penstock.sim.points import Crash, Incarnation, PointCapacity, PointObjects, PointStore
from penstock.sim.processes import Behaviour
from penstock.sim.scenario import JobPlan
from penstock.sim.world import World
from penstock.store.inline import InlineStore
from penstock.store.sqlite import SqliteStore

T = TypeVar("T")

STUCK_S = 4 * 3600.0  #: longer than any job may run: when none has ended in that time, none will
SETTLED_TICKS = 4  #: empty plans in a row before a seed may end
WHY_EVERY_TICKS = 4  #: every open job is asked that often why it does not run, once the faults have stopped
LABEL = "penstock-sim"


class SeedResult(msgspec.Struct, kw_only=True):
    """What one seed left behind."""

    seed: int
    history: History
    crashes: Counter[tuple[str, str]]
    faults: Counter[str]
    settled: bool
    virtual_s: float
    handled: int  #: by the controllers: ticks, messages of agents, calls of clients and to providers, commits
    trace: str  #: hash of the whole history


def run_seed(seed: int, *, fault_s: float = 2400.0) -> SeedResult:
    """Run one seed from start to end in virtual time."""
    return run(Seed(seed, fault_s).play())


class Seed:
    """Everything that lives during one seed."""

    def __init__(self, seed: int, fault_s: float) -> None:
        self.seed = seed
        self.fault_s = fault_s
        self.rng = random.Random(seed)
        self.history = History(events=[], clients=[], world=[])
        self.crashes: Counter[tuple[str, str]] = Counter()
        self.clock = VirtualClock()
        self.quiet_ticks = 0
        self.controllers: dict[str, Controller] = {}
        self._plans: dict[str, JobPlan] = {}
        self._tries: Counter[str] = Counter()
        self._lives = 0
        self._messages = 0

    async def play(self) -> SeedResult:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.store: InlineStore = SqliteStore.inline(self.clock)
        self.recorder = Recorder(self.history, lambda: self.store.seq, lambda: self.clock.epoch + loop.time())
        self.scenario = scenarios.build(self._fork("scenario"), self.fault_s)
        self.by_name = {plan.spec.name: plan for plan in self.scenario.jobs}
        self.chaos = Chaos(self.seed, self._fork("chaos"), self.recorder, [self.clock])
        self.world = World(
            rng=self._fork("world"),
            behaviour=self._behave,
            recorder=self.recorder,
            server=self._serve,
            label=LABEL,
        )
        self.chaos.world = self.world
        self.chaos.slices = lambda: at_once(self.store.read(_live_slices))
        self.capacity = self.world.capacity("fake", faults=self.chaos, latency_s=(0.01, 0.3))
        names = ["controller-a", "controller-b"] if self.rng.random() < 0.3 else ["controller-a"]
        lives = [loop.create_task(self._keep_alive(name), name=name) for name in names]
        for life in lives:
            loop.watch(life)
        self.clients = Clients(self.scenario, self.recorder, self._fork("clients"), self._commands, self._plan_of_job)
        await self.clients.set_up()
        settled = await self._phases()
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        self.history.events = at_once(self.store.read(_all_events))
        await self.store.close()
        return self._result(settled)

    def _fork(self, name: str) -> random.Random:
        """A generator of its own for each part, so that one part's draws do not shift another's."""
        return random.Random(f"{self.seed}/{name}")

    async def _phases(self) -> bool:
        loop = self.loop
        users = [loop.create_task(self.clients.submit(plan)) for plan in self.scenario.jobs]
        users.append(loop.create_task(self.clients.meddle(self.fault_s)))
        nemesis = loop.create_task(self.chaos.nemesis(self.fault_s))
        for task in (*users, nemesis):
            loop.watch(task)
        await asyncio.sleep(self.fault_s)
        await nemesis
        self.chaos.heal()
        await self.clients.set_up()  # operators put their settings back
        await asyncio.gather(*users)
        return await self._settle()

    async def _settle(self) -> bool:
        """Wait until jobs have ended, plans are empty and the world holds nothing that nobody owns."""
        open_jobs, moved_at = inf, self.loop.time()
        while self.loop.time() - moved_at < STUCK_S:
            for _ in range(WHY_EVERY_TICKS):
                await asyncio.sleep(limits.TICK_S)
            await self._ask_why()
            still_open = len(at_once(self.store.read(_open_jobs)))
            if still_open < open_jobs:
                open_jobs, moved_at = still_open, self.loop.time()
            if self.quiet_ticks >= SETTLED_TICKS and not still_open and self._nothing_unowned():
                for job in self.clients.jobs[:30]:
                    await self.clients.read("auditor", job)
                return True
        return False

    def _nothing_unowned(self) -> bool:
        owned = {slice.id for slice in at_once(self.store.read(_live_slices))}
        ours = {vm.name for vm in self.world.cloud.vms() if vm.label == LABEL}
        return ours <= owned

    async def _ask_why(self) -> None:
        """L12: every unfinished job can say why it is not running, freshly."""
        leader = next((each for each in self.controllers.values() if each.leading), None)
        if leader is None:
            return
        for job in at_once(self.store.read(_open_jobs))[:20]:
            found = await leader.why(job)
            if found is not None:
                reason, as_of = found
                self.recorder.world("why", job, code=reason.code, as_of=as_of)

    # --- controllers ---

    async def _keep_alive(self, name: str) -> None:
        """Start a controller again whenever it has died, as a supervisor would."""
        while True:
            await self._live_once(name)
            await asyncio.sleep(self.rng.uniform(0.5, 8.0))

    async def _live_once(self, name: str) -> None:
        self._lives += 1
        life = self._lives
        died = asyncio.Event()
        incarnation = Incarnation(f"{name}#{life}", self.chaos, self.crashes, died.set)
        self.chaos.incarnations = [each for each in self.chaos.incarnations if not each.dead] + [incarnation]
        entropy = self._fork(f"ids {life}")
        objects = self.world.objects(name, BucketChaos(self.chaos, self._fork(f"bucket {life}"), 0.05))
        controller = Controller(
            store=PointStore(self.store, incarnation),
            capacities={"fake": PointCapacity(self.capacity, incarnation)},
            objects=PointObjects(objects, incarnation),
            clock=self.clock,
            ids=IdMaker(lambda: entropy.getrandbits(29)),
            label=LABEL,
            holder=f"{name}#{life}",
            ticked=lambda plan, epoch: self._ticked(incarnation.name, plan, epoch),
        )
        self.controllers[name] = controller
        self.recorder.world("controller.started", incarnation.name)
        task = self.loop.create_task(controller.run(), name=incarnation.name)
        death = self.loop.create_task(died.wait())
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if not incarnation.dead and task.done():
                task.result()  # a programming error ends the whole seed
        finally:
            incarnation.dead = True
            self.controllers.pop(name, None)
            for each in (task, death):
                each.cancel()
            await asyncio.gather(task, death, return_exceptions=True)
            self.recorder.world("controller.crashed", incarnation.name)

    def _ticked(self, incarnation: str, plan: Plan, epoch: int) -> None:
        self.recorder.world("tick", incarnation, actions=len(plan.actions), epoch=epoch)
        self.quiet_ticks = 0 if plan.actions else self.quiet_ticks + 1
        if not self.chaos.on and self.rng.random() < 0.02:
            self._compare_projection(incarnation)

    def _compare_projection(self, incarnation: str) -> None:
        """The leader's view kept up from events must equal one read anew."""
        leader = next((each for each in self.controllers.values() if each.leading), None)
        if leader is None or leader.cursor != self.store.seq:
            return
        fresh = Projection(self.store)
        at_once(fresh.catch_up())
        same = describe(fresh.snapshot) == describe(leader.snapshot)
        self.recorder.world("projection", incarnation, equal=same)

    def _commands(self) -> Commands | None:
        """Any process that is up serves users, leader or not."""
        up = [self.controllers[name] for name in sorted(self.controllers)]
        return self.rng.choice(up).commands if up else None

    async def _serve(self, request: SyncRequest) -> SyncReply:
        for name in sorted(self.controllers):
            controller = self.controllers[name]
            if controller.leading:
                self._messages += 1
                try:
                    return await controller.agents.sync(request)
                except (Crash, NotLeading) as error:
                    raise Unreachable(str(error)) from error
        raise Unreachable("nobody leads")

    # --- how jobs behave ---

    def _plan_of_job(self, job: str, plan: JobPlan) -> None:
        self._plans[job] = plan

    def _behave(self, job: str, attempt: str, rank: int, stage: int) -> Behaviour:  # noqa: ARG002
        plan = self._plans.get(job)
        if plan is None:
            found = at_once(self.store.read(_job, job))
            plan = self.by_name.get(found.spec.name) if found is not None else None
            plan = plan or self.scenario.plain_job()
            self._plans[job] = plan
        if rank == 0:
            self._tries[job] += 1
        return scenarios.behave(plan, self.scenario, self.world.rng, rank, self._tries[job])

    def _result(self, settled: bool) -> SeedResult:
        faults: Counter[str] = Counter(record.subject for record in self.history.world if record.kind == "fault")
        calls = sum(1 for record in self.history.world if record.kind in ("tick", "provider.call"))
        calls += sum(1 for record in self.history.clients if record.kind.endswith(".invoke"))
        return SeedResult(
            seed=self.seed,
            history=self.history,
            crashes=self.crashes,
            faults=faults,
            settled=settled,
            virtual_s=self.loop.time(),
            handled=self._messages + len(self.history.events) + calls,
            trace=trace_hash(self.history),
        )


def at_once(coroutine: Coroutine[object, object, T]) -> T:
    """The result of a coroutine that never yields, as the inline store's never do."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("the inline store yielded")


def describe(snapshot: Snapshot) -> dict[str, object]:
    """A snapshot as plain data, for comparing two of them."""
    return {
        "maintenance": snapshot.maintenance,
        "teams": snapshot.teams,
        "pools": snapshot.pools,
        "zones": snapshot.zones,
        "slices": snapshot.slices,
        "attempts": snapshot.attempts,
        "jobs": snapshot.jobs,
        "used": {key: chips for key, chips in snapshot.used.items() if chips},
        "idle": snapshot.idle,
        "unsettled": snapshot.unsettled,
        "queues": {
            name: (view.queue, view.waiting, view.waiting_total, view.returning, view.live_chips)
            for name, view in snapshot.queues.items()
        },
    }


def trace_hash(history: History) -> str:
    encoder = msgspec.json.Encoder(order="sorted")
    digest = hashlib.sha256()
    for part in (history.events, history.clients, history.world):
        digest.update(encoder.encode(part))
    return digest.hexdigest()[:16]


def _all_events(reader: Reader) -> list[Event]:
    return reader.events(0, 10_000_000)


def _live_slices(reader: Reader) -> list[Slice]:
    return reader.live_slices()


def _job(reader: Reader, id: str) -> Job | None:
    return reader.job(id)


def _open_jobs(reader: Reader) -> list[str]:
    page = reader.jobs_page(team=None, states=("queued", "provisioning", "running"), after=None, limit=10_000)
    return [job.id for job in page if job.state not in TERMINAL_JOB_STATES]
