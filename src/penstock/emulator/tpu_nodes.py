"""Nodes as they truly are, and the books about them: who exists, who holds chips and quota, what happened when.

`tpu_cloud` moves nodes; listings, stale ones too, and checkers read here. It decides nothing and knows no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from penstock.domain.catalogue import Accelerator
from penstock.emulator.tpu_words import stamp
from penstock.emulator.tpu_world import GENERATIONS

STALE_S_MAX: Final = 3600.0  #: how old a stale listing can be: nodes that are gone are remembered this long
#: States in which a node has machines; a preempted or stopped one only holds quota.
HOLDS_CHIPS: Final = ("CREATING", "READY", "REPAIRING", "RESTARTING", "DELETING", "STOPPING", "STARTING")
PORT: Final = 8470  #: of every network endpoint


class Happened(msgspec.Struct, frozen=True):
    """One true change. `what` is `node.STATE`, `node.gone`, `host.up`, `notice.preempted`, `quota.refused`, …"""

    t: float  #: seconds since the emulator began
    what: str
    name: str
    zone: str
    detail: dict[str, Any] = {}


class Host:
    """One machine: what it is called, where it is, whether it runs."""

    __slots__ = ("address", "incarnation", "up")

    def __init__(self, incarnation: str, address: str) -> None:
        self.incarnation = incarnation
        self.address = address
        self.up = False


class Node:
    """One node. `spec` is what was asked for, in the API's words; the rest is what became of it."""

    def __init__(
        self, name: str, spec: dict[str, Any], accelerator: Accelerator, kind: str, now: float, number: str
    ) -> None:
        self.name = name
        _, self.project, _, self.zone, _, self.id = name.split("/")
        self.spec = spec
        self.accelerator = accelerator
        self.type = kind
        self.number = number
        self.created_at = now
        self.api = "V2"
        self.state = "CREATING"
        self.health = ""
        self.health_note = ""
        self.spot = False
        self.reserved = False  #: takes its chips from a reservation
        self.reservation = ""  #: which; "" while it has found none
        self.queued: str | None = None
        self.slice = 0
        self.slices = 1
        self.ends_at: float | None = None
        self.maintenance: dict[str, Any] | None = None
        self.hosts: list[Host] = []
        self.never_up: frozenset[int] = frozenset()  #: hosts that do not come up
        self.moved = 0  #: counts states, so that what was planned for an earlier one is known to be void
        self.hidden = False
        self.counting: dict[int, int] = {}  #: rule of preemption -> the state it counts from, see `tpu_script`
        self.gone_at: float | None = None
        self.past: deque[tuple[float, dict[str, Any]]] = deque()

    @property
    def chips(self) -> int:
        return self.accelerator.chips

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"

    def shown(self) -> dict[str, Any]:
        """As the API shows it now."""
        found: dict[str, Any] = {
            **self.spec,
            "name": self.name,
            "acceleratorType": self.type,
            "acceleratorConfig": {
                "type": GENERATIONS[self.accelerator.generation],
                "topology": self.accelerator.topology,
            },
            "state": self.state,
            "createTime": stamp(self.created_at),
            "apiVersion": self.api,
            "id": self.number,
        }
        if self.health:
            found["health"] = self.health
        if self.health_note:
            found["healthDescription"] = self.health_note
        if self.queued is not None:
            found["queuedResource"] = self.queued
        if self.slices > 1:
            found["multisliceNode"] = True
        if self.maintenance is not None:
            found["upcomingMaintenance"] = self.maintenance
        if self.state not in ("CREATING", "PREEMPTED", "STOPPED", "TERMINATED"):
            outside = self.spec.get("networkConfig", {}).get("enableExternalIps", False)
            found["networkEndpoints"] = [_endpoint(host, outside) for host in self.hosts]
        return found

    def shown_at(self, when: float) -> dict[str, Any] | None:
        """As it was shown then; None before it was made and after it was gone."""
        if self.gone_at is not None and self.gone_at <= when:
            return None
        shown = [each for since, each in self.past if since <= when]
        return shown[-1] if shown else None


def _endpoint(host: Host, outside: bool) -> dict[str, Any]:
    access = {"externalIp": host.address} if outside else {}
    return {"ipAddress": host.address, "port": PORT, "accessConfig": access}


class Books:
    """All nodes there are, what they use, and everything that happened."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self.nodes: dict[str, Node] = {}
        self._gone: deque[Node] = deque()
        self._chips: dict[tuple[str, str], int] = {}  #: zone, type -> chips in use
        self.history: list[Happened] = []

    def record(self, now: float, what: str, name: str, zone: str, **detail: Any) -> None:
        self.history.append(Happened(round(now - self._begin, 6), what, name, zone, detail))

    def enter(self, node: Node) -> None:
        self.nodes[node.name] = node

    def leave(self, node: Node, now: float) -> None:
        node.gone_at = now
        del self.nodes[node.name]
        self._gone.append(node)
        while self._gone and (self._gone[0].gone_at or 0.0) < now - STALE_S_MAX:
            self._gone.popleft()

    def count(self, node: Node, sign: int) -> None:
        if node.reserved:
            return
        place = (node.zone, node.type)
        self._chips[place] = self._chips.get(place, 0) + sign * node.chips

    def used(self, zone: str) -> Iterator[tuple[str, int]]:
        """Chips in use in a zone by type."""
        for (where, kind), chips in self._chips.items():
            if where == zone:
                yield kind, chips

    def listing(self, project: str, zone: str, age_s: float = 0.0, now: float = 0.0) -> list[dict[str, Any]]:
        """What a listing shows, or what it showed `age_s` ago; zone "-" is every zone."""
        there = [
            node
            for node in (*self._gone, *self.nodes.values())
            if node.project == project and zone in ("-", node.zone) and not node.hidden
        ]
        if age_s <= 0:
            return [node.shown() for node in there if node.gone_at is None]
        then = now - age_s
        return [shown for node in there if (shown := node.shown_at(then)) is not None]

    def remember(self, node: Node, now: float) -> None:
        """Keep how it is shown from now on, for listings that are stale."""
        node.past.append((now, node.shown()))
        while len(node.past) > 1 and node.past[1][0] < now - STALE_S_MAX:
            node.past.popleft()
