"""Where journeys play: one fake world, one SQLite store and production controllers that are kept alive.

`stage.Stage` adds the users' and operators' words to it. A house knows what is, waits, breaks controllers and the
store when told to, and at the end waits for rest and judges the whole history by all rules. It must not draw anything
at random: what happens is the story's choice.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.capacity.fakecloud import Vm, ZoneModel
from penstock.controller.agents import NotLeading
from penstock.controller.commands import Commands
from penstock.controller.loop import Controller
from penstock.controller.projection import Projection
from penstock.domain.custody import SyncReply, SyncRequest
from penstock.domain.ids import IdMaker
from penstock.domain.invariants import rules
from penstock.domain.invariants.history import History, Record, Recorder
from penstock.domain.invariants.story import story as story_of
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Attempt, Event, Job, Slice
from penstock.planner.actions import Plan
from penstock.ports.store import Reader
from penstock.sim.loop import VirtualClock, VirtualLoop
from penstock.sim.network import Unreachable
from penstock.sim.points import Crash, Incarnation, PointCapacity, PointObjects, PointStore
from penstock.sim.processes import Behaviour
from penstock.sim.seed import at_once, describe
from penstock.sim.world import World
from penstock.store.doctor import sums
from penstock.store.inline import InlineStore
from penstock.store.sqlite import SqliteStore
from tests.journeys.fates import CallFaults, Fates

LABEL = "penstock-journey"
READY_S = 30.0  #: from create to ready, unless a story says otherwise
DELETE_S = 10.0
LOOK_S = 0.5  #: how often a waiting story looks
WHY_S = 5.0  #: how often it asks why jobs wait
REST_S = 260.0  #: after the last word: more than the hundred ticks of rule L8
QUIET_TICKS = 4


class Try(NamedTuple):
    """One process about to start, for a job's own behaviour."""

    job: str
    attempt: Attempt
    rank: int
    stage: int
    number: int  #: which attempt of this replica, from 1


Behave = Behaviour | Callable[[Try], Behaviour]


