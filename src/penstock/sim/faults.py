"""The faults of one seed: which calls fail, which process dies where, what breaks in the world and when.

`sim.seed` makes one `Chaos` per seed, asks it at every point (`Fates`, provider and bucket faults) and lets its
`nemesis` loose on the world during the first phase. `heal` ends everything: from then on nothing fails any more, and
what is broken must be repaired by the system. Everything is drawn from the seed's own generator.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from penstock.capacity.fakecloud import Fault, FaultKind, ZoneModel
from penstock.domain.invariants.history import Recorder
from penstock.domain.nouns import Slice
from penstock.ports.capacity import CREATING, DELETING, READY
from penstock.ports.objects import ObjectsError
from penstock.sim.loop import VirtualClock
from penstock.sim.points import Incarnation, all_points
from penstock.sim.scenario import ZONES
from penstock.sim.world import World

#: What each provider fault is called in the list of reliability.md.
_CREATE_FAULTS = (
    (FaultKind.STOCKOUT, "C1"), (FaultKind.QUOTA, "C1"), (FaultKind.RATE_LIMIT, "C1"), (FaultKind.TRANSIENT, "C1"),
    (FaultKind.PERMISSION, "C1"), (FaultKind.LOST_REPLY, "C2"), (FaultKind.LATE_CREATE, "C2"),
    (FaultKind.NEVER_READY, "C2"), (FaultKind.BROKEN_CREATE, "C2"), (FaultKind.HOST_MISSING, "C5"),
    (FaultKind.DEAD_ON_ARRIVAL, "N3"), (FaultKind.SLOW, "C2"),
)  # fmt: skip
_LIST_FAULTS = (
    (FaultKind.STALE_LIST, "C3"), (FaultKind.PARTIAL_PAGE, "C3"), (FaultKind.UNREACHABLE, "C3"),
    (FaultKind.EMPTY_PAGE, "C3"), (FaultKind.ITEM_MISSING, "C3"), (FaultKind.TRANSIENT, "C1"), (FaultKind.SLOW, "C1"),
)  # fmt: skip
_GET_FAULTS = ((FaultKind.TRANSIENT, "C1"), (FaultKind.RATE_LIMIT, "C1"), (FaultKind.SLOW, "C1"))
_DELETE_FAULTS = (
    (FaultKind.TRANSIENT, "C1"), (FaultKind.LOST_REPLY, "C2"), (FaultKind.DELETE_IGNORED, "C1"),
    (FaultKind.SLOW_DELETE, "C4"), (FaultKind.RATE_LIMIT, "C1"),
)  # fmt: skip
_BY_VERB = {"create": _CREATE_FAULTS, "list": _LIST_FAULTS, "get": _GET_FAULTS, "delete": _DELETE_FAULTS}


class Chaos:
    """All faults of one seed."""

    def __init__(self, seed: int, rng: random.Random, recorder: Recorder, clocks: list[VirtualClock]) -> None:
        self._rng = rng
        self._recorder = recorder
        self._clocks = clocks
        self.on = True
        self.world: World | None = None
        self.incarnations: list[Incarnation] = []
        self.slices: Callable[[], list[Slice]] = list
        points = all_points()
        target = seed % (2 * len(points))
        #: Each seed aims at one point and side, so that together they cover all; the n-th time it is passed.
        self._target = (points[target // 2], "before" if target % 2 == 0 else "after")
        self._passes = rng.choice([1, 1, 2, 4])
        self._crash_rate = rng.choice([0.0, 0.0005, 0.002, 0.005])
        self._call_rate = rng.choice([0.02, 0.1, 0.25])
        self._store_rate = rng.choice([0.0, 0.005, 0.02])
        self._store_down_until = -1.0
        self._foreign_rate = 0.03
        self._again_rate = 0.1
        self._zone_down_until: dict[str, float] = {}
        self._skews = rng.random() < 0.5  #: other seeds keep true clocks, so that fair shares can be judged exactly
        self._pause_s = rng.choice([15.0, 30.0, 60.0])

    # --- Fates: what befalls a call of the controller ---

    def crash(self, point: str, side: str) -> bool:
        if not self.on:
            return False
        if (point, side) == self._target:
            self._passes -= 1
            if self._passes == 0:
                self._note("P1", f"{side} {point}")
                return True
        if self._crash_rate and self._rng.random() < self._crash_rate:
            self._note("P1", f"{side} {point}")
            return True
        return False

    def store_down(self) -> bool:
        return self._store_down_until >= 0

    def commit_lost(self, point: str) -> bool:
        return self._strike(self._store_rate, "D2", f"reply lost: {point}")

    def commit_aborted(self, point: str) -> bool:
        return self._strike(self._store_rate, "D2", f"aborted: {point}")

    def stale_read(self) -> bool:
        return self._strike(self._store_rate * 2, "D3", "stale read")

    def wake_lost(self) -> bool:
        return self._strike(self._store_rate * 2, "D3", "wake-up lost")

    def _strike(self, rate: float, kind: str, what: str) -> bool:
        if self.on and rate and self._rng.random() < rate:
            self._note(kind, what)
            return True
        return False

    def _note(self, kind: str, what: str) -> None:
        self._recorder.world("fault", kind, what=what)

    def _blind(self, kind: str, slice: str, seconds: float, bucket: bool, what: str) -> None:
        """A fault after which a host may not see its fence: with `bucket`, a zombie there is excused for so long."""
        self._recorder.world("fault", kind, what=what, slice=slice, seconds=seconds, bucket=bucket)

    # --- provider and bucket faults ---

    async def before(self, verb: str, name: str) -> Fault | None:
        """The fate of one provider call (`capacity.fake.Faults`)."""
        if not self.on:
            return None
        if self._zone_is_down(verb, name):
            return Fault(FaultKind.TRANSIENT)
        if verb == "create" and self._rng.random() < self._foreign_rate:
            self._take_name(name)
        if self._rng.random() >= self._call_rate:
            return None
        kind, code = self._rng.choice(_BY_VERB[verb])
        seconds = {
            FaultKind.RATE_LIMIT: self._rng.choice([0.0, 5.0, 30.0]),
            FaultKind.SLOW: self._rng.uniform(1.0, 45.0),
            FaultKind.LATE_CREATE: self._rng.uniform(5.0, 900.0),
            FaultKind.STALE_LIST: self._rng.uniform(10.0, 300.0),
            FaultKind.SLOW_DELETE: self._rng.uniform(30.0, 400.0),
        }.get(kind, 0.0)
        self._note(code, f"{verb} {name}: {kind.value}")
        return Fault(kind, seconds)

    def _zone_is_down(self, verb: str, name: str) -> bool:
        """Whether the zone of a call does not answer at all just now; a listing's name is its zone."""
        vm = self.world.cloud.vm(name) if self.world is not None and verb != "list" else None
        zone = vm.zone if vm is not None else name
        return asyncio.get_running_loop().time() < self._zone_down_until.get(zone, 0.0)

    async def after(self, verb: str, name: str) -> None:
        """A create that was sent twice lands again when its name is free. Other replies are drawn in `before`."""
        if verb != "delete" or not self._strike(self._again_rate, "C2", f"a second create of {name} is on its way"):
            return
        wanted = self._slice(name)
        # What was swept has no hosts in its row: nobody knows what was once asked for under that name.
        if wanted is not None and wanted.hosts and self.world is not None:
            seconds = self._rng.uniform(60.0, 600.0)
            cloud, label = self.world.cloud, self.world.label
            asyncio.get_running_loop().call_later(seconds, cloud.land, wanted, wanted.provider, label)

    def _slice(self, name: str) -> Slice | None:
        return next((slice for slice in self.slices() if slice.id == name), None)

    def _take_name(self, name: str) -> None:
        """Somebody else's machine under the name we are about to use."""
        wanted = self._slice(name)
        if wanted is not None and self.world is not None and self.world.cloud.vm(name) is None:
            self.world.cloud.create_outside(wanted, "somebody-else")
            self._note("C1", f"name {name} taken by somebody else")

    # --- the nemesis: what breaks by itself ---

    async def nemesis(self, until_s: float) -> None:
        """Break something every few seconds until the first phase ends."""
        loop = asyncio.get_running_loop()
        actions = (
            self._preempt, self._preempt, self._preempt, self._break_host, self._partition, self._partition,
            self._pause_host, self._noise, self._agent_trouble, self._store_outage, self._skew_clock,
            self._freeze_controller, self._change_zone, self._crash_controller, self._zone_outage,
        )  # fmt: skip
        while loop.time() < until_s:
            await asyncio.sleep(self._rng.expovariate(1 / self._pause_s))
            if self.on:
                self._rng.choice(actions)()

    def _vms(self, *states: str) -> list[str]:
        assert self.world is not None
        return [vm.name for vm in self.world.cloud.vms() if vm.label == self.world.label and vm.state in states]

    def _preempt(self) -> None:
        assert self.world is not None
        names = self._vms(CREATING, READY, READY, DELETING)
        if names:
            name = self._rng.choice(names)
            notice_s = self._rng.choice([0.0, 0.0, 30.0])
            self._note("C4", f"preempt {name}, notice {notice_s:.0f} s")
            self.world.cloud.preempt(name, notice_s=notice_s, undo_delete=self._rng.random() < 0.5)

    def _break_host(self) -> None:
        assert self.world is not None
        cloud = self.world.cloud
        names = self._vms(READY)
        if not names:
            return
        name = self._rng.choice(names)
        vm = cloud.vm(name)
        assert vm is not None
        host = self._rng.randrange(vm.size)
        act = self._rng.choice(["stop", "replace", "die", "fail", "delete", "maintain"])
        self._note("N3" if act == "die" else "C5", f"{act} {name}/{host}")
        match act:
            case "stop":
                cloud.stop_host(name, host)
            case "replace":
                cloud.replace_host(name, host)
            case "die":
                cloud.die_unseen(name)
            case "fail":
                cloud.fail(name)
            case "delete":
                cloud.delete_outside(name)
            case _:
                cloud.maintain(name, self._rng.uniform(10.0, 120.0))

    def _partition(self) -> None:
        assert self.world is not None
        network = self.world.network
        agents = self.world.agents()
        if not agents:
            return
        for agent in self._rng.sample(agents, min(len(agents), self._rng.choice([1, 1, 3]))):
            place = agent.place
            seconds = self._rng.choice([3.0, 20.0, 60.0, 400.0, 900.0])
            bucket = self._rng.random() < 0.3
            way = self._rng.choice(["full", "one-way", "flapping"])
            self._blind("N1", place.slice, seconds, bucket, f"{way} partition of host {place.host}")
            if way == "flapping":
                network.flap(place.slice, place.host, period_s=7.0, seconds=seconds, bucket=bucket)
            else:
                network.cut(
                    place.slice, place.host, requests=way == "full", replies=True, bucket=bucket, seconds=seconds
                )

    def _pause_host(self) -> None:
        assert self.world is not None
        agents = self.world.agents()
        if agents:
            agent = self._rng.choice(agents)
            seconds = self._rng.choice([10.0, 25.0, 60.0, 300.0, 800.0])
            self._blind("P3", agent.place.slice, seconds, True, f"host {agent.place.host} stopped")
            agent.pause(seconds)

    def _noise(self) -> None:
        """Messages of some hosts are lost, doubled or late from now on."""
        assert self.world is not None
        agents = self.world.agents()
        for agent in self._rng.sample(agents, min(len(agents), 3)):
            link = agent.link
            link.loss = self._rng.choice([0.0, 0.1, 0.3])
            link.duplicate = self._rng.choice([0.0, 0.2, 0.5])
            link.late = self._rng.choice([0.0, 0.1, 0.2])
            link.drop_exits = self._rng.choice([0, 1, 2])
            link.bucket_loss = self._rng.choice([0.0, 0.2])
            self._blind("N2", agent.place.slice, 1e9, link.bucket_loss > 0, f"noise at host {agent.place.host}")

    def _agent_trouble(self) -> None:
        assert self.world is not None
        agents = self.world.agents()
        if agents:
            agent = self._rng.choice(agents)
            if self._rng.random() < 0.5:
                seconds = self._rng.uniform(1.0, 40.0)
                self._blind("P1", agent.place.slice, seconds, True, f"agent of host {agent.place.host} killed")
                agent.crash(seconds)
            else:
                self._note("C5", f"reboot {agent.place.slice}/{agent.place.host}")
                agent.reboot(self._rng.uniform(5.0, 90.0))

    def _store_outage(self) -> None:
        loop = asyncio.get_running_loop()
        if self.store_down():
            return
        seconds = self._rng.choice([1.0, 10.0, 60.0])
        self._store_down_until = loop.time() + seconds
        self._note("D1", f"store down {seconds:.0f} s")
        self._recorder.world("store.down", "store")
        loop.call_later(seconds, self._store_back)

    def _store_back(self) -> None:
        if self._store_down_until >= 0:
            self._store_down_until = -1.0
            self._recorder.world("store.up", "store")

    def _skew_clock(self) -> None:
        if not self._skews:
            return
        clock = self._rng.choice(self._clocks)
        clock.skew_s = self._rng.choice([0.0, 30.0, -30.0, 600.0, -600.0])
        self._note("P4", f"clock skew {clock.skew_s:.0f} s")

    def _freeze_controller(self) -> None:
        if self.incarnations:
            frozen = self._rng.choice(self.incarnations)
            seconds = self._rng.choice([4.0, 12.0, 40.0])
            frozen.frozen_until = asyncio.get_running_loop().time() + seconds
            self._note("P3", f"controller {frozen.name} stopped {seconds:.0f} s")

    def _crash_controller(self) -> None:
        alive = [each for each in self.incarnations if not each.dead]
        if alive:
            self._note("P1", "controller killed")
            self._rng.choice(alive).kill()

    def _zone_outage(self) -> None:
        """The provider's interface of one zone answers nobody for a while; what runs there runs on."""
        zone, seconds = self._rng.choice(ZONES), self._rng.choice([30.0, 150.0, 400.0])
        self._zone_down_until[zone] = asyncio.get_running_loop().time() + seconds
        self._note("C1", f"{zone} does not answer for {seconds:.0f} s")

    def _change_zone(self) -> None:
        assert self.world is not None
        zone = self._rng.choice(ZONES)
        model = self.world.cloud.zone_model(zone)
        chips = self._rng.choice([0, 8, 64, 1_000_000])
        self._note("C1", f"{zone} has {chips} chips")
        self.world.cloud.set_zone(
            zone,
            ZoneModel(
                chips=chips,
                ready_s=model.ready_s,
                delete_s=model.delete_s,
                refusal_rate=self._rng.choice([0.0, 0.3, 0.9]),
                preemptions_per_hour=self._rng.choice([0.0, 2.0, 10.0]),
                notice_s=self._rng.choice([0.0, 30.0]),
            ),
        )

    # --- the end ---

    def heal(self) -> None:
        """Nothing fails any more. What is broken stays broken until the system repairs it."""
        self.on = False
        assert self.world is not None
        self.world.heal()
        for zone in ZONES:
            self.world.cloud.set_zone(zone, ZoneModel(ready_s=(10.0, 40.0), delete_s=(5.0, 20.0)))
        for clock in self._clocks:
            clock.skew_s = 0.0
        for incarnation in self.incarnations:
            incarnation.frozen_until = 0.0
        self._store_back()
        self._recorder.world("heal", "world")


class BucketChaos:
    """Faults of the bucket as the controller reaches it (`objects.memory.ObjectFaults`)."""

    def __init__(self, chaos: Chaos, rng: random.Random, rate: float) -> None:
        self._chaos = chaos
        self._rng = rng
        self._rate = rate

    async def before(self, verb: str, path: str) -> None:
        self._maybe(f"{verb} {path}")

    async def after(self, verb: str, path: str) -> None:
        self._maybe(f"reply to {verb} {path}")

    def _maybe(self, what: str) -> None:
        if self._chaos.on and self._rng.random() < self._rate:
            raise ObjectsError(what)
