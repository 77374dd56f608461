"""Objects that are written before they have a name, for stores that only take whole ones: they wait in memory.

Extraction makes one for each large object of a unit where the store has no drafts of its own, as cloud buckets have
none: an object there is made by one request. A draft's memory is given back when the last reference to it goes. It must
not decide what is stored.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Final

from typing_extensions import Buffer

from penstock.ports.objects import Objects, ObjectsError

_PARTS_MAX: Final = 512  #: of one call; the system takes 1,024


class MemoryDraft:
    """Implements `ports.objects.Draft` in memory that is written like a file, before its size is known."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        try:
            self._file = os.fdopen(os.memfd_create("draft", os.MFD_CLOEXEC), "r+b", buffering=0)
        except OSError as error:
            raise ObjectsError(f"memory for an object: {error.strerror}") from error

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def write(self, at: int, parts: Sequence[Buffer]) -> None:
        try:
            write_parts(self._file.fileno(), at, parts)
        except OSError as error:
            raise ObjectsError(f"memory for an object: {error.strerror}") from error

    async def name(self, path: str) -> int:
        return await self._objects.put_new(path, await asyncio.to_thread(self._whole))

    def _whole(self) -> bytes:
        self._file.seek(0)
        return self._file.readall()


def write_parts(file: int, at: int, parts: Sequence[Buffer]) -> int:
    """Write all parts, one after another, at their place; how many bytes that were."""
    left = [memoryview(part).cast("B") for part in parts]
    begun = at
    while left:
        done = os.pwritev(file, left[:_PARTS_MAX], at)
        at += done
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]
    return at - begun
