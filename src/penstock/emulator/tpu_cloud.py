"""What truly happens to nodes and their hosts: they come up, are preempted, maintained, replaced and deleted.

`tpu_service` calls it for what users ask, `tpu_script` for what happens by itself. Every change is kept in the books
and told to those who listen (queued resources). It never looks at who asked, or whether the answer arrived.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from penstock.domain.catalogue import Accelerator
from penstock.emulator.timeline import Timeline
from penstock.emulator.tpu_hosts import Hosts, HostSpec
from penstock.emulator.tpu_nodes import HOLDS_CHIPS, Books, Host, Node
from penstock.emulator.tpu_words import TpuRefusal, no_capacity, no_reserved_capacity, stamp
from penstock.emulator.tpu_world import Capacity, Reservation, Seconds, World, ZoneRule, drawn, matching

Done = Callable[[TpuRefusal | None], None]
#: Told of every node that changed; of None when room may have come by itself.
Listener = Callable[[Node | None], None]


class Cloud:
    """All nodes of all projects."""

    def __init__(self, world: World, timeline: Timeline, hosts: Hosts) -> None:
        self.world = world
        self.timeline = timeline
        self.books = Books(timeline.begin)
        self.rng = random.Random(f"{world.seed}/cloud")
        self.listeners: list[Listener] = []
        self._hosts = hosts
        self._capacity: list[Capacity] = []
        for rule in world.capacity:
            timeline.at(timeline.begin + rule.at_s, partial(self.set_capacity, rule))

    # --- what there is room for ---

    def set_capacity(self, rule: Capacity) -> None:
        """From now on; fewer chips than are in use take spot nodes away, newest first."""
        self._capacity.insert(0, rule)
        for node in reversed(list(self.books.nodes.values())):
            if node.spot and node.state in HOLDS_CHIPS and self._over(node):
                self.preempt(node)
        self._tell(None)

    def room(self, zone: str, kind: str, chips: int) -> bool:
        """Whether so many chips more fit in; no rule at all means that everything does."""
        rule = next(matching(tuple(self._capacity), zone, kind, False), None)
        return rule is None or self._in_use(zone, rule) + chips <= rule.chips

    def _over(self, node: Node) -> bool:
        rule = next(matching(tuple(self._capacity), node.zone, node.type, False), None)
        return not node.reserved and rule is not None and self._in_use(node.zone, rule) > rule.chips

    def _in_use(self, zone: str, rule: Capacity) -> int:
        return sum(chips for kind, chips in self.books.used(zone) if fnmatchcase(kind, rule.type))

    def reservation_for(self, zone: str, kind: str, name: str, chips: int) -> Reservation | None:
        """One with room for so many chips more, by name or any that fits."""
        for each in self.world.reservations:
            fits = each.zone == zone and fnmatchcase(kind, each.type) and name in ("", each.name)
            if fits and self.reserved_in_use(each) + chips <= each.chips:
                return each
        return None

    def reserved_in_use(self, reservation: Reservation) -> int:
        return sum(node.chips for node in self.books.nodes.values() if node.reservation == reservation.name)

    # --- coming ---

    def make(
        self,
        name: str,
        spec: dict[str, Any],
        accelerator: Accelerator,
        kind: str,
        *,
        spot: bool = False,
        reserved: str | None = None,
        api: str = "V2",
        queued: str | None = None,
        slices: tuple[int, int] = (0, 1),
    ) -> Node:
        """A node in CREATING that holds its chips; `reserved` names a reservation, "" any. `bring_up` or `refuse_late`
        must follow, by what `lacking` says."""
        node = Node(name, spec, accelerator, kind, self.timeline.now, str(self.rng.randrange(10**17, 10**18)))
        node.spot = spot
        node.api = api
        node.queued = queued
        node.slice, node.slices = slices
        if reserved is not None:
            found = self.reservation_for(node.zone, kind, reserved, node.chips)
            node.reserved = True
            node.reservation = found.name if found else ""
        self.books.enter(node)
        self.books.count(node, +1)
        for index in range(accelerator.hosts):
            node.hosts.append(self._new_host(node, index))
        self._changed(node, chips=node.chips, spot=spot, labels=dict(spec.get("labels", {})), type=kind)
        return node

    def lacking(self, node: Node) -> TpuRefusal | None:
        """Why a node that was just made cannot have its chips."""
        if node.reserved:
            return None if node.reservation else no_reserved_capacity(self.rng)
        return no_capacity(node.zone, self.rng) if self._over(node) else None

    def bring_up(self, node: Node, done: Done, *, fault: str = "") -> None:
        """READY after the world's delay, unless something comes between."""
        if fault == "stuck":
            return
        node.never_up = {
            "hostless": frozenset(range(len(node.hosts))),
            "short_of_hosts": frozenset({len(node.hosts) - 1}),
        }.get(fault, frozenset())
        own = self.world.zones.get(node.zone, ZoneRule()).create
        delay_s = self.delay(node, self.world.delays.create if own is None else own)
        self._later(node, delay_s, lambda: self._ready(node, done, fault), done)

    def refuse_late(self, node: Node, why: TpuRefusal, done: Done) -> None:
        """The create fails after a while, and the node is gone with it."""

        def refuse() -> None:
            self.books.record(self.timeline.now, "node.refused", node.name, node.zone, why=why.status)
            self.vanish(node)
            done(why)

        self._later(node, self.delay(node, self.world.delays.stockout), refuse, done)

    def _ready(self, node: Node, done: Done, fault: str) -> None:
        for index in range(len(node.hosts)):
            self._power_on(node, index)
        node.health = "HEALTHY"
        self._become(node, "READY")
        done(TpuRefusal("INTERNAL", "an internal error has occurred") if fault == "broken" else None)

    # --- going ---

    def delete(self, node: Node, done: Done, seconds: float | None = None) -> None:
        if node.state != "DELETING":
            self._become(node, "DELETING")
        wait = self.delay(node, self.world.delays.delete) if seconds is None else seconds
        self.timeline.after(wait, lambda: self._deleted(node, done))

    def _deleted(self, node: Node, done: Done) -> None:
        if node.gone_at is None and node.state == "DELETING":
            self.vanish(node)
        done(None)

    def vanish(self, node: Node) -> None:
        """It is no more."""
        if node.gone_at is not None:
            return
        self._power_off_all(node)
        for host in node.hosts:
            self._hosts.discard(host.incarnation)
        if node.state in HOLDS_CHIPS:
            self.books.count(node, -1)
        node.moved += 1
        self.books.leave(node, self.timeline.now)
        self.books.record(self.timeline.now, "node.gone", node.name, node.zone)
        self._tell(node)

    def preempt(self, node: Node, *, notice_s: float = 0.0, undo_delete: bool = False) -> None:
        """Take its machines away, now or after a notice; a delete under way goes on unless `undo_delete`."""
        if node.gone_at is not None or node.state not in HOLDS_CHIPS:
            return
        if notice_s > 0:
            self._notify(node, "preempted", notice_s)
            self.timeline.after(notice_s, lambda: self.preempt(node, undo_delete=undo_delete))
            return
        self._power_off_all(node)
        self.books.record(self.timeline.now, "node.preempted", node.name, node.zone, was=node.state)
        if node.state != "DELETING" or undo_delete:
            node.health = ""
            self._become(node, "PREEMPTED")

    def end(self, node: Node) -> None:
        """Its time is up (flex-start): TERMINATED, and its machines are gone."""
        if node.gone_at is None and node.state in HOLDS_CHIPS:
            self._power_off_all(node)
            node.health = ""
            self._become(node, "TERMINATED")

    # --- in between ---

    def stop(self, node: Node, done: Done) -> None:
        self._power_off_all(node)
        self._become(node, "STOPPING")

        def stopped() -> None:
            node.health = ""
            self._become(node, "STOPPED")
            done(None)

        self._later(node, self.delay(node, self.world.delays.stop), stopped, done)

    def start(self, node: Node, done: Done) -> None:
        self._become(node, "STARTING")
        if self._over(node):
            why = no_capacity(node.zone, self.rng)
            self._become(node, "STOPPED")
            self.timeline.after(self.delay(node, self.world.delays.stockout), lambda: done(why))
            return
        self._later(node, self.delay(node, self.world.delays.start), lambda: self._ready(node, done, ""), done)

    def restart(self, node: Node) -> None:
        """All hosts off and on again, as the same machines."""
        self._power_off_all(node)
        for index in range(len(node.hosts)):
            self._power_on(node, index)

    def maintain(self, node: Node, seconds: float, notice_s: float = 0.0) -> None:
        """Hosts go down, after a notice, and come back as the same machines: their processes are lost."""
        if node.state != "READY":
            return
        start = self.timeline.now + notice_s
        node.maintenance = {
            "type": "SCHEDULED",
            "canReschedule": notice_s > 0,
            "maintenanceStatus": "PENDING" if notice_s > 0 else "ONGOING",
            "windowStartTime": stamp(start),
            "windowEndTime": stamp(start + seconds),
        }
        self._notify(node, "maintenance", notice_s)
        self._changed(node)
        self._later(node, notice_s, lambda: self._maintained(node, seconds), None)

    def _maintained(self, node: Node, seconds: float) -> None:
        self._power_off_all(node)
        node.health = "UNHEALTHY_MAINTENANCE"
        self._become(node, "REPAIRING")

        def back() -> None:
            node.maintenance = None
            self._ready(node, lambda _: None, "")

        self._later(node, seconds, back, None)

    def notify_host(self, node: Node, index: int, seconds: float) -> None:
        """One host hears that it will be preempted; what becomes of the node is another matter."""
        if index < len(node.hosts) and node.hosts[index].up:
            self.books.record(self.timeline.now, "notice.preempted", node.name, node.zone, seconds=seconds, host=index)
            self._hosts.notify(node.hosts[index].incarnation, "preempted", seconds)

    def stop_host(self, node: Node, index: int) -> None:
        """One host is off; the service goes on saying READY."""
        if index < len(node.hosts):
            self._power_off(node, index)

    def start_host(self, node: Node, index: int) -> None:
        if index < len(node.hosts) and node.state == "READY":
            node.never_up -= {index}
            self._power_on(node, index)

    def replace_host(self, node: Node, index: int) -> None:
        """Another machine under the same name and index, with a fresh disk and another address."""
        if index >= len(node.hosts) or node.state != "READY":
            return
        self._power_off(node, index)
        self._hosts.discard(node.hosts[index].incarnation)
        node.hosts[index] = self._new_host(node, index)
        node.never_up -= {index}
        self._power_on(node, index)
        self._changed(node)

    def die_unseen(self, node: Node) -> None:
        """Every host is dead and the service goes on saying READY."""
        self._power_off_all(node)

    def fail(self, node: Node) -> None:
        """The service calls it broken; what runs on the hosts goes on."""
        if node.state == "READY":
            node.health = "TIMEOUT"
            node.health_note = "The TPU runtime is unresponsive."
            self._become(node, "REPAIRING")

    def hide(self, node: Node, hidden: bool) -> None:
        """Left out of every listing, or back; a get still finds it."""
        node.hidden = hidden
        self.books.record(self.timeline.now, "node.hidden" if hidden else "node.shown", node.name, node.zone)

    def describe(self, node: Node, changes: dict[str, Any]) -> None:
        """Fields that a user may change were changed."""
        node.spec = {**node.spec, **changes}
        for host in node.hosts:
            self._hosts.describe(host.incarnation, node.spec.get("metadata", {}))
        self._changed(node)

    def guest_attributes(self, node: Node, index: int) -> dict[str, str]:
        return dict(self._hosts.guest_attributes(node.hosts[index].incarnation))

    def delay(self, node: Node, seconds: Seconds) -> float:
        return drawn(seconds, random.Random(f"{self.world.seed}/{node.name}/{node.state}/{node.moved}"))

    # --- how it is done ---

    def _later(self, node: Node, seconds: float, what: Callable[[], None], done: Done | None) -> None:
        """Do it unless the node has moved on; then whoever waits is told that it will not be."""
        moved = node.moved

        def due() -> None:
            if node.moved == moved and node.gone_at is None:
                what()
            elif done is not None:
                done(TpuRefusal("INTERNAL", "an internal error has occurred"))

        self.timeline.after(seconds, due)

    def _become(self, node: Node, state: str) -> None:
        held, holds = node.state in HOLDS_CHIPS, state in HOLDS_CHIPS
        if held != holds:
            self.books.count(node, +1 if holds else -1)
        node.state = state
        node.moved += 1
        self._changed(node)

    def _changed(self, node: Node, **detail: Any) -> None:
        now = self.timeline.now
        self.books.remember(node, now)
        self.books.record(now, f"node.{node.state}", node.name, node.zone, **detail)
        self._tell(node)

    def _tell(self, node: Node | None) -> None:
        for listener in self.listeners:
            listener(node)

    def _new_host(self, node: Node, index: int) -> Host:
        incarnation = f"{node.number}-{index}-{self.rng.getrandbits(32):08x}"
        return Host(incarnation, self._hosts.address(incarnation))

    def _notify(self, node: Node, notice: Any, seconds: float) -> None:
        self.books.record(self.timeline.now, f"notice.{notice}", node.name, node.zone, seconds=seconds)
        for host in node.hosts:
            if host.up:
                self._hosts.notify(host.incarnation, notice, seconds)

    def _power_on(self, node: Node, index: int) -> None:
        host = node.hosts[index]
        if host.up or index in node.never_up:
            return
        host.up = True
        self._hosts.start(self._spec_of(node, index))
        self.books.record(self.timeline.now, "host.up", node.name, node.zone, host=index, incarnation=host.incarnation)

    def _power_off(self, node: Node, index: int) -> None:
        host = node.hosts[index]
        if not host.up:
            return
        host.up = False
        self._hosts.stop(host.incarnation)
        self.books.record(
            self.timeline.now, "host.down", node.name, node.zone, host=index, incarnation=host.incarnation
        )

    def _power_off_all(self, node: Node) -> None:
        for index in range(len(node.hosts)):
            self._power_off(node, index)

    def _spec_of(self, node: Node, index: int) -> HostSpec:
        return HostSpec(
            project=node.project,
            zone=node.zone,
            node=node.id,
            node_number=node.number,
            index=index,
            hosts=len(node.hosts),
            incarnation=node.hosts[index].incarnation,
            accelerator_type=node.type,
            topology=node.accelerator.topology,
            devices=node.accelerator.jax_devices // node.accelerator.hosts,
            spot=node.spot,
            external_address=bool(node.spec.get("networkConfig", {}).get("enableExternalIps", False)),
            metadata=node.spec.get("metadata", {}),
            service_account=node.spec.get("serviceAccount", {}).get("email", "") or "default",
            addresses=tuple(host.address for host in node.hosts),
            slice=node.slice,
            slices=node.slices,
            disks=_disks(node, index),
            coordinator=self._coordinator(node),
        )

    def _coordinator(self, node: Node) -> str:
        """Where the slices of one request meet; they are all made before the first of them starts."""
        if node.slices == 1:
            return ""
        first = [each for each in self.books.nodes.values() if each.queued == node.queued and each.slice == 0]
        return first[0].hosts[0].address if first else ""


def _disks(node: Node, index: int) -> tuple[str, ...]:
    """What a host has attached, in order: every disk that is not for other workers alone."""
    disks = node.spec.get("dataDisks", ())
    mine = [disk for disk in disks if str(index) in (disk.get("workerIds") or [str(index)])]
    return tuple(disk.get("sourceDisk", "").rpartition("/")[2] for disk in mine)
