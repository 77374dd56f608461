"""The ways between hosts, the server and the bucket, and everything that can go wrong on them.

Agents call `Network.sync` and reach the bucket through `LinkedObjects`; the fault injector changes a host's
`Link`. Who answers a sync is `Network.server`: whichever controller is up now, or nobody. The network alone
records when the server stops and starts hearing a host, because only it sees both ends.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from penstock.domain import limits
from penstock.domain.custody import Phase, SyncReply, SyncRequest
from penstock.domain.invariants.history import Recorder
from penstock.ports.objects import Objects, ObjectsError, Stored
from penstock.ports.store import StoreError
from penstock.sim.loop import VirtualLoop

SYNC_TIMEOUT_S = limits.SYNC_S  #: an agent gives up on one sync after this, so that fence polls keep their pace
BUCKET_TIMEOUT_S = 1.0  #: a fence read must fail fast: two of them must fit into FENCE_WAIT_S
LATE_S = (1.0, 120.0)  #: how much later a duplicated or delayed request arrives

Sync = Callable[[SyncRequest], Awaitable[SyncReply]]


class Unreachable(Exception):
    """No answer came: the caller cannot know whether it was heard. A server that is down raises it too."""


class Link:
    """One host's connections. All fields may be changed at any time."""

    def __init__(self) -> None:
        self.requests_cut = False  #: nothing reaches the server
        self.replies_cut = False  #: the server hears, the host does not
        self.bucket_cut = False
        self.loss = 0.0  #: share of messages lost, each way
        self.bucket_loss = 0.0
        self.duplicate = 0.0  #: share of requests that arrive a second time, later
        self.late = 0.0  #: share of requests that arrive only after their sender gave up
        self.drop_exits = 0  #: so many requests that report an exit are lost
        self.frozen_until = 0.0  #: the host stands still (SIGSTOP): nothing on it sends, receives or ends
        self.heard = False  #: the server heard this host last time

    async def thaw(self) -> None:
        """Wait until the host moves again."""
        loop = asyncio.get_running_loop()
        while self.frozen_until > loop.time():  # noqa: ASYNC110 (a freeze can be prolonged while it lasts)
            await asyncio.sleep(self.frozen_until - loop.time())

    def heal(self) -> None:
        """End every fault but the freeze, which ends by itself."""
        self.requests_cut = self.replies_cut = self.bucket_cut = False
        self.loss = self.bucket_loss = self.duplicate = self.late = 0.0
        self.drop_exits = 0


