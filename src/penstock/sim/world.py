"""The fake world as one thing: cloud, bucket, network and the agents that live on the cloud's machines.

The simulator builds one `World`, lets controllers talk to it through the ports, and breaks it on purpose
through `cloud`, `network` and the agents. It connects what truly depends on each other (a machine that is
ready runs agents, one that is gone takes them along) and writes the world's history. It must never read the
controller's store.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque

from penstock.capacity.fake import FakeCapacity, Faults
from penstock.capacity.fakecloud import GONE, FakeCloud, ZoneModel
from penstock.domain.invariants.history import Recorder
from penstock.domain.ledger import checksum
from penstock.objects.memory import MemoryObjects, ObjectFaults
from penstock.sim.agents import Agent
from penstock.sim.network import LinkedObjects, Network, Sync
from penstock.sim.processes import Around, BehaviourOf, Place
from penstock.sim.workers import shard_record

GONE_NAMED_S = 600.0  #: time enough for a controller to hear of a slice that vanished


class World:
    """Everything outside the controller."""

    def __init__(
        self,
        *,
        rng: random.Random,
        behaviour: BehaviourOf,
        recorder: Recorder | None = None,
        server: Sync | None = None,
        label: str = "penstock",
        zone_model: ZoneModel | None = None,
        delay_s: tuple[float, float] = (0.005, 0.05),
        quiet: bool = False,
    ) -> None:
        """`quiet`: agents sync only when they have news or are poked; ask `alive` instead of counting syncs."""
        self.rng = rng
        self.recorder = recorder
        self.label = label
        self.quiet = quiet
        self.around = Around(rng=rng, behaviour=behaviour, recorder=recorder)
        self.cloud = FakeCloud(
            rng=rng, recorder=recorder, on_vm=self._on_vm, on_notice=self._on_notice, zone_model=zone_model
        )
        self.network = Network(rng=rng, recorder=recorder, server=server, delay_s=delay_s)
        self.bucket = MemoryObjects(writer="world", on_change=self._on_object)
        self._agents: dict[str, dict[int, Agent]] = {}
        self._dead: dict[str, float] = {}
        self._gone: deque[tuple[float, str]] = deque()

    # --- the ports the controller gets ---

    def capacity(
        self,
        name: str = "fake",
        *,
        faults: Faults | None = None,
        latency_s: tuple[float, float] = (0.0, 0.0),
    ) -> FakeCapacity:
        return FakeCapacity(
            self.cloud,
            name=name,
            label=self.label,
            faults=faults,
            recorder=self.recorder,
            latency_s=latency_s,
            rng=self.rng,
        )

    def objects(self, writer: str, faults: ObjectFaults | None = None) -> MemoryObjects:
        return self.bucket.by(writer, faults)

    # --- the hosts ---

    def agents(self, slice: str | None = None) -> list[Agent]:
        """The agents of one slice, or all of them, in the order in which their hosts came up."""
        if slice is not None:
            return list(self._agents.get(slice, {}).values())
        return [agent for hosts in self._agents.values() for agent in hosts.values()]

    def agent(self, slice: str, host: int = 0) -> Agent | None:
        return self._agents.get(slice, {}).get(host)

    def alive(self, slice: str, host: int) -> bool:
        """Whether the server would hear this host if it asked now: feeds the contact table of quiet runs."""
        agent = self.agent(slice, host)
        return agent is not None and agent.up and not agent.link.requests_cut

    def dead_since(self) -> dict[str, float]:
        """Slices of which a host that was up has no power, by loop time; gone ones are named for a while longer."""
        now = asyncio.get_running_loop().time()
        while self._gone and self._gone[0][0] < now - GONE_NAMED_S:
            self._dead.pop(self._gone.popleft()[1], None)
        return self._dead

    def poke(self, slice: str) -> None:
        """Let the agents of a slice sync now: the server has orders for them."""
        for agent in self._agents.get(slice, {}).values():
            agent.poke()

    def heal(self) -> None:
        """Faults of the network end; what is broken in the cloud stays broken until somebody repairs it."""
        self.network.heal()

    # --- what depends on what ---

    def _on_vm(self, name: str, provider_id: str, hosts: tuple[str | None, ...], state: str) -> None:
        """Bring agents in line with the machines: `hosts` names the incarnation that has power, host by host."""
        if name not in self._agents and not any(hosts):
            return
        agents = self._agents.setdefault(name, {})
        for host, incarnation in enumerate(hosts):
            agent = agents.get(host)
            same = agent is not None and agent.place.incarnation == incarnation
            if agent is not None and agent.powered and not same:
                agent.power_off()
            if incarnation is None:
                continue
            if agent is None or not same:
                agents[host] = self._new_agent(Place(name, provider_id, host, incarnation))
            elif not agent.powered:
                agent.power_on()
        if all(hosts):
            self._dead.pop(name, None)
        else:
            self._dead.setdefault(name, asyncio.get_running_loop().time())
        if state == GONE:
            self._gone.append((asyncio.get_running_loop().time(), name))
            del self._agents[name]
            for host in range(len(hosts)):
                self.network.drop_link(name, host)

    def _new_agent(self, place: Place) -> Agent:
        link = self.network.link(place.slice, place.host)
        bucket = self.bucket.by(f"{place.slice}/{place.host}")
        objects = LinkedObjects(bucket, self.network, link)
        return Agent(self.around, self.network, objects, place, quiet=self.quiet)

    def _on_notice(self, name: str, provider_id: str) -> None:
        for agent in self.agents(name):
            if agent.place.provider_id == provider_id:
                agent.give_notice()

    def _on_object(self, path: str, data: bytes | None, generation: int, writer: str) -> None:
        if self.recorder is None:
            return
        if data is None:
            self.recorder.world("object.deleted", path)
            return
        self.recorder.world("object.put", path, generation=generation, checksum=checksum(data), writer=writer)
        shard = shard_record(path, data, generation)
        if shard is not None:
            kind, subject, body = shard
            self.recorder.world(kind, subject, **body)
