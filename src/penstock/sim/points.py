"""Every place where the controller meets the outside, wrapped: crashes, freezes and store faults strike here.

One `Incarnation` stands for one life of a controller process. Its ports are wrapped so that before and after
each call and each commit the process can die (P1) or stand still (P3), the store can be away (D1), lose its
answer (D2) or wake nobody (D3). A dead incarnation can do nothing any more: each further call dies again. The
wrappers decide nothing about when; that is `sim.faults`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import penstock.controller.loop  # noqa: F401 (what it imports fills the registry of verbs)
from penstock.controller.projection import Changes, read_changes
from penstock.controller.verbs import VERBS
from penstock.domain.nouns import Slice
from penstock.ports.capacity import Capacity, Listing, Seen
from penstock.ports.objects import Objects, Stored
from penstock.ports.store import Reader, Store, Transaction, Unavailable, UnknownOutcome

P = ParamSpec("P")
T = TypeVar("T")


class Crash(BaseException):
    """The process is gone: no handler of the code under test may catch it."""


#: Port calls the controller makes beside its commits.
CALLS = (
    "store.read",
    "store.wait",
    "capacity.create",
    "capacity.list",
    "capacity.get",
    "capacity.delete",
    "objects.put",
)


def all_points() -> tuple[str, ...]:
    """Every point by name: port calls, and commits by their verb."""
    return (*CALLS, *(f"commit.{name}" for name in sorted(COMMITS)))


#: Verbs that are committed by themselves; the others are parts of `carry_out`.
COMMITS = frozenset(
    {
        "carry_out", "hear", "submit", "cancel", "edit", "purge", "elect", "renew", "observe", "refuse", "disown",
        "sweep", "raise_fence", "fenced", "put_team", "put_queue", "put_pool", "delete_pool", "limit_provider",
        "set_maintenance",
    }
)  # fmt: skip
assert set(VERBS) >= COMMITS, COMMITS - set(VERBS)


class Fates(Protocol):
    """Decides what befalls one call of one incarnation."""

    def crash(self, point: str, side: str) -> bool: ...
    def store_down(self) -> bool: ...
    def commit_lost(self, point: str) -> bool:
        """The commit happens and its answer does not come."""

    def commit_aborted(self, point: str) -> bool:
        """The commit does not happen (serialisation, lock timeout)."""

    def stale_read(self) -> bool: ...
    def wake_lost(self) -> bool: ...


class Incarnation:
    """One life of one controller process. `on_crash` is told once, when it dies."""

    def __init__(self, name: str, fates: Fates, counts: Counter[tuple[str, str]], on_crash: Callable[[], None]) -> None:
        self.name = name
        self.fates = fates
        self.counts = counts
        self.dead = False
        self.frozen_until = 0.0
        self._on_crash = on_crash

    async def pass_point(self, point: str, side: str) -> None:
        """Stand still while frozen; die when it is time."""
        loop = asyncio.get_running_loop()
        while self.frozen_until > loop.time():  # noqa: ASYNC110 (a freeze can be prolonged, or healed, while it lasts)
            await asyncio.sleep(min(1.0, self.frozen_until - loop.time()))
        self.die_here(point, side)

    def die_here(self, point: str, side: str) -> None:
        if not self.dead and self.fates.crash(point, side):
            self.counts[point, side] += 1
            self.kill()
        if self.dead:
            raise Crash(f"{self.name} at {point}")

    def kill(self) -> None:
        """kill -9 from outside, wherever it stands."""
        if not self.dead:
            self.dead = True
            self._on_crash()


class PointStore:
    """The store as one incarnation sees it."""

    def __init__(self, inner: Store, incarnation: Incarnation) -> None:
        self._inner = inner
        self._at = incarnation

    async def transact(self, verb: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        point = f"commit.{verb.__name__}"
        fates = self._at.fates
        await self._at.pass_point(point, "before")
        if fates.store_down():
            raise Unavailable("the store is away")
        if fates.commit_aborted(point):
            raise Unavailable("the commit was aborted")
        result = await self._inner.transact(verb, *args, **kwargs)
        await self._at.pass_point(point, "after")
        if fates.commit_lost(point):
            raise UnknownOutcome("the answer to a commit was lost")
        return result

    async def read(self, query: Callable[Concatenate[Reader, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        await self._at.pass_point("store.read", "before")
        if self._at.fates.store_down():
            raise Unavailable("the store is away")
        if query is read_changes and self._at.fates.stale_read():
            cursor = args[0]
            assert isinstance(cursor, int)
            return Changes(upto=cursor, whole=False)  # type: ignore[return-value]  # a replica that has nothing new yet
        result = await self._inner.read(query, *args, **kwargs)
        await self._at.pass_point("store.read", "after")
        return result

    def bound(self, *, actor: str, epoch: int = 0) -> PointStore:
        return PointStore(self._inner.bound(actor=actor, epoch=epoch), self._at)

    async def wait(self, after: int, timeout_s: float) -> None:
        await self._at.pass_point("store.wait", "before")
        if self._at.fates.wake_lost():
            await asyncio.sleep(timeout_s)
        else:
            await self._inner.wait(after, timeout_s)
        await self._at.pass_point("store.wait", "after")

    async def close(self) -> None:
        """The world owns the store: a process that ends leaves it."""


class PointCapacity:
    """A provider as one incarnation sees it; the fake behind it has faults of its own."""

    def __init__(self, inner: Capacity, incarnation: Incarnation) -> None:
        self._inner = inner
        self._at = incarnation

    @property
    def name(self) -> str:
        return self._inner.name

    async def create(self, wanted: Slice) -> Seen:
        await self._at.pass_point("capacity.create", "before")
        seen = await self._inner.create(wanted)
        await self._at.pass_point("capacity.create", "after")
        return seen

    async def list(self, zone: str) -> Listing:
        await self._at.pass_point("capacity.list", "before")
        listing = await self._inner.list(zone)
        await self._at.pass_point("capacity.list", "after")
        return listing

    async def get(self, name: str, zone: str) -> Seen | None:
        await self._at.pass_point("capacity.get", "before")
        seen = await self._inner.get(name, zone)
        await self._at.pass_point("capacity.get", "after")
        return seen

    async def delete(self, name: str, zone: str) -> None:
        await self._at.pass_point("capacity.delete", "before")
        await self._inner.delete(name, zone)
        await self._at.pass_point("capacity.delete", "after")


class PointObjects:
    """The bucket as one incarnation sees it. The controller only ever writes fences."""

    def __init__(self, inner: Objects, incarnation: Incarnation) -> None:
        self._inner = inner
        self._at = incarnation

    async def put(self, path: str, data: bytes) -> int:
        await self._at.pass_point("objects.put", "before")
        generation = await self._inner.put(path, data)
        await self._at.pass_point("objects.put", "after")
        return generation

    async def put_new(self, path: str, data: bytes) -> int:
        return await self._inner.put_new(path, data)

    async def get(self, path: str) -> Stored | None:
        return await self._inner.get(path)

    async def list(self, prefix: str) -> tuple[str, ...]:
        return await self._inner.list(prefix)

    async def delete(self, path: str) -> None:
        await self._inner.delete(path)
