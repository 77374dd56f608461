"""The main loop: lead, catch up, plan, perform; woken by events, never slower than one tick.

`wiring` runs one per server, the simulator runs the same class. It survives a store that is away, a lead that is lost
and calls that fail; a programming error ends it, loudly. It decides nothing: that is `planner.plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.controller.agents import Agents
from penstock.controller.calls import Calls, Pace
from penstock.controller.commands import Commands
from penstock.controller.execute import Executor
from penstock.controller.leader import Leadership
from penstock.controller.observe import Observer
from penstock.controller.projection import Projection
from penstock.controller.witness import Evidence
from penstock.domain import limits
from penstock.domain.ids import IdMaker
from penstock.domain.nouns import Job
from penstock.planner.actions import Plan, Reason
from penstock.planner.plan import plan
from penstock.planner.reasons import explain
from penstock.planner.snapshot import Snapshot
from penstock.ports.capacity import Capacity
from penstock.ports.clock import Clock
from penstock.ports.objects import Objects
from penstock.ports.store import Reader, StaleLeader, Store, StoreError

#: After the store failed: soon enough to serve within a tick of its return, rarely enough not to hammer it.
STORE_RETRY_S = 1.0


class Controller:
    """One process of the control plane. `label` marks what is ours at the providers; `holder` names this process."""

    def __init__(
        self,
        *,
        store: Store,
        capacities: Mapping[str, Capacity],
        objects: Objects,
        clock: Clock,
        ids: IdMaker,
        label: str,
        holder: str,
        evidence: Evidence | None = None,
        ticked: Callable[[Plan, int], None] | None = None,
    ) -> None:
        self._store = store
        self._capacities = capacities
        self._objects = objects
        self._clock = clock
        self._ids = ids
        self._label = label
        self._ticked = [ticked] if ticked is not None else []
        self._evidence = evidence or Evidence(clock)
        self._leadership = Leadership(store.bound(actor=holder), holder, clock)
        self._projection = Projection(store)
        self._calls = Calls(limits.CALLS_AT_ONCE)
        # They outlive a lead that is lost and taken again: the provider counts calls, not leaders.
        self._paces = {name: Pace(clock, limits.CREATES_PER_MINUTE, limits.CREATES_AT_ONCE) for name in capacities}
        self._executor: Executor | None = None
        self._observer: Observer | None = None
        self._holder = holder
        self.reasons: dict[str, Reason] = {}
        self.planned_at = 0.0
        self.agents = Agents(store.bound(actor="agent"), self._evidence, self._leading_snapshot)
        self.commands = Commands(store.bound(actor="api"), clock, ids)

    @property
    def snapshot(self) -> Snapshot:
        return self._projection.snapshot

    @property
    def cursor(self) -> int:
        """The last event the snapshot has taken in."""
        return self._projection.cursor

    def on_tick(self, ticked: Callable[[Plan, int], None]) -> None:
        """Tell this one too after each tick, when the plan's decisions are committed."""
        self._ticked.append(ticked)

    @property
    def leading(self) -> bool:
        return self._leadership.epoch > 0

    def _leading_snapshot(self) -> Snapshot | None:
        return self._projection.snapshot if self.leading and self._projection.cursor >= 0 else None

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                began = self._clock.steady()
                pause_s = await self._turn()
                if pause_s is None:
                    # So it has a quarter of its thread's time at most, and one small tick hardly delays the next.
                    rest_s = 3 * (self._clock.steady() - began)
                    await self._clock.sleep(min(max(rest_s, limits.TICK_LEAST_S), limits.TICK_REST_S))
                    # Whatever a call of ours brought about is committed, so it wakes us like any other event.
                    await self._store.wait(self._projection.cursor, min(limits.TICK_S, limits.LEADER_RENEW_S))
                else:
                    await self._clock.sleep(pause_s)
        finally:
            await self._calls.stop()

    async def _turn(self) -> float | None:
        """One round; how long to pause, or None when the next event or the next tick shall end the pause."""
        try:
            if not await self._leadership.lead():
                self._stand_by()
                return limits.LEADER_RENEW_S / 2
            await self.tick()
        except StaleLeader:
            self._leadership.step_down()
            self._stand_by()
            return limits.LEADER_RENEW_S / 2
        except StoreError:
            # Away, or its answer was lost: what is true is read again when it is back.
            self._projection.reset()
            return STORE_RETRY_S
        return None

    def _stand_by(self) -> None:
        self._executor = self._observer = None

    async def tick(self) -> Plan:
        """Catch up, plan, perform: the circle of ARCHITECTURE.md once round."""
        if self._calls.failures:
            raise self._calls.failures.popleft()
        executor, observer = self._effects()
        await self._projection.catch_up()
        now = self._clock.now()
        snapshot = self._projection.snapshot
        snapshot.witness = self._evidence.take(snapshot, now)
        chosen = plan(snapshot, now)
        self.reasons, self.planned_at = chosen.reasons, now
        await executor.perform(chosen)
        observer.start_due()
        for ticked in self._ticked:
            ticked(chosen, self._leadership.epoch)
        return chosen

    def _effects(self) -> tuple[Executor, Observer]:
        """Performers bound to this epoch; made anew when the lead is taken."""
        if self._executor is None or self._observer is None:
            self._evidence.listen()
            store = self._store.bound(actor=self._holder, epoch=self._leadership.epoch)
            self._executor = Executor(
                store,
                self._capacities,
                self._objects,
                self._clock,
                self._ids,
                self._evidence,
                self._calls,
                self._paces,
                self._label,
            )
            self._observer = Observer(
                store,
                self._capacities,
                self._clock,
                self._evidence,
                self._calls,
                self._paces,
                self._label,
                lambda: self._projection.snapshot,
            )
        return self._executor, self._observer

    def look(self, provider: str, zone: str) -> None:
        """Something changed there: list that zone now. A hint only; without it the next listing shows the same."""
        if self._observer is not None:
            self._observer.look(provider, zone)

    async def why(self, job_id: str) -> tuple[Reason, float] | None:
        """Why a job is not running, and as of when; None when it is unknown or ended."""
        found = await self._store.read(_job_and_place, job_id)
        if found is None or found[0].finished_at is not None:
            return None
        job, ahead = found
        returning = self.snapshot.queues[job.spec.queue].returning.values()
        key = (-job.priority, job.id)
        ahead += sum(1 for other in returning if (-other.priority, other.id) < key)
        return explain(self.snapshot, self.reasons, job, ahead + 1, self._clock.now()), self.planned_at


def _job_and_place(reader: Reader, id: str) -> tuple[Job, int] | None:
    found = reader.jobs((id,))
    return (found[0], reader.waiting_ahead(found[0])) if found else None
