"""A whole server without HTTP: a real controller on SQLite, objects in memory, machines that are ready at once.

`test_agents`, `test_bells`, `test_logs` and `test_bytes` put handlers to it as `server.app` would. Its hosts speak for
themselves: each joins, syncs and reports like an agent. The clocks are this machine's; `skip` moves only stamps.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.controller.loop import Controller
from penstock.domain.custody import Held, Phase, SyncRequest
from penstock.domain.ids import IdMaker
from penstock.domain.nouns import (
    Attempt,
    Command,
    Exit,
    Job,
    JobSpec,
    Pool,
    Principal,
    Queue,
    Resources,
    Role,
    Rule,
    Slice,
    Team,
)
from penstock.objects.memory import MemoryObjects
from penstock.ports.capacity import READY, Listing, Seen
from penstock.ports.store import Store
from penstock.server import agents
from penstock.server.auth import Tokens, host_of, join_token
from penstock.server.routing import AgentHost, Call
from penstock.server.secret_files import SecretFiles
from penstock.server.service import Service, Settings
from penstock.wire.agent import AgentSync, Join, Joined, Orders
from penstock.wiring.stores import open_store

T = TypeVar("T")
LABEL = "plant"
DEADLINE_S = 20.0
USER = Principal(name="ada", team="lab", role=Role.SUBMITTER)


class Clock:
    """This machine's clocks; stamps can be moved on."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> float:
        return time.time() + self.ahead_s  # noqa: TID251 (a test of real time)

    def steady(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def skip(self, seconds: float) -> None:
        self.ahead_s += seconds


class Machines:
    """A provider whose slices are ready when they are asked for."""

    name = "local"

    def __init__(self) -> None:
        self._made: dict[str, Seen] = {}

    async def create(self, wanted: Slice) -> Seen:
        made = Seen(name=wanted.id, zone=wanted.zone, provider_id=f"vm-{wanted.id}", state=READY, label=LABEL)
        self._made[wanted.id] = made
        return made

    async def list(self, zone: str) -> Listing:
        return Listing(zone=zone, slices=tuple(self._made.values()))

    async def get(self, name: str, zone: str) -> Seen | None:
        return self._made.get(name)

    async def delete(self, name: str, zone: str) -> None:
        self._made.pop(name, None)


class Connection:
    """What a handler sees of an HTTP connection: whether it broke."""

    def __init__(self) -> None:
        self._broken = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self._broken.wait()
        return {"type": "http.disconnect"}

    def drop(self) -> None:
        self._broken.set()


class Host:
    """One agent, as far as the server can tell."""

    def __init__(self, plant: Plant, slice: str, host: int) -> None:
        self._plant = plant
        self.slice = slice
        self.host = host
        self.incarnation = f"life-{host}"
        self.credential: AgentHost | None = None
        self.connection = Connection()

    async def join(self) -> Joined:
        wanted = Join(
            slice=self.slice,
            host=self.host,
            provider_id=f"vm-{self.slice}",
            incarnation=self.incarnation,
            token=join_token(self._plant.service.key, self.slice),
        )
        joined = await agents.join(self._plant.service, self._plant.call(None, body=wanted))
        self.credential = host_of(self._plant.service.key, joined.credential)
        return joined

    def request(self, *held: Held, **changes: Any) -> SyncRequest:
        made = SyncRequest(
            slice=self.slice,
            provider_id=f"vm-{self.slice}",
            host=self.host,
            incarnation=self.incarnation,
            held=tuple(held),
        )
        return msgspec.structs.replace(made, **changes)

    async def sync(self, *held: Held, wait_s: float = 0.0, **changes: Any) -> Orders:
        body = AgentSync(request=self.request(*held, **changes), wait_s=wait_s)
        return await agents.sync(self._plant.service, self.call(body=body))

    async def launched(self) -> Attempt:
        """Wait for the order to start something and say that it runs."""
        while (reply := await self.sync(wait_s=5.0)).launch is None:
            assert reply.welcome, reply.why
        attempt = await self._plant.attempt(reply.launch.attempt)
        await self.sync(self.held(attempt))
        return attempt

    def held(self, attempt: Attempt, phase: Phase = Phase.RUNNING, **said: Any) -> Held:
        return Held(attempt=attempt.id, fence=attempt.fence, phase=phase, **said)

    async def exit(self, attempt: Attempt, code: int = 0, **said: Any) -> Orders:
        ended = Exit(host=self.host, code=code, **said)
        return await self.sync(self.held(attempt, Phase.EXITED, exit=ended))

    def call(
        self, attempt: Attempt | str = "", *, query: dict[str, str] | None = None, body: object = None, **params: str
    ) -> Call:
        assert self.credential is not None
        id = attempt if isinstance(attempt, str) else attempt.id
        return self._plant.call(
            None,
            host=self.credential,
            params={"attempt": id, **params},
            query=query,
            body=body,
            connection=self.connection,
        )


class Plant:
    """The server and its surroundings: team `lab`, queue `main`, and pools of one-host and four-host slices."""

    def __init__(self, store: Store, home: Path, clock: Clock, objects: MemoryObjects) -> None:
        self.store = store
        self.clock = clock
        self.objects = objects
        ids = IdMaker(lambda: secrets.randbits(29))
        self.controller = Controller(
            store=store,
            capacities={"local": Machines()},
            objects=objects,
            clock=clock,
            ids=ids,
            label=LABEL,
            holder="plant",
        )
        self.service = Service(
            controller=self.controller,
            store=store,
            objects=objects,
            clock=clock,
            ids=ids,
            tokens=Tokens(),
            key=b"k" * 32,
            secrets=SecretFiles(home / "secrets"),
            settings=Settings(version="0", store="sqlite", root="file:///root", started_at=clock.now()),
        )

    async def furnish(self) -> None:
        commands = self.controller.commands
        await commands.put_team(Team(name="lab"))
        await commands.put_queue(Queue(name="main", team="lab"))
        for name, accelerator in (("small", "v5e-8"), ("big", "v5e-16")):
            pool = Pool(
                name=name,
                team="lab",
                provider="local",
                accelerator=accelerator,
                chips=0,
                hosts=0,
                zones=("here",),
                max=8,
            )
            await commands.put_pool(pool)

    # --- what a test asks for ---
    def call(
        self,
        principal: Principal | None,
        *,
        host: AgentHost | None = None,
        params: dict[str, str] | None = None,
        query: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        body: object = None,
        connection: Connection | None = None,
    ) -> Call:
        request: Any = connection or Connection()
        return Call(principal, host, params or {}, query or {}, headers or {}, request, body)

    def user_call(self, job: str, **changes: Any) -> Call:
        return self.call(USER, params={"id": job, **changes.pop("params", {})}, **changes)

    async def submit(self, on: str = "v5e-8", **changes: Any) -> str:
        spec = JobSpec(
            team="lab",
            queue="main",
            user="ada",
            resources=Resources(accelerators=(on,), chips=0),
            **{"payload": Command(("true",)), "rule": Rule(failure_budget=0), **changes},
        )
        return (await self.controller.commands.submit(spec)).id

    async def hosts(self, on: str = "v5e-8") -> list[Host]:
        """All hosts of a slice nobody has joined yet, joined."""
        slice = await self.until(lambda: self._unjoined(on))
        hosts = [Host(self, slice.id, index) for index in range(slice.hosts)]
        for host in hosts:
            await host.join()
            assert (await host.sync()).welcome
        return hosts

    async def _unjoined(self, on: str) -> Slice | None:
        slices = await self.store.read(lambda reader: reader.live_slices())
        fresh = [slice for slice in slices if slice.accelerator == on and slice.provider_id and not slice.joined]
        return fresh[0] if fresh else None

    async def running(self, **changes: Any) -> tuple[str, Host, Attempt]:
        """A one-host job that runs."""
        job = await self.submit(**changes)
        (host,) = await self.hosts()
        return job, host, await host.launched()

    async def ready(self) -> Host:
        """A host of an idle slice: one whose first job is done."""
        _, host, attempt = await self.running()
        await host.exit(attempt)
        await self.until(lambda: self._idle(host.slice))
        return host

    async def _idle(self, id: str) -> bool:
        slice = self.controller.snapshot.slices.get(id)
        return slice is not None and slice.usable

    async def job(self, id: str) -> Job:
        found = await self.store.read(lambda reader: reader.job(id))
        assert found is not None
        return found

    async def attempt(self, id: str) -> Attempt:
        found = await self.store.read(lambda reader: reader.attempt(id))
        assert found is not None
        return found

    async def until(self, look: Callable[[], Awaitable[T | None]]) -> T:
        """Wait for something to be there, with a deadline."""
        async with asyncio.timeout(DEADLINE_S):
            while not (found := await look()):  # noqa: ASYNC110 (what is waited for cannot tell us)
                await asyncio.sleep(0.005)
        return found


@asynccontextmanager
async def plant(home: Path, objects: MemoryObjects | None = None) -> AsyncIterator[Plant]:
    clock = Clock()
    store = open_store(home / "penstock.db", clock)
    made = Plant(store, home, clock, objects or MemoryObjects())
    await made.furnish()
    running = asyncio.create_task(made.controller.run())
    bells = agents.bells(made.service)

    async def follows() -> bool:
        return bells._cursor >= 0

    try:
        await made.until(follows)  # so that who is woken in a test is woken by what the test does
        yield made
        if running.done():
            running.result()
    finally:
        made.service.stopping.set()
        await made.service.close_parts()
        running.cancel()
        await asyncio.wait((running,))
        await store.close()
