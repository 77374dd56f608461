"""What every part of one agent shares: its place, its state directory, its record, and the way to server and bucket.

Made once by `loop`, handed to `course` and `launch`. It holds things together and decides nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from penstock.agent import record
from penstock.agent.layout import directory_of
from penstock.agent.link import Link, Refused, Silent
from penstock.agent.tree import Keeping
from penstock.ports.clock import Clock
from penstock.ports.objects import Objects, ObjectsError

if TYPE_CHECKING:
    from penstock.agent.devices import Gate
    from penstock.agent.warm import Warm

FENCE_ANSWER_S = 5.0
JOURNAL_BYTES_MAX = 256 << 10


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Which host this is."""

    slice: str
    host: int
    provider_id: str


class Host:
    """One agent's surroundings."""

    def __init__(self, place: Place, state: Path, link: Link, clock: Clock, kept: record.Record) -> None:
        self.place = place
        self.state = state
        self.link = link
        self.clock = clock
        self.record = kept
        self.keeping = Keeping(state)
        self.root: str | None = None
        self.metadata = ""  #: address of the platform's metadata server, where there is one
        self.token_file: Path | None = None  #: thrown away once this host has a credential
        self.address = ""  #: where other hosts reach this one, as the platform says
        self.env: Mapping[str, str] = dict(os.environ)
        self._bucket: Objects | None = None
        self._warm: Warm | None = None
        self._gate: Gate | None = None
        self._noting = asyncio.Lock()
        self.journal = record.Journal(state / "journal")

    @property
    def mark(self) -> str:
        """Two installations, or two copies of one, may share a machine and even names; their control groups never."""
        return hashlib.sha256(str(self.state.resolve()).encode()).hexdigest()[:8]

    @property
    def cache(self) -> Path:
        """Blobs and environments, shared by all hosts of this machine."""
        return self.state.parents[2] / "cache" if self.state.parent.parent.name == "slices" else self.state / "cache"

    @property
    def spares(self) -> Path:
        """Used homes of attempts; see `homes`."""
        return self.state / "spare"

    @property
    def warm(self) -> Warm:
        """Snippets need it; a host that runs commands only never loads it."""
        if self._warm is None:
            from penstock.agent.warm import Warm

            self._warm = Warm(self)
        return self._warm

    @property
    def gate(self) -> Gate:
        """One payload at a time on the accelerators of this machine."""
        if self._gate is None:
            from penstock.agent.devices import Gate, find

            self._gate = Gate(find(), self.cache / "devices.lock")
        return self._gate

    async def close(self) -> None:
        if self._warm is not None:
            await self._warm.close()

    def save(self, kept: record.Kept) -> None:
        """Write down how an attempt stands; enough for the next agent, if the machine stays up."""
        self.journal.note(record.Line(kept=kept))

    def drop(self, attempt: str) -> None:
        """Nothing is left of an attempt. An agent that does not know asks the server once more whether to forget."""
        if self.record.held.pop(attempt, None) is not None:
            self.journal.note(record.Line(cleared=attempt))

    def save_for_good(self) -> None:
        """Write the record so that it holds through a power cut, and begin the journal anew."""
        record.save(self.state / "record.json", msgspec.json.encode(self.record), sync=True)
        self.journal.clear()

    async def save_first(self, kept: record.Kept) -> None:
        """Write an attempt down before it begins, for good; beside the event loop, because disks are slow."""
        async with self._noting:
            self.save(kept)
            size = await asyncio.to_thread(self.journal.flush)
            if size > JOURNAL_BYTES_MAX:
                self.save_for_good()

    def since_boot(self) -> float:
        """Seconds by a clock that all processes of this machine share and that stands still for nobody."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    async def fence_object(self, path: str, url: str = "") -> bytes | None:
        """An object as the bucket has it now, None if it has none; raises `ObjectsError` when it cannot be asked.

        `url`: where it can be read without the server, for hosts that have no way to the root.
        """
        directory = directory_of(self.root)
        if directory is None and url:
            return await _read_lent(url)
        if directory is None:
            raise ObjectsError("the server is the only way to the bucket from here")
        if not await asyncio.to_thread(directory.is_dir):  # unmounted, perhaps: then its silence says nothing
            raise ObjectsError(f"{directory}: is not there")
        if self._bucket is None:
            from penstock.objects.directory import DirectoryObjects

            self._bucket = await asyncio.to_thread(DirectoryObjects, directory)
        stored = await self._bucket.get(path)
        return None if stored is None else stored.data


async def _read_lent(url: str) -> bytes | None:
    """What the bucket itself says at a signed address. Only its word that the object is not there means so."""
    parts = urlsplit(url)
    link = Link(f"{parts.scheme}://{parts.netloc}")
    try:
        return await link.call("GET", f"{parts.path}?{parts.query}", timeout_s=FENCE_ANSWER_S)
    except Refused as refused:
        if refused.status == 404 and "NoSuchKey" in refused.problem.detail:
            return None
        raise ObjectsError(f"the bucket refuses: {refused.status}") from refused
    except Silent as silent:
        raise ObjectsError(str(silent)) from silent
    finally:
        link.close()
