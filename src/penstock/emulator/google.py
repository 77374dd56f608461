"""Google's cloud as one ASGI application: Cloud TPU, Kubernetes Engine and Cloud Storage at one address, and a control
address for tests.

`wiring.emulators` serves it for `tpu emulator`. Requests that name clusters, or operations under /v1, are Kubernetes
Engine's, others that name a project under /v1, /v2 or /v2alpha1 Cloud TPU's, all others Cloud Storage's. Under
`/_emulator/tpu/` tests read the true history, plant faults, let something happen or let time pass. It must not be
reachable by others: it listens on 127.0.0.1 and asks nobody who they are.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from penstock.emulator import gke_rest
from penstock.emulator.asgi import (
    CONTROL,
    Receive,
    Scope,
    Send,
    break_connection,
    read_request,
    send_answer,
    until_gone,
)
from penstock.emulator.gcs import GcsEmulator
from penstock.emulator.gke_service import Kubernetes
from penstock.emulator.http_words import Answer, Request, as_json
from penstock.emulator.timeline import Timeline
from penstock.emulator.tpu_cloud import Cloud
from penstock.emulator.tpu_faults import TpuFault, TpuFaults
from penstock.emulator.tpu_hosts import Hosts
from penstock.emulator.tpu_nodes import Node
from penstock.emulator.tpu_operations import Operations
from penstock.emulator.tpu_queued import Queue
from penstock.emulator.tpu_rest import PATH, Hangs, Rest
from penstock.emulator.tpu_script import Script
from penstock.emulator.tpu_service import Service
from penstock.emulator.tpu_words import TpuRefusal, bad_argument
from penstock.emulator.tpu_world import Capacity, Geography, Happening, World

TPU_CONTROL: Final = CONTROL + "tpu/"
#: All that `gcloud compute tpus tpu-vm ssh` asks of Compute Engine: the keys that a project lets in.
_PROJECT: Final = re.compile(r"/compute/v1/projects/([^/]+)")


class Advance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds: float


class TpuEmulator:
    """Cloud TPU, and Kubernetes Engine in the same world. Everything is in this process; two of them share nothing."""

    def __init__(
        self,
        world: World,
        clock: Callable[[], float],
        hosts: Hosts,
        *,
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self.timeline = Timeline(clock)
        self.hosts = hosts
        geography = Geography(world)
        self.cloud = Cloud(world, self.timeline, hosts)
        self._script = Script(self.cloud, geography)
        queue = Queue(self.cloud)
        operations = Operations(self.timeline, random.Random(f"{world.seed}/operations"))
        self.faults = TpuFaults(world.faults, random.Random(f"{world.seed}/faults"))
        self._rest = Rest(Service(self.cloud, queue, operations, geography), self.faults, sleep)
        self._gke = gke_rest.GkeRest(Kubernetes(world, self.timeline, geography, self.cloud.books))

    async def answer(self, request: Request) -> Answer | None:
        self.timeline.catch_up()
        if request.path.startswith(TPU_CONTROL):
            try:
                if (request.method, request.path) == ("POST", TPU_CONTROL + "ways"):
                    return await self._open_ways(_decoded(request.body, list[str]))
                return self._control(request)
            except TpuRefusal as refusal:
                return refusal.answer()
        if gke_rest.PATH.match(request.path) is not None:
            return self._gke.answer(request)
        return await self._rest.answer(request)

    @staticmethod
    def serves(path: str) -> bool:
        return path.startswith(TPU_CONTROL) or any(each.match(path) is not None for each in (PATH, gke_rest.PATH))

    async def _open_ways(self, ways: list[str]) -> Answer:
        for way in ways:
            address, _, port = way.rpartition(":")
            if not address or not port.isdigit():
                raise bad_argument(f"{way!r} is not ADDRESS:PORT")
            await self.hosts.open_way(address, int(port))
        return Answer(204)

    def _control(self, request: Request) -> Answer:
        match (request.method, request.path.removeprefix(TPU_CONTROL)):
            case ("GET", "faults"):
                return as_json(self.faults.planted)
            case ("POST", "faults"):
                self.faults.plant(_decoded(request.body, list[TpuFault]))
                return as_json(self.faults.planted)
            case ("DELETE", "faults"):
                self.faults.planted.clear()
                return Answer(204)
            case ("GET", "history"):
                return as_json(self.cloud.books.history)
            case ("GET", "calls"):
                return as_json(self._rest.calls())
            case ("GET", "nodes"):
                return as_json([self._truth(node) for node in self.cloud.books.nodes.values()])
            case ("POST", "happen"):
                done = [self._script.happen(each) for each in _decoded(request.body, list[Happening])]
                return as_json(done)
            case ("POST", "capacity"):
                for rule in _decoded(request.body, list[Capacity]):
                    self.cloud.set_capacity(rule)
                return Answer(204)
            case ("POST", "advance"):
                self.timeline.advance(_decoded(request.body, Advance).seconds)
                return as_json({"now_s": self.timeline.now - self.timeline.begin})
            case _:
                known = "faults, history, calls, nodes, happen, capacity, ways and advance"
                raise TpuRefusal("NOT_FOUND", f"{request.method} {request.path}: there are {known}")

    def _truth(self, node: Node) -> dict[str, Any]:
        """A node with what the API does not tell."""
        hosts = [
            {
                "incarnation": host.incarnation,
                "address": host.address,
                "up": host.up,
                "disk": self.hosts.disk(host.incarnation),
            }
            for host in node.hosts
        ]
        return {**node.shown(), "hosts": hosts, "chips": node.chips, "spot": node.spot}


class GoogleEmulator:
    """The application: Cloud TPU, Kubernetes Engine and Cloud Storage."""

    def __init__(self, tpu: TpuEmulator, gcs: GcsEmulator) -> None:
        self._tpu = tpu
        self._gcs = gcs
        self._alarm: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await read_request(scope, receive)
        if request is None:
            return
        if "server" in scope:  # hosts reach storage here
            await self._tpu.hosts.open_way(*scope["server"])
        try:
            answer = await self._answer(request)
        except Hangs:
            await until_gone(receive)
            return
        finally:
            self._set_alarm()
        if answer is None:
            await break_connection(scope, receive)
        else:
            await send_answer(answer, send, head=request.method == "HEAD")

    async def _answer(self, request: Request) -> Answer | None:
        if self._tpu.serves(request.path):
            return await self._tpu.answer(request)
        if request.method == "GET" and (found := _PROJECT.fullmatch(request.path)):
            metadata = {"kind": "compute#metadata", "fingerprint": "cGVuc3RvY2s=", "items": []}
            return as_json({"kind": "compute#project", "name": found[1], "id": "1", "commonInstanceMetadata": metadata})
        return await self._gcs.answer(request)

    def _set_alarm(self) -> None:
        """What is due must happen when it is due, whether or not somebody asks: hosts live by it."""
        if self._alarm is not None:
            self._alarm.cancel()
        wait = self._tpu.timeline.next_in()
        if wait is not None:
            self._alarm = asyncio.get_running_loop().call_later(wait, self._due)

    def _due(self) -> None:
        self._tpu.timeline.catch_up()
        self._set_alarm()


def _decoded(body: bytes, form: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=form)
    except msgspec.DecodeError as error:
        raise bad_argument(str(error)) from error
