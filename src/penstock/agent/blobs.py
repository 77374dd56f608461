"""Blobs and manifests kept on a host, so that the next attempt fetches only what changed.

`agent.environment` fills it before it unpacks. Several agents of one machine may share a folder: files appear whole or
not at all, under the name of their hash, and are checked again each time they are unpacked. What was not used for
longest goes first when it is over its size. It must not trust a byte it finds, and keeps nothing of a job's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final

from penstock.domain import limits
from penstock.objects.content import name_of

AT_ONCE: Final = 8  #: fetches under way
#: An attempt that is being prepared needs its blobs for less than this: they are not swept from under it.
IN_USE_NS: Final = 3600 * 1_000_000_000

Fetch = Callable[[str], Awaitable[bytes]]


class Fetched(Exception):
    """What was fetched, twice, is not what was asked for: the fault of a host or a bucket, not of a job."""


class BlobFolder:
    """A folder of content by hash."""

    def __init__(self, folder: Path, size_max: int = limits.HOST_CACHE_BYTES_MAX) -> None:
        self._folder = folder
        self._size_max = size_max

    async def fill(self, ids: Iterable[str], fetch: Fetch) -> int:
        """Fetch what is not here yet; how many bytes that were."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one(id: str) -> int:
            async with places:
                return len(await self._fetched(id, fetch))

        missing = await asyncio.to_thread(self._missing, ids)
        tasks = [asyncio.create_task(one(id)) for id in missing]
        try:
            return sum(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def get(self, id: str, fetch: Fetch) -> bytes:
        """The bytes of that hash, from here or from afar."""
        try:
            found = await asyncio.to_thread(self.read, id)
        except FileNotFoundError:
            return await self._fetched(id, fetch)
        return found if name_of(found) == id else await self._fetched(id, fetch)

    def read(self, id: str) -> bytes:
        return self._path(id).read_bytes()

    def forget(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._path(id).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove what was not used for longest until the rest fits; how many bytes went."""
        found = sorted((entry.stat().st_mtime_ns, entry.stat().st_size, path) for entry, path in self._entries())
        total = sum(size for _, size, _ in found)
        if total <= self._size_max:
            return 0
        now = self._now_ns()
        gone = 0
        for used_ns, size, path in found:
            if total - gone <= self._size_max or used_ns > now - IN_USE_NS:
                break
            path.unlink(missing_ok=True)
            gone += size
        return gone

    def _missing(self, ids: Iterable[str]) -> list[str]:
        missing: list[str] = []
        for id in ids:
            try:
                os.utime(self._path(id))
            except FileNotFoundError:
                missing.append(id)
        return missing

    async def _fetched(self, id: str, fetch: Fetch) -> bytes:
        for _ in range(2):
            data = await fetch(id)
            if await asyncio.to_thread(name_of, data) == id:
                await asyncio.to_thread(self._write, id, data)
                return data
        raise Fetched(f"{id[:12]}: fetched twice, and both times its SHA-256 was another")

    def _write(self, id: str, data: bytes) -> None:
        path = self._path(id)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                os.fchmod(handle, 0o400)
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
            raise

    def _path(self, id: str) -> Path:
        return self._folder / id[:2] / id

    def _entries(self) -> Iterable[tuple[os.DirEntry[str], Path]]:
        for folder in self._folder.glob("??"):
            with os.scandir(folder) as entries:
                yield from ((entry, Path(entry.path)) for entry in entries)

    def _now_ns(self) -> int:
        """By the clock that stamps files."""
        with tempfile.TemporaryFile(dir=self._folder) as file:
            return os.fstat(file.fileno()).st_mtime_ns
