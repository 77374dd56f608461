"""The process of one attempt on one host, as a model: it starts, runs, writes, ends, or is ended.

`sim.agents` makes one per launch order. A workload function says how each process behaves; the processes of a
gang share a `Gang`, because none makes progress before all of them run. The model records what truly
happened; it never asks whether it should still be running: that is the agent's and the server's concern.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import msgspec

from penstock.domain import limits
from penstock.domain.custody import Launch, Phase, staging_path
from penstock.domain.invariants.history import Recorder
from penstock.domain.nouns import Exit
from penstock.ports.objects import Objects, ObjectsError
from penstock.sim.loop import VirtualLoop
from penstock.sim.network import Link

UPLOAD_RETRY_S = 2.0
ECHO = "coordination service: a peer task has gone away; terminating"  #: what siblings of a dead process log


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """How the process of one host behaves, as the workload wants it."""

    duration_s: float = 60.0  #: from the moment the last process of the gang runs
    code: int | None = 0
    signal: int | None = None
    oom_killed: bool = False
    agent: str | None = None
    log_tail: str = ""
    outputs: tuple[str, ...] = ()  #: written to staging by this host before it ends well
    open_units: int | None = None  #: reported from the start
    start_s: float | None = None  #: from order to running; drawn from 0.1–2 s if not given
    stop_s: float = 1.0  #: from SIGTERM to its end
    stop_code: int | None = None  #: it saves and exits with this when told to stop, instead of dying of the signal
    ignores_term: bool = False  #: only SIGKILL after the grace ends it
    echo_s: float | None = 10.0  #: it ends this long after a sibling ended badly; None: it hangs
    work: Callable[[Process], Awaitable[int]] | None = None  #: a worker of its own instead of a duration


#: The workload: (job, attempt, rank in the gang, stage) -> behaviour.
BehaviourOf = Callable[[str, str, int, int], Behaviour]


class Gang:
    """What the processes of one attempt share."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.members: list[Process] = []
        self.running_since: float | None = None  #: when the last one came up
        self.stalled_s = 0.0  #: time in which one of them stood still, so that none got on
        self.outputs: tuple[str, ...] = ()  #: complete in staging
        self.broken = False  #: one of them ended badly: the rest never gets on
        self.missing = 0  #: processes whose outputs are still to be written

    def join(self, process: Process) -> None:
        self.members.append(process)
        if process.behaviour.outputs:
            self.missing += 1
        if self.broken:
            process.echo()
        elif len(self.members) == self.world_size:
            self.running_since = asyncio.get_running_loop().time()
            for member in self.members:
                member.go()

    def wrote(self, outputs: tuple[str, ...]) -> None:
        """A gang ends well together: whoever waited for the outputs may end now."""
        self.outputs = (*self.outputs, *outputs)
        self.missing -= 1
        for member in self.members:
            member.finish()

    def lost(self, dead: Process) -> None:
        self.broken = True
        for member in self.members:
            if member is not dead:
                member.echo()


class Around(msgspec.Struct, kw_only=True):
    """What every agent and process stands in."""

    rng: random.Random
    behaviour: BehaviourOf
    recorder: Recorder | None = None
    gangs: dict[str, Gang] = {}

    def record(self, kind: str, subject: str, **body: object) -> None:
        if self.recorder is not None:
            self.recorder.world(kind, subject, **body)


class Place(msgspec.Struct, frozen=True):
    """Where a process runs."""

    slice: str
    provider_id: str
    host: int
    incarnation: str


