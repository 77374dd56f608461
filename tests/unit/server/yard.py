"""A service that can be cleaned: a real controller on SQLite, objects in memory or in a directory, a clock to be moved.

`test_cleaning` and `test_sweeping` tell their stories to a `Yard`, on both kinds of objects.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from typing_extensions import override

from penstock.controller.loop import Controller
from penstock.domain.ids import IdMaker
from penstock.domain.nouns import Command, Job, JobSpec, Principal, Queue, Resources, Role, Team
from penstock.objects.directory import DirectoryObjects
from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import Kept, Stock
from penstock.ports.store import Store
from penstock.server import bytes as moving
from penstock.server import cleaning
from penstock.server.auth import Tokens
from penstock.server.routing import Call
from penstock.server.secret_files import SecretFiles
from penstock.server.service import Service, Settings
from penstock.store.sqlite import SqliteStore
from penstock.wire.api import CleanedView, CleanReply, CleanRequest

DAY_S = 86_400.0
OPERATOR = Principal(name="olga", team="ops", role=Role.OPERATOR)
ADMIN = Principal(name="ada", team="lab", role=Role.ADMIN)


class Clock:
    """Stamps that a test moves; waits that are over at once, and tell whoever wants to act in them."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.meanwhile: Callable[[], Awaitable[None]] | None = None

    def now(self) -> float:
        return time.time() + self.ahead_s  # noqa: TID251 (directories have no other clock)

    def steady(self) -> float:
        return self.now()

    async def sleep(self, _seconds: float) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()


class Yard:
    """A service with teams `lab` and `other`."""

    def __init__(self, home: Path, store: Store, objects: Stock, clock: Clock) -> None:
        self.store, self.objects, self.clock = store, objects, clock
        ids = IdMaker(lambda: secrets.randbits(29))
        controller = Controller(
            store=store, capacities={}, objects=objects, clock=clock, ids=ids, label="yard", holder="yard"
        )
        self.service = Service(
            controller=controller,
            store=store,
            objects=objects,
            clock=clock,
            ids=ids,
            tokens=Tokens(),
            key=b"k" * 32,
            secrets=SecretFiles(home / "secrets"),
            settings=Settings(version="0", store="sqlite", root="file:///root", started_at=0.0),
        )
        self.commands = controller.commands

    async def furnish(self) -> None:
        for team in ("lab", "other"):
            await self.commands.put_team(Team(name=team))
            await self.commands.put_queue(Queue(name=team, team=team))

    def call(self, body: object, principal: Principal = OPERATOR, **params: str) -> Call:
        request: Any = None
        return Call(principal, None, params, {}, {}, request, body)

    # --- what jobs leave ---
    async def submit(self, snapshot: str | None = None, team: str = "lab") -> str:
        payload = Command(("true",), snapshot)
        resources = Resources(accelerators=("v5e-8",), chips=0)
        spec = JobSpec(team=team, queue=team, user="ada", resources=resources, payload=payload)
        return (await self.commands.submit(spec)).id

    async def ended(self, days_ago: float, team: str = "lab", snapshot: str | None = None, **leave: bool) -> str:
        """A job that ended so long ago and left something of each kind."""
        self.clock.ahead_s -= days_ago * DAY_S
        id = await self.submit(snapshot, team)
        if leave.pop("leave", True):
            await self.leave(id)
        await self.commands.cancel(id)
        self.clock.ahead_s += days_ago * DAY_S
        return id

    async def leave(self, id: str) -> None:
        for path, size in (
            ("log/a1/0/out/0000000000000000.zst", 11),
            ("results/1.json", 13),
            ("staging/1/model/weights.npy", 17),
            ("checkpoints/1/step-3/data", 19),
            ("checkpoints/2/step-9/data", 23),
            ("jax-cache/code", 29),
            ("fence/0", 3),
        ):
            await self.objects.put(f"jobs/{id}/{path}", b"x" * size)

    async def left(self, id: str) -> set[str]:
        return {path.removeprefix(f"jobs/{id}/") for path in await self.objects.list(f"jobs/{id}/")}

    async def row(self, id: str) -> Job | None:
        return await self.commands.job(id)

    # --- calling ---
    async def one(self, principal: Principal = OPERATOR, **wanted: Any) -> CleanReply:
        return await cleaning.clean(self.service, self.call(CleanRequest(**wanted), principal))

    async def clean(self, principal: Principal = OPERATOR, **wanted: Any) -> CleanReply:
        """All calls together, as `tpu clean` makes them."""
        reply = await self.one(principal, **wanted)
        whole = reply
        while reply.next is not None:
            reply = await self.one(principal, **{**wanted, "cursor": reply.next})
            removed = {view.kind: view for view in whole.removed}
            for view in reply.removed:
                old = removed.get(view.kind, CleanedView(kind=view.kind, count=0, bytes=0))
                removed[view.kind] = replace(view, count=view.count + old.count, bytes=view.bytes + old.bytes)
            notes = (*whole.notes, *reply.notes)
            whole = replace(whole, jobs=whole.jobs + reply.jobs, removed=tuple(removed.values()), notes=notes)
        return whole

    # --- content by hash ---
    async def put_blob(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        await moving.put_blob(self.service, self.call(data, ADMIN, sha256=name))
        return name

    async def put_snapshot(self, *blobs: str) -> str:
        body = (",".join(blobs) or "empty").encode()
        name = hashlib.sha256(body).hexdigest()
        await moving.put_snapshot(self.service, self.call(body, ADMIN, sha256=name))
        return name

    async def has(self, *blobs: str) -> list[bool]:
        there = set(await self.objects.list("blobs/"))
        return [f"blobs/lab/{blob}" in there for blob in blobs]


Story = Callable[[Yard], Awaitable[None]]
Play = Callable[[Story], None]


def player(kind: str, home: Path) -> Play:
    """Tells stories to a new yard."""

    async def run(story: Story) -> None:
        clock = Clock()
        store = SqliteStore.open(home / "penstock.db", clock)
        made: Stock = MemoryObjects(now=clock.now) if kind == "memory" else DatedDirectory(home / "root", clock)
        yard = Yard(home, store, made, clock)
        await yard.furnish()
        try:
            await story(yard)
        finally:
            await store.close()

    return lambda story: asyncio.run(run(story))


class DatedDirectory(DirectoryObjects):
    """Its files are as old as the test's clock says."""

    def __init__(self, root: Path, clock: Clock) -> None:
        super().__init__(root)
        self._clock = clock
        self._ages: dict[str, float] = {}

    @override
    async def survey(self, prefix: str) -> tuple[Kept, ...]:
        return tuple(replace(kept, written_at=self._ages[kept.path]) for kept in await super().survey(prefix))

    @override
    async def put(self, path: str, data: bytes) -> int:
        self._ages[path] = self._clock.now()
        return await super().put(path, data)

    @override
    async def put_new(self, path: str, data: bytes) -> int:
        generation = await super().put_new(path, data)
        self._ages[path] = self._clock.now()
        return generation


def sizes(reply: CleanReply) -> dict[str, tuple[int, int]]:
    return {view.kind: (view.count, view.bytes) for view in reply.removed}


ALL = {"logs": (1, 11), "results": (1, 13), "artifacts": (1, 17), "checkpoints": (2, 42), "compiled code": (1, 29)}
