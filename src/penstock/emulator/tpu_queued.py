"""Queued resources: requests that wait for room, become one or several nodes, and are suspended when a node is lost.

`tpu_service` makes and deletes them; the cloud tells of every node that changed, and of room that came. All nodes of a
request come together or not at all. It must not take room that a request before it in the same zone is waiting for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.domain.catalogue import Accelerator
from penstock.emulator.tpu_cloud import Cloud
from penstock.emulator.tpu_nodes import Node
from penstock.emulator.tpu_operations import Operation
from penstock.emulator.tpu_words import TpuRefusal, stamp
from penstock.emulator.tpu_world import Seconds, drawn

#: In these a request is out of the queue and holds no machines.
_AT_REST = ("FAILED", "SUSPENDED")
#: A request can be deleted in these without `force`; WAITING_FOR_RESOURCES took the place of ACCEPTED.
DELETABLE = ("ACCEPTED", "WAITING_FOR_RESOURCES", *_AT_REST)


class Wanted(msgspec.Struct, frozen=True):
    """One node that a request asks for."""

    name: str
    spec: dict[str, Any]
    accelerator: Accelerator
    type: str
    slice: int
    slices: int


class QueuedResource:
    """One request."""

    def __init__(self, name: str, body: dict[str, Any], wanted: list[Wanted], now: float, api: str) -> None:
        self.name = name
        _, self.project, _, self.zone, _, self.id = name.split("/")
        self.body = body
        self.wanted = wanted
        self.api = api
        self.created_at = now
        self.spot = False
        self.reserved: str | None = None
        self.valid_after: float | None = None
        self.valid_until: float | None = None
        self.run_s: float | None = None
        self.state = "CREATING"
        self.initiator = "USER"
        self.flaw: TpuRefusal | None = None  #: what the service finds out only after it has taken the request in
        self.error: dict[str, Any] | None = None
        self.deletes: list[Operation] = []
        self.gone = False

    @property
    def chips(self) -> int:
        return sum(each.accelerator.chips for each in self.wanted)

    def shown(self) -> dict[str, Any]:
        state: dict[str, Any] = {"state": self.state, "stateInitiator": self.initiator}
        if self.error is not None:
            state["failedData"] = {"error": self.error}
        elif self.state != "WAITING_FOR_RESOURCES":  # it has no data of its own
            state[f"{self.state.lower()}Data"] = {}
        return {**self.body, "name": self.name, "createTime": stamp(self.created_at), "state": state}


class Queue:
    """All queued resources."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._timeline = cloud.timeline
        self.all: dict[str, QueuedResource] = {}
        cloud.listeners.append(self._heard)

    # --- asked for ---

    def add(self, queued: QueuedResource, created: Operation) -> None:
        self.all[queued.name] = queued
        self._become(queued, "CREATING", "USER")

        def accepted() -> None:
            if queued.flaw is not None and queued.state == "CREATING":
                self._fail(queued, queued.flaw)
            elif queued.state == "CREATING":
                self._become(queued, self._cloud.world.accepted_state, "SERVICE")
            created.end(queued.flaw)
            self._pump()

        self._timeline.after(self._delay(queued, self._cloud.world.delays.accept), accepted)
        if queued.valid_after is not None:
            self._timeline.at(queued.valid_after, self._pump)
        if queued.valid_until is not None:
            self._timeline.at(queued.valid_until, lambda: self._expire(queued))

    def delete(self, queued: QueuedResource, operation: Operation, *, force: bool) -> None:
        nodes = self.nodes_of(queued)
        if not force and nodes and queued.state not in DELETABLE:
            raise TpuRefusal(
                "FAILED_PRECONDITION",
                f"Queued resource '{queued.name}' is in state {queued.state} and has nodes; delete its nodes first, or "
                f"use force.",
            )
        if not force and queued.state in ("CREATING", "PROVISIONING"):
            raise TpuRefusal(
                "FAILED_PRECONDITION", f"Queued resource '{queued.name}' is in state {queued.state}; use force."
            )
        queued.deletes.append(operation)
        if queued.state != "DELETING":
            self._become(queued, "DELETING", "USER")
        for node in nodes:
            if node.state != "DELETING":
                self._cloud.delete(node, lambda _: None)
        if not nodes:
            self._timeline.after(self._delay(queued, self._cloud.world.delays.delete), lambda: self._vanish(queued))

    def reset(self, queued: QueuedResource, operation: Operation) -> None:
        """Its machines are restarted; without any there is nothing to reset."""
        if queued.state != "ACTIVE":
            raise TpuRefusal(
                "FAILED_PRECONDITION", f"Queued resource '{queued.name}' is in state {queued.state}, not ACTIVE."
            )
        for node in self.nodes_of(queued):
            self._cloud.restart(node)
        self._timeline.after(0.0, lambda: operation.end(None))

    def nodes_of(self, queued: QueuedResource) -> list[Node]:
        there = self._cloud.books.nodes
        return [node for each in queued.wanted if (node := there.get(each.name)) and node.queued == queued.name]

    # --- happens by itself ---

    def _heard(self, node: Node | None) -> None:
        """A node changed, or there may be more room."""
        queued = self.all.get(node.queued) if node is not None and node.queued else None
        if queued is not None and node is not None:
            self._follow(queued, node)
        if node is None or node.gone_at is not None or node.state in ("PREEMPTED", "STOPPED", "TERMINATED"):
            self._timeline.after(0.0, self._pump)

    def _follow(self, queued: QueuedResource, node: Node) -> None:
        nodes = self.nodes_of(queued)
        if queued.state == "DELETING":
            if not nodes:
                self._vanish(queued)
            elif node.gone_at is None and node.state != "DELETING":
                self._cloud.delete(node, lambda _: None)  # something undid it
        elif queued.state == "SUSPENDING":
            pass  # what becomes of its nodes was decided when it began
        elif node.gone_at is not None or node.state in ("PREEMPTED", "TERMINATED", "DELETING"):
            by = "USER" if node.state == "DELETING" else "SERVICE"
            if queued.state in ("ACTIVE", "PROVISIONING"):
                self._suspend(queued, by)
        elif queued.state == "PROVISIONING" and [each.state for each in nodes] == ["READY"] * len(queued.wanted):
            self._activate(queued, nodes)

    def _pump(self) -> None:
        """Give room to those who wait, in their order; one that does not fit keeps its zone and type waiting."""
        blocked: set[tuple[str, str]] = set()
        for queued in list(self.all.values()):
            if queued.state not in ("ACCEPTED", "WAITING_FOR_RESOURCES"):
                continue
            if queued.valid_after is not None and self._timeline.now < queued.valid_after:
                continue
            place = (queued.zone, queued.wanted[0].type)
            if place in blocked or not self._fits(queued):
                blocked.add(place)
            else:
                self._provision(queued)

    def _fits(self, queued: QueuedResource) -> bool:
        kind = queued.wanted[0].type
        if queued.reserved is not None:
            return self._cloud.reservation_for(queued.zone, kind, queued.reserved, queued.chips) is not None
        return self._cloud.room(queued.zone, kind, queued.chips)

    def _provision(self, queued: QueuedResource) -> None:
        self._become(queued, "PROVISIONING", "SERVICE")
        made = [self._make(queued, wanted) for wanted in queued.wanted]

        def bring_up() -> None:
            for node in made:
                if queued.state == "PROVISIONING" and node.gone_at is None and node.state == "CREATING":
                    self._cloud.bring_up(node, lambda _: None)

        self._timeline.after(self._delay(queued, self._cloud.world.delays.provision), bring_up)

    def _make(self, queued: QueuedResource, wanted: Wanted) -> Node:
        return self._cloud.make(
            wanted.name,
            wanted.spec,
            wanted.accelerator,
            wanted.type,
            spot=queued.spot,
            reserved=queued.reserved,
            api=queued.api,
            queued=queued.name,
            slices=(wanted.slice, wanted.slices),
        )

    def _activate(self, queued: QueuedResource, nodes: list[Node]) -> None:
        self._become(queued, "ACTIVE", "SERVICE")
        if queued.run_s is None:
            return
        ends_at = self._timeline.now + queued.run_s
        for node in nodes:
            scheduling = {**node.spec.get("schedulingConfig", {}), "terminationTimestamp": stamp(ends_at)}
            self._cloud.describe(node, {"schedulingConfig": scheduling})
            self._timeline.at(ends_at, self._ender(node))

    def _ender(self, node: Node) -> Callable[[], None]:
        return lambda: self._cloud.end(node)

    def _expire(self, queued: QueuedResource) -> None:
        if queued.state in ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES"):
            why = TpuRefusal(
                "DEADLINE_EXCEEDED", "The request could not be fulfilled within the time that it was valid for."
            )
            self._fail(queued, why)

    def _fail(self, queued: QueuedResource, why: TpuRefusal) -> None:
        queued.error = why.rpc()
        self._become(queued, "FAILED", "SERVICE")

    def _suspend(self, queued: QueuedResource, by: str) -> None:
        self._become(queued, "SUSPENDING", by)

        def suspended() -> None:
            if queued.state != "SUSPENDING":
                return
            if not self._cloud.world.suspended_keeps_nodes:
                for node in self.nodes_of(queued):
                    self._cloud.vanish(node)
            self._become(queued, "SUSPENDED", by)

        self._timeline.after(self._delay(queued, self._cloud.world.delays.suspend), suspended)

    def _vanish(self, queued: QueuedResource) -> None:
        if queued.gone:
            return
        queued.gone = True
        del self.all[queued.name]
        self._cloud.books.record(self._timeline.now, "queued.gone", queued.name, queued.zone)
        for operation in queued.deletes:
            operation.end(None)
        self._timeline.after(0.0, self._pump)

    def _become(self, queued: QueuedResource, state: str, by: str) -> None:
        queued.state = state
        queued.initiator = by
        if state != "FAILED":
            queued.error = None
        self._cloud.books.record(self._timeline.now, f"queued.{state}", queued.name, queued.zone, chips=queued.chips)

    def _delay(self, queued: QueuedResource, seconds: Seconds) -> float:
        return drawn(seconds, random.Random(f"{self._cloud.world.seed}/{queued.name}/{queued.state}"))