class Process:
    """One attempt's process on one host. `on_change` is called whenever there is something new to report."""

    def __init__(
        self,
        around: Around,
        place: Place,
        launch: Launch,
        link: Link,
        objects: Objects,
        on_change: Callable[[], None],
    ) -> None:
        self.around, self.place, self.launch, self.link, self.objects = around, place, launch, link, objects
        self.behaviour = around.behaviour(launch.job, launch.attempt, launch.rank, launch.stage)
        self.phase = Phase.LAUNCHED
        self.exit: Exit | None = None
        self.open_units = self.behaviour.open_units
        self.holding: bool | None = None
        self.gang = around.gangs.setdefault(launch.attempt, Gang(launch.world_size))
        self._on_change = on_change
        self._timers: list[asyncio.TimerHandle] = []
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._echoing = False
        self._uploading = False
        start_s = self.behaviour.start_s
        self._later(around.rng.uniform(0.1, 2.0) if start_s is None else start_s, self._begin)

    @property
    def alive(self) -> bool:
        """It occupies the chips."""
        return self.phase is Phase.RUNNING

    def report_open(self, units: int, holding: bool) -> None:
        """The payload says how much work is left, and whether it has some of it in hand."""
        if (units, holding) != (self.open_units, self.holding):
            self.open_units, self.holding = units, holding
            self._on_change()

    # --- its own course ---

    def _begin(self) -> None:
        if self.phase is not Phase.LAUNCHED or self._frozen(self._begin):
            return
        launch, place = self.launch, self.place
        self.phase = Phase.RUNNING
        self.around.record(
            "proc.started",
            launch.attempt,
            job=launch.job,
            replica=launch.replica,
            fence=launch.fence,
            host=launch.rank,
            slice=place.slice,
            provider_id=place.provider_id,
            world_size=launch.world_size,
            incarnation=place.incarnation,
        )
        self._later(launch.timeout_s, self._time_out)
        self.gang.join(self)
        self._on_change()

    def go(self) -> None:
        """The whole gang runs: progress begins."""
        if self.behaviour.work is not None:
            self._spawn(self._work(self.behaviour.work))
        else:
            self._later(self.behaviour.duration_s, self.finish)

    async def _work(self, work: Callable[[Process], Awaitable[int]]) -> None:
        code = await work(self)
        await self.link.thaw()
        self._end(code=code)

    def finish(self) -> None:
        """Its time is up, unless the gang stood still meanwhile or its outputs are not yet all written."""
        since = self.gang.running_since
        if self.phase is not Phase.RUNNING or self._stopping or since is None or self.behaviour.work is not None:
            return
        left_s = since + self.behaviour.duration_s + self.gang.stalled_s - asyncio.get_running_loop().time()
        if left_s > 1e-6:
            self._later(left_s, self.finish)
        elif not self._frozen(self.finish):
            behaviour = self.behaviour
            if behaviour.code != 0 or behaviour.signal is not None or behaviour.oom_killed or behaviour.agent:
                self._end()
            elif self.behaviour.outputs and not self._uploading:
                self._uploading = True
                self._spawn(self._upload())
            elif not self.gang.missing:
                self._end()

    async def _upload(self) -> None:
        launch = self.launch
        for output in self.behaviour.outputs:
            path = staging_path(launch.job, launch.fence, output)
            data = f"{launch.job} {output} of {launch.attempt}".encode()
            while True:
                try:
                    await self.objects.put(path, data)
                    break
                except ObjectsError:
                    await asyncio.sleep(UPLOAD_RETRY_S)
        await self.link.thaw()
        if self.phase is Phase.RUNNING:
            self.gang.wrote(self.behaviour.outputs)

    # --- what is done to it ---

    def stop(self, *, notice: bool = False, agent: str | None = None) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        if self.phase is Phase.EXITED or self._stopping:
            return
        self._stopping = True
        if self.phase is Phase.LAUNCHED:
            self._end(signal=15, notice=notice, agent=agent)
        elif self.behaviour.ignores_term or self.behaviour.stop_s > limits.GRACE_S:
            self._later(limits.GRACE_S, lambda: self._stopped(9, notice, agent))
        else:
            self._later(self.behaviour.stop_s, lambda: self._stopped(15, notice, agent))

    def _stopped(self, signal: int, notice: bool, agent: str | None) -> None:
        if self.phase is Phase.RUNNING and not self._frozen(lambda: self._stopped(signal, notice, agent)):
            if self.behaviour.stop_code is not None and signal == 15 and agent is None:
                self._end(code=self.behaviour.stop_code, notice=notice)
            else:
                self._end(signal=signal, notice=notice, agent=agent)

    def kill(self, *, notice: bool = False, agent: str | None = None) -> None:
        """SIGKILL: it ends here and now."""
        if self.phase is not Phase.EXITED:
            self._end(signal=9, notice=notice, agent=agent)

    def lose(self) -> None:
        """Its host went down under it: nobody saw it end."""
        if self.phase is not Phase.EXITED:
            self._end(agent="process_lost", how="vm_gone")

    def echo(self) -> None:
        """A sibling died: most programs notice and end in turn."""
        if self.phase is Phase.RUNNING and not self._echoing and self.behaviour.echo_s is not None:
            self._echoing = True
            self._later(self.behaviour.echo_s, self._echoed)

    def _echoed(self) -> None:
        if self.phase is Phase.RUNNING and not self._frozen(self._echoed):
            self._end(code=1, log_tail=ECHO)

    def _time_out(self) -> None:
        if self.phase is Phase.RUNNING and not self._frozen(self._time_out):
            self.stop(agent="timeout")

    def stall(self, seconds: float) -> None:
        """Its host stands still so long, and with it the whole gang."""
        if self.phase is Phase.RUNNING:
            self.gang.stalled_s += seconds

    def _end(self, *, how: str = "", **given: object) -> None:
        """It is over; without `given` facts it ends as the workload wants."""
        behaviour = self.behaviour
        facts = given or {
            "code": None if behaviour.signal is not None else behaviour.code,
            "signal": behaviour.signal,
            "oom_killed": behaviour.oom_killed,
            "agent": behaviour.agent,
            "log_tail": behaviour.log_tail,
        }
        self.exit = msgspec.convert({"host": self.launch.rank, **facts}, Exit)
        started = self.phase is Phase.RUNNING
        self.phase = Phase.EXITED
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if started:
            end = self.exit
            how = how or (f"signal {end.signal}" if end.signal is not None else f"code {end.code}")
            launch = self.launch
            self.around.record(
                "proc.exited",
                launch.attempt,
                job=launch.job,
                host=launch.rank,
                how=how,
                slice=self.place.slice,
            )
        if not self.exit.well:
            self.gang.lost(self)
        self._on_change()

    def _frozen(self, then: Callable[[], None]) -> bool:
        """Whether the host stands still; then `then` happens once it moves again."""
        left_s = self.link.frozen_until - asyncio.get_running_loop().time()
        if left_s > 0:
            self._later(left_s, then)
        return left_s > 0

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, then))

    def _spawn(self, coroutine: Awaitable[None]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        task: asyncio.Task[None] = loop.create_task(coroutine)  # type: ignore[arg-type]
        loop.watch(task)
        self._task = task
