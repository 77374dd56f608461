"""A bucket in memory: generations, create-if-absent, and hooks for faults and for the world's history.

The simulator and tests use it where production has a bucket. `bucket.by(writer)` gives each writer its own
view of the same objects, so that the history can say who wrote and faults can strike one writer only. A
fault before the effect leaves nothing behind; one after the effect is a lost reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.ports.objects import AlreadyThere, Kept, Stored

#: Told of every true change: path, new bytes (None: deleted), generation, writer.
OnChange = Callable[[str, bytes | None, int, str], None]


class ObjectFaults(Protocol):
    """Decides the fate of one call (put, put_new, get, list, delete); may sleep or raise `ObjectsError`."""

    async def before(self, verb: str, path: str) -> None: ...

    async def after(self, verb: str, path: str) -> None: ...


class _Bucket:
    """What all views share."""

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.written_at: dict[str, float] = {}
        self.generation = 0


class MemoryObjects:
    """One writer's view of an in-memory bucket; implements `ports.objects.Ranged`."""

    def __init__(
        self,
        *,
        writer: str = "",
        faults: ObjectFaults | None = None,
        on_change: OnChange | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        """`now` dates what is written; without it nothing ever looks old."""
        self.writer = writer
        self.faults = faults
        self._on_change = on_change
        self._now = now
        self._bucket = _Bucket()

    def by(self, writer: str, faults: ObjectFaults | None = None) -> MemoryObjects:
        """The same bucket as another writer sees it, with faults of its own."""
        view = MemoryObjects(writer=writer, faults=faults, on_change=self._on_change, now=self._now)
        view._bucket = self._bucket
        return view

    async def put(self, path: str, data: bytes) -> int:
        await self._before("put", path)
        generation = self._write(path, data)
        await self._after("put", path)
        return generation

    async def put_new(self, path: str, data: bytes) -> int:
        await self._before("put_new", path)
        if path in self._bucket.objects:
            raise AlreadyThere(path)
        generation = self._write(path, data)
        await self._after("put_new", path)
        return generation

    async def get(self, path: str) -> Stored | None:
        await self._before("get", path)
        stored = self._bucket.objects.get(path)
        await self._after("get", path)
        return stored

    async def list(self, prefix: str) -> tuple[str, ...]:
        await self._before("list", prefix)
        found = tuple(sorted(path for path in self._bucket.objects if path.startswith(prefix)))
        await self._after("list", prefix)
        return found

    async def delete(self, path: str) -> None:
        await self._before("delete", path)
        if self._bucket.objects.pop(path, None) is not None and self._on_change is not None:
            self._on_change(path, None, 0, self.writer)
        await self._after("delete", path)

    async def survey(self, prefix: str) -> tuple[Kept, ...]:
        bucket = self._bucket
        return tuple(
            Kept(path, len(bucket.objects[path].data), bucket.written_at[path]) for path in await self.list(prefix)
        )

    async def remove(self, folder: str) -> None:
        for path in await self.list(folder + "/"):
            await self.delete(path)

    async def lend(self, path: str, seconds: float) -> str | None:  # noqa: ARG002 (there is none to give)
        return None

    async def get_range(self, path: str, start: int, stop: int) -> bytes | None:
        stored = await self.get(path)
        return None if stored is None else stored.data[start:stop]

    def peek(self, path: str) -> Stored | None:
        """The object as it truly is, past all faults: for checkers."""
        return self._bucket.objects.get(path)

    def paths(self) -> tuple[str, ...]:
        """Every name there truly is: for checkers."""
        return tuple(sorted(self._bucket.objects))

    def _write(self, path: str, data: bytes) -> int:
        self._bucket.generation += 1
        generation = self._bucket.generation
        self._bucket.objects[path] = Stored(data, generation)
        self._bucket.written_at[path] = float("inf") if self._now is None else self._now()
        if self._on_change is not None:
            self._on_change(path, data, generation, self.writer)
        return generation

    async def _before(self, verb: str, path: str) -> None:
        if self.faults is not None:
            await self.faults.before(verb, path)

    async def _after(self, verb: str, path: str) -> None:
        if self.faults is not None:
            await self.faults.after(verb, path)