class Network:
    """All links of the world."""

    def __init__(
        self,
        *,
        rng: random.Random,
        recorder: Recorder | None = None,
        server: Sync | None = None,
        delay_s: tuple[float, float] = (0.005, 0.05),
    ) -> None:
        self.server = server
        self._rng = rng
        self._recorder = recorder
        self._delay_s = delay_s
        self._healed = 0
        self._links: dict[tuple[str, int], Link] = {}

    def link(self, slice: str, host: int) -> Link:
        """The link of one host, made when first asked for; a replaced host inherits it with the wire."""
        return self._links.setdefault((slice, host), Link())

    def drop_link(self, slice: str, host: int) -> None:
        """The host is gone for good."""
        self.went_silent(slice, host)
        self._links.pop((slice, host), None)

    def heal(self) -> None:
        """All links are whole again and nothing late is under way any more."""
        self._healed += 1
        for link in self._links.values():
            link.heal()

    def cut(
        self,
        slice: str,
        host: int,
        *,
        requests: bool = True,
        replies: bool = True,
        bucket: bool = False,
        seconds: float | None = None,
    ) -> None:
        """Partition one host, for a while or until healed; with `requests=False` only replies are lost."""
        self._set_cut(self.link(slice, host), requests, replies, bucket)
        if seconds is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(seconds, self._set_cut, self.link(slice, host), False, False, False)

    def flap(self, slice: str, host: int, *, period_s: float, seconds: float, bucket: bool = False) -> None:
        """Cut and restored in turn, `period_s` each."""
        loop = asyncio.get_running_loop()
        link = self.link(slice, host)
        for turn in range(int(seconds / period_s)):
            cut = turn % 2 == 0
            loop.call_later(turn * period_s, self._set_cut, link, cut, cut, cut and bucket)
        loop.call_later(seconds, self._set_cut, link, False, False, False)

    def _set_cut(self, link: Link, requests: bool, replies: bool, bucket: bool) -> None:
        link.requests_cut, link.replies_cut, link.bucket_cut = requests, replies, bucket

    def went_silent(self, slice: str, host: int) -> None:
        """The server cannot hear this host from now on."""
        link = self._links.get((slice, host))
        if link is not None and link.heard:
            link.heard = False
            if self._recorder is not None:
                self._recorder.world("agent.silent", slice, host=host)

    async def sync(self, request: SyncRequest) -> SyncReply:
        """One request and its reply, or `Unreachable` after `SYNC_TIMEOUT_S` at most."""
        loop = asyncio.get_running_loop()
        link = self.link(request.slice, request.host)
        give_up_at = loop.time() + SYNC_TIMEOUT_S
        await self._travel()
        if self._loses_request(link, request):
            self.went_silent(request.slice, request.host)
            return await self._wait_in_vain(link, give_up_at)
        if link.late and self._rng.random() < link.late:
            self._deliver_later(request)
            return await self._wait_in_vain(link, give_up_at)
        if link.duplicate and self._rng.random() < link.duplicate:
            self._deliver_later(request)
        reply = await self._deliver(request, give_up_at)
        if link.replies_cut or (link.loss and self._rng.random() < link.loss):
            return await self._wait_in_vain(link, give_up_at)
        await self._travel()
        await link.thaw()
        if loop.time() > give_up_at:
            raise Unreachable("the reply came after its time")
        return reply

    def _loses_request(self, link: Link, request: SyncRequest) -> bool:
        if link.drop_exits and any(held.phase is Phase.EXITED for held in request.held):
            link.drop_exits -= 1
            return True
        return link.requests_cut or (link.loss > 0 and self._rng.random() < link.loss)

    async def _wait_in_vain(self, link: Link, give_up_at: float) -> SyncReply:
        await asyncio.sleep(max(0.0, give_up_at - asyncio.get_running_loop().time()))
        await link.thaw()
        raise Unreachable("no answer")

    async def _deliver(self, request: SyncRequest, give_up_at: float) -> SyncReply:
        """Hand the request over. The server works on it to the end, even when its sender is gone or gives up."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        task = loop.create_task(self._serve(request))
        loop.watch(task)
        try:
            async with asyncio.timeout_at(give_up_at):
                reply = await asyncio.shield(task)
        except TimeoutError:
            reply = None
        if reply is None:
            self.went_silent(request.slice, request.host)
            raise Unreachable("the server did not answer")
        link = self.link(request.slice, request.host)
        if not link.heard and link.frozen_until <= loop.time():
            link.heard = True
            if self._recorder is not None:
                self._recorder.world("agent.heard", request.slice, host=request.host)
        return reply

    async def _serve(self, request: SyncRequest) -> SyncReply | None:
        """The answer of whatever server is up now; None when there is none or it cannot."""
        if self.server is None:
            return None
        try:
            return await self.server(request)
        except (Unreachable, StoreError):
            return None

    def _deliver_later(self, request: SyncRequest) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.watch(loop.create_task(self._arrive_late(request, self._rng.uniform(*LATE_S), self._healed)))

    async def _arrive_late(self, request: SyncRequest, seconds: float, healed: int) -> None:
        """A stray copy reaches whatever server is up then, unless all faults have ended; nobody waits for it."""
        await asyncio.sleep(seconds)
        if healed == self._healed:
            await self._serve(request)

    async def _travel(self) -> None:
        if self._delay_s[1] > 0:
            await asyncio.sleep(self._rng.uniform(*self._delay_s))

    async def reach_bucket(self, link: Link) -> None:
        """One way to or from the bucket."""
        await link.thaw()
        await self._travel()
        if link.bucket_cut or (link.bucket_loss and self._rng.random() < link.bucket_loss):
            await asyncio.sleep(BUCKET_TIMEOUT_S)
            await link.thaw()
            raise ObjectsError("the bucket did not answer")


class LinkedObjects:
    """The bucket as one host reaches it: over its link, and only while the host moves."""

    def __init__(self, objects: Objects, network: Network, link: Link) -> None:
        self._objects = objects
        self._network = network
        self._link = link

    async def put(self, path: str, data: bytes) -> int:
        await self._network.reach_bucket(self._link)
        generation = await self._objects.put(path, data)
        await self._network.reach_bucket(self._link)
        return generation

    async def put_new(self, path: str, data: bytes) -> int:
        await self._network.reach_bucket(self._link)
        generation = await self._objects.put_new(path, data)
        await self._network.reach_bucket(self._link)
        return generation

    async def get(self, path: str) -> Stored | None:
        await self._network.reach_bucket(self._link)
        stored = await self._objects.get(path)
        await self._network.reach_bucket(self._link)
        return stored

    async def list(self, prefix: str) -> tuple[str, ...]:
        await self._network.reach_bucket(self._link)
        paths = await self._objects.list(prefix)
        await self._network.reach_bucket(self._link)
        return paths

    async def delete(self, path: str) -> None:
        await self._network.reach_bucket(self._link)
        await self._objects.delete(path)
        await self._network.reach_bucket(self._link)
