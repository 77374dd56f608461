"""A stand-in for the controller: answers syncs as a test wants, and builds worlds of one slice. For tests of sim/."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from penstock.capacity.fakecloud import ZoneModel
from penstock.domain.custody import Held, Launch, Phase, SyncReply, SyncRequest, fence_path
from penstock.domain.invariants.history import History, Record, Recorder
from penstock.domain.nouns import Slice
from penstock.sim.agents import Agent
from penstock.sim.loop import run
from penstock.sim.network import Unreachable
from penstock.sim.processes import Behaviour, BehaviourOf
from penstock.sim.world import World


class Desk:
    """One server, one world, one slice "s1" whose hosts come up at 1 s."""

    def __init__(self, behaviour: BehaviourOf | Behaviour, *, seed: int, hosts: int, quiet: bool) -> None:
        self.history = History()
        recorder = Recorder(self.history, lambda: 0, lambda: asyncio.get_running_loop().time())
        self.world = World(
            rng=random.Random(seed),
            behaviour=behaviour if not isinstance(behaviour, Behaviour) else lambda *_: behaviour,
            recorder=recorder,
            server=self.sync,
            zone_model=ZoneModel(ready_s=(1.0, 1.0), delete_s=(1.0, 1.0)),
            quiet=quiet,
        )
        self.hosts = hosts
        self.requests: list[tuple[float, SyncRequest]] = []
        self.attempt: str | None = None
        self.fence = 0
        self.stop: tuple[str, ...] = ()
        self.kill: tuple[str, ...] = ()
        self.forget_exits = True
        self.welcome = True
        self.down = False

    async def sync(self, request: SyncRequest) -> SyncReply:
        if self.down:
            raise Unreachable("down")
        self.requests.append((asyncio.get_running_loop().time(), request))
        launch = None
        if self.attempt is not None:
            launch = Launch(
                attempt=self.attempt,
                job="j1",
                replica=0,
                fence=self.fence,
                stage=0,
                rank=request.host,
                world_size=self.hosts,
                timeout_s=3600.0,
            )
        exited = tuple(held.attempt for held in request.held if held.phase is Phase.EXITED)
        return SyncReply(
            welcome=self.welcome,
            launch=launch,
            stop=self.stop,
            kill=self.kill,
            forget=exited if self.forget_exits else (),
        )

    async def make(self) -> None:
        """The slice exists and its hosts have synced once."""
        await self.world.capacity().create(
            Slice(
                id="s1",
                team="t",
                pool="p",
                provider="fake",
                zone="z",
                accelerator="v5e-8",
                chips=8,
                hosts=self.hosts,
                intended_at=0.0,
            )
        )
        await asyncio.sleep(1.5)

    async def launch(self, attempt: str = "a1", fence: int = 1) -> None:
        """Order an attempt on all hosts and wait until its processes run."""
        self.attempt, self.fence = attempt, fence
        await asyncio.sleep(8.0)

    async def write_fence(self, fence: int) -> None:
        await self.world.objects("controller").put(fence_path("j1", 0), str(fence).encode())

    def agent(self, host: int = 0) -> Agent:
        agent = self.world.agent("s1", host)
        assert agent is not None
        return agent

    def held(self, attempt: str = "a1") -> list[tuple[float, Held]]:
        """Every report of an attempt, with its time."""
        return [(at, held) for at, request in self.requests for held in request.held if held.attempt == attempt]

    def records(self, kind: str) -> list[Record]:
        return [record for record in self.history.world if record.kind == kind]

    def times(self, kind: str) -> list[float]:
        return [record.t for record in self.records(kind)]


def story(
    tell: Callable[[Desk], Awaitable[None]],
    behaviour: BehaviourOf | Behaviour | None = None,
    *,
    hosts: int = 1,
    quiet: bool = False,
    seed: int = 1,
) -> Desk:
    """Run one story in virtual time and answer the desk with all it saw."""
    desks: list[Desk] = []

    async def main() -> None:
        desk = Desk(behaviour or Behaviour(duration_s=100.0), seed=seed, hosts=hosts, quiet=quiet)
        desks.append(desk)
        await desk.make()
        await tell(desk)

    run(main())
    return desks[0]


def exit_of(desk: Desk, attempt: str = "a1") -> tuple[float, int | None, int | None, str | None]:
    """When the first exit was reported, and how it was."""
    at, held = next((at, held) for at, held in desk.held(attempt) if held.phase is Phase.EXITED)
    assert held.exit is not None
    return at, held.exit.code, held.exit.signal, held.exit.agent
