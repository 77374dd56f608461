"""The agent of one host, as a model: it syncs, obeys, keeps custody while the server is silent, and can be broken.

`sim.world` makes one for every host that comes up and takes its power away when the host goes down. It must
do what the real agent does and know no more than it: what it holds, its own steady clock, the server's
replies and the fence objects. It keeps its incarnation and its record of ended processes through crashes and
reboots.
"""

from __future__ import annotations

import asyncio

from penstock.domain import limits
from penstock.domain.custody import Held, Keep, Launch, Phase, SyncReply, SyncRequest, custody, fence_path
from penstock.ports.objects import Objects, ObjectsError
from penstock.sim.loop import VirtualLoop
from penstock.sim.network import Link, Network, Unreachable
from penstock.sim.processes import Around, Place, Process

CHAINS_KEPT = 64  #: fences remembered: enough for any order that could still be under way


class Agent:
    """One host's agent. In `quiet` mode it syncs only when it has news, is poked, or was not heard."""

    def __init__(
        self, around: Around, network: Network, objects: Objects, place: Place, *, quiet: bool = False
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.place = place
        self.ended = False  #: unwelcome: it will not come back
        self.powered = False
        self._around = around
        self._network = network
        self._objects = objects
        self._quiet = quiet
        self._loop = loop
        self._held: dict[str, Process] = {}
        self._fences: dict[tuple[str, int], int] = {}  #: highest fence ever launched here, per job and replica
        self._notice = False
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Future[None] | None = None
        self._news = False
        self._server_at = self._bucket_at = loop.time()
        self.power_on()

    @property
    def link(self) -> Link:
        return self._network.link(self.place.slice, self.place.host)

    @property
    def held(self) -> tuple[Process, ...]:
        return tuple(self._held.values())

    @property
    def up(self) -> bool:
        """The agent runs and moves: given a way, the server hears it."""
        return self._task is not None and not self.ended and self.link.frozen_until <= self._loop.time()

    # --- what happens to the host ---

    def power_on(self) -> None:
        """The host boots (again): the agent comes up and finds its record, its processes are lost."""
        self.powered = True
        self._server_at = self._bucket_at = self._loop.time()
        self._start()

    def power_off(self) -> None:
        """The host goes down and everything on it ends."""
        self.powered = False
        self._halt()
        for process in self.held:
            process.lose()

    def crash(self, seconds: float) -> None:
        """The agent dies and is started again after a while; processes go on unattended."""
        if self.powered and not self.ended:
            self._halt()
            self._loop.call_later(seconds, self._start)

    def reboot(self, seconds: float) -> None:
        """The same host goes down and comes back."""
        if self.powered and not self.ended:
            self.power_off()
            self._loop.call_later(seconds, self._boot)

    def _boot(self) -> None:
        if not self.powered:
            self.power_on()

    def pause(self, seconds: float) -> None:
        """SIGSTOP for agent and processes, then SIGCONT: a zombie if the server gave up meanwhile."""
        until = self._loop.time() + seconds
        if self.powered and until > self.link.frozen_until:
            for process in self.held:
                process.stall(until - max(self.link.frozen_until, self._loop.time()))
            self.link.frozen_until = until
            self._network.went_silent(self.place.slice, self.place.host)

    def give_notice(self) -> None:
        """The platform says that the host will be taken away; processes are asked to save and end."""
        self._notice = True
        if self.up:
            for process in self.held:
                process.stop(notice=True)
            self.poke()

    def poke(self) -> None:
        """Sync now: there is news here, or the server has orders."""
        self._news = True
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # --- the agent's own loop ---

    def _start(self) -> None:
        if self.powered and not self.ended and self._task is None:
            self._task = self._loop.create_task(self._live(), name=f"agent {self.place.slice}/{self.place.host}")
            self._loop.watch(self._task)

    def _halt(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._network.went_silent(self.place.slice, self.place.host)

    async def _live(self) -> None:
        while not self.ended:
            await self.link.thaw()
            began = self._loop.time()
            self._news = False
            try:
                reply = await self._network.sync(self._request())
            except Unreachable:
                await self._keep_custody()
                silent = True
            else:
                silent = False
                self._server_at = self._bucket_at = self._loop.time()
                self._obey(reply)
            if not self.ended and (silent or not self._news):
                pause_s = max(0.0, began + limits.SYNC_S - self._loop.time())
                await self._rest(None if self._quiet and not silent else pause_s)
        self._task = None

    async def _rest(self, seconds: float | None) -> None:
        """Until poked, or so long. The only place where an agent waits for nothing in particular."""
        self._wake = self._loop.create_future()
        timer = None if seconds is None else self._loop.call_later(seconds, self.poke)
        try:
            await self._wake
        finally:
            self._wake = None
            if timer is not None:
                timer.cancel()

    def _request(self) -> SyncRequest:
        place = self.place
        return SyncRequest(
            slice=place.slice,
            provider_id=place.provider_id,
            host=place.host,
            incarnation=place.incarnation,
            held=tuple([self._report(process) for process in self._held.values()]),
            notice=self._notice,
        )

    def _report(self, process: Process) -> Held:
        return Held(
            attempt=process.launch.attempt,
            fence=process.launch.fence,
            phase=process.phase,
            exit=process.exit,
            outputs=process.gang.outputs if process.phase is Phase.EXITED else (),
            open_units=process.open_units,
            holding=process.holding,
        )

    def _obey(self, reply: SyncReply) -> None:
        if not reply.welcome:
            self.ended = True
            for process in self.held:
                process.kill()
            self._network.went_silent(self.place.slice, self.place.host)
            return
        for attempt in reply.forget:
            if attempt in self._held and self._held[attempt].phase is Phase.EXITED:
                del self._held[attempt]
                self._around.gangs.pop(attempt, None)
        for attempt in reply.stop:
            if attempt in self._held:
                self._held[attempt].stop()
        for attempt in reply.kill:
            if attempt in self._held:
                self._held[attempt].kill()
        if reply.launch is not None:
            self._launch(reply.launch)

    def _launch(self, order: Launch) -> None:
        chain = (order.job, order.replica)
        if order.attempt in self._held or order.fence <= self._fences.get(chain, 0):
            return
        self._fences.pop(chain, None)
        self._fences[chain] = order.fence
        if len(self._fences) > CHAINS_KEPT:
            del self._fences[next(iter(self._fences))]
        busy = any(process.alive for process in self._held.values())
        process = Process(self._around, self.place, order, self.link, self._objects, self.poke)
        self._held[order.attempt] = process
        if busy:
            process.kill(agent="device_busy")
        if not self._quiet:  # a quiet agent tells of the launch together with the start
            self.poke()

    async def _keep_custody(self) -> None:
        """The server is silent: go on only while the bucket says that the fence is still this attempt's."""
        for process in self.held:
            if process.phase is Phase.EXITED:
                continue
            launch = process.launch
            seen = None
            try:
                stored = await self._objects.get(fence_path(launch.job, launch.replica))
            except ObjectsError:
                pass
            else:
                self._bucket_at = self._loop.time()
                seen = int(stored.data) if stored is not None else None
            now = self._loop.time()
            keep = custody(launch.fence, seen, now - self._server_at, now - self._bucket_at)
            if keep is Keep.STOP:
                process.kill(agent="process_lost")