class House:
    """Everything that lives during one journey. `controllers` names the processes that are kept alive."""

    def __init__(self, controllers: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.clock = VirtualClock()
        self.history = History(events=[], clients=[], world=[])
        self.store: InlineStore = SqliteStore.inline(self.clock)
        self.recorder = Recorder(self.history, lambda: self.store.seq, lambda: self.clock.epoch + loop.time())
        self.fates = Fates()
        self.calls = CallFaults(self._zone_of)
        self.world = World(
            rng=random.Random(0),
            behaviour=self._behave,
            recorder=self.recorder,
            server=self._serve,
            label=LABEL,
            zone_model=ZoneModel(ready_s=(READY_S, READY_S), delete_s=(DELETE_S, DELETE_S)),
            delay_s=(0.01, 0.01),
        )
        self.cloud = self.world.cloud
        self.controllers: dict[str, Controller] = {}
        self.incarnations: dict[str, Incarnation] = {}
        self.plans: list[Plan] = []
        self.back_after_s: dict[str, float | None] = dict.fromkeys(controllers, 2.0)
        self.behaviours: dict[str, Behave] = {}
        self.premises: dict[str, int] = {}
        self._capacity = self.world.capacity("fake", faults=self.calls, latency_s=(0.1, 0.1))
        self._lives = 0
        self._quiet_ticks = 0
        self._asked_why_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self.recorder.world("heal", "world")
        for name in controllers:
            self._tasks.append(loop.create_task(self._keep_alive(name), name=name))
            loop.watch(self._tasks[-1])

    # --- what is, read at once ---

    @property
    def now(self) -> float:
        """Seconds since the journey began."""
        return self.loop.time()

    def job(self, id: str) -> Job:
        found = at_once(self.store.read(_job, id))
        assert found is not None, f"no job {id}"
        return found

    def attempts(self, job: str) -> list[Attempt]:
        """Oldest first."""
        return at_once(self.store.read(_attempts, job))

    def slices(self, *states: SliceState) -> list[Slice]:
        """Slices that are not gone, in these states or in any, by name."""
        found = at_once(self.store.read(_live_slices))
        return sorted((one for one in found if not states or one.state in states), key=lambda one: one.id)

    def slice(self, id: str) -> Slice:
        found = at_once(self.store.read(_slice, id))
        assert found is not None, f"no slice {id}"
        return found

    def ours(self) -> list[Vm]:
        """Machines that truly exist and bear our label."""
        return [vm for vm in self.cloud.vms() if vm.label == LABEL]

    def events(self, *kinds: str) -> list[Event]:
        found = at_once(self.store.read(_events))
        return [event for event in found if not kinds or event.kind in kinds]

    def calls_made(self, verb: str, outcome: str | None = None) -> list[Record]:
        """Provider calls that reached the provider."""
        return [
            record
            for record in self.history.world
            if record.kind == "provider.call"
            and record.body["verb"] == verb
            and outcome in (None, record.body["outcome"])
        ]

    def records(self, *kinds: str) -> list[Record]:
        return [record for record in self.history.world if record.kind in kinds]

    def leader(self) -> Controller:
        leading = [each for each in self.controllers.values() if each.leading]
        assert leading, "nobody leads"
        return leading[-1]

    def leader_name(self) -> str:
        return next(name for name, each in self.controllers.items() if each is self.leader())

    def commands(self) -> Commands | None:
        """Of the first controller that is up and not frozen."""
        for name in sorted(self.controllers):
            if not self._frozen(name):
                return self.controllers[name].commands
        return None

    def _zone_of(self, name: str) -> str:
        found = at_once(self.store.read(_slice, name))
        return found.zone if found is not None else name

    # --- waiting ---

    async def until(self, holds: Callable[[], bool], within_s: float, what: str = "") -> float:
        """Wait until it holds and answer how long that took; fail when it does not within so many seconds."""
        began = self.now
        while not holds():
            assert self.now - began < within_s, f"{what or 'it'} did not come true within {within_s} s\n{self.tell()}"
            await self.sleep(LOOK_S)
        return self.now - began

    async def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            await asyncio.sleep(min(WHY_S, max(0.0, end - self.now)))
            if self.now - self._asked_why_at >= WHY_S:
                self._asked_why_at = self.now
                await self._ask_why()

    async def _ask_why(self) -> None:
        """L12: every unfinished job can say freshly why it is not running."""
        for name in sorted(self.controllers):
            if not self.controllers[name].leading or self._frozen(name) or self.now < self.fates.down_until:
                continue
            for job in self.open_jobs():
                try:
                    found = await self.controllers[name].why(job)
                except Crash:
                    return
                if found is not None:
                    self.recorder.world("why", job, code=found[0].code, as_of=found[1])
            return

    def open_jobs(self, limit: int = 5) -> list[str]:
        """The newest jobs that have not ended."""
        return at_once(self.store.read(_open_jobs, limit))

    def tell(self) -> str:
        """The story so far, of what a failing journey is about."""
        jobs = self.open_jobs()[:2] or [event.id for event in self.events("job.created")][-1:]
        self.history.events = self.events()
        return "\n".join(story_of(self.history, "job", job) for job in jobs)

    # --- what befalls the controllers ---

    def kill(self, name: str, back_after_s: float | None = 2.0) -> None:
        """kill -9; started again after a while, or never when None."""
        self.back_after_s[name] = back_after_s
        self.incarnations[name].kill()

    def freeze(self, name: str, seconds: float) -> None:
        """SIGSTOP: it neither calls nor answers."""
        self.incarnations[name].frozen_until = self.now + seconds

    def store_outage(self, seconds: float) -> None:
        self.fates.down_until = self.now + seconds
        self.recorder.world("store.down", "store")
        self.loop.call_later(seconds, self._store_back)

    def _store_back(self) -> None:
        self.recorder.world("store.up", "store")
        self.heal()

    def heal(self) -> None:
        """The clocks of the liveness rules start again here: what came before was beyond anybody's power."""
        self.recorder.world("heal", "world")

    def _frozen(self, name: str) -> bool:
        return self.incarnations[name].frozen_until > self.now

    async def _keep_alive(self, name: str) -> None:
        while True:
            await self._live_once(name)
            pause_s = self.back_after_s[name]
            if pause_s is None:
                return
            await asyncio.sleep(pause_s)

    async def _live_once(self, name: str) -> None:
        self._lives += 1
        life = f"{name}#{self._lives}"
        died = asyncio.Event()
        incarnation = self.incarnations[name] = Incarnation(life, self.fates.of(name), Counter(), died.set)
        controller = self.controllers[name] = Controller(
            store=PointStore(self.store, incarnation),
            capacities={"fake": PointCapacity(self._capacity, incarnation)},
            objects=PointObjects(self.world.objects(name), incarnation),
            clock=self.clock,
            ids=IdMaker(functools.partial(random.Random(life).getrandbits, 29)),
            label=LABEL,
            holder=life,
            ticked=lambda plan, epoch: self._ticked(life, plan, epoch),
        )
        self.recorder.world("controller.started", life)
        if self._lives > 1:
            self.heal()  # whoever was down could keep no deadline
        task = self.loop.create_task(controller.run(), name=life)
        death = self.loop.create_task(died.wait())
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if not incarnation.dead and task.done():
                task.result()  # a programming error ends the journey
        finally:
            incarnation.dead = True
            del self.controllers[name]
            for each in (task, death):
                each.cancel()
            await asyncio.gather(task, death, return_exceptions=True)
            self.recorder.world("controller.crashed", life)

    def _ticked(self, life: str, plan: Plan, epoch: int) -> None:
        self.recorder.world("tick", life, actions=len(plan.actions), epoch=epoch)
        self.plans.append(plan)
        self._quiet_ticks = 0 if plan.actions else self._quiet_ticks + 1

    async def _serve(self, request: SyncRequest) -> SyncReply:
        for name in sorted(self.controllers):
            if self.controllers[name].leading and not self._frozen(name):
                try:
                    return await self.controllers[name].agents.sync(request)
                except (Crash, NotLeading) as error:
                    raise Unreachable(str(error)) from error
        raise Unreachable("nobody leads")

    def _behave(self, job: str, attempt: str, rank: int, stage: int) -> Behaviour:
        behave = self.behaviours[self.job(job).spec.name]
        if isinstance(behave, Behaviour):
            return behave
        attempts = self.attempts(job)
        mine = next(each for each in attempts if each.id == attempt)
        number = [each.id for each in attempts if each.replica == mine.replica].index(attempt) + 1
        return behave(Try(job, mine, rank, stage, number))

    # --- the end ---

    def at_rest(self) -> bool:
        """No job is open, plans are empty, and nothing of ours exists that no slice owns."""
        if self.open_jobs() or self._quiet_ticks < QUIET_TICKS:
            return False
        owned = {slice.id for slice in self.slices()}
        return {vm.name for vm in self.ours()} <= owned

    async def end(self) -> None:
        """Come to rest, then be judged."""
        await self.until(self.at_rest, 3 * 3600.0, "rest")
        await asyncio.sleep(REST_S)
        self._check_counters()
        self._check_projection()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.history.events = self.events()
        await self.store.close()
        self._judge()

    def _check_counters(self) -> None:
        """The counters behind quotas say what the rows say."""
        quotas = at_once(self.store.read(_quotas))
        attempts = at_once(self.store.read(_live_attempts))
        counted = {(quota[0], quota[1]): quota[2] for quota in quotas if quota[2]}
        assert counted == {key: chips for key, chips in sums(self.slices(), attempts).items() if chips}

    def _check_projection(self) -> None:
        leader = self.leader()
        assert leader.cursor == self.store.seq, "the leader has not taken in what was committed minutes ago"
        fresh = Projection(self.store)
        at_once(fresh.catch_up())
        self.recorder.world("projection", "end", equal=describe(fresh.snapshot) == describe(leader.snapshot))

    def _judge(self) -> None:
        report = rules.check(self.history)
        self.premises = report.premises
        told = [f"{broken}\n{story_of(self.history, broken.entity, broken.id)}" for broken in report.violations[:3]]
        assert report.holds, f"{len(report.violations)} broken\n" + "\n".join(told)


def _job(reader: Reader, id: str) -> Job | None:
    return reader.job(id)


def _attempts(reader: Reader, job: str) -> list[Attempt]:
    return reader.attempts_of(job)


def _live_attempts(reader: Reader) -> list[Attempt]:
    return reader.live_attempts()


def _live_slices(reader: Reader) -> list[Slice]:
    return reader.live_slices()


def _slice(reader: Reader, id: str) -> Slice | None:
    return reader.slice(id)


def _events(reader: Reader) -> list[Event]:
    return reader.events(0, 10_000_000)


def _quotas(reader: Reader) -> list[tuple[str, str, int]]:
    return [(quota.scope, quota.name, quota.used_chips) for quota in reader.quotas()]


def _open_jobs(reader: Reader, limit: int) -> list[str]:
    page = reader.jobs_page(team=None, states=("queued", "provisioning", "running"), after=None, limit=limit)
    return [job.id for job in page]
