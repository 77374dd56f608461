"""Buckets and directories: the verbs the control plane and the extraction ledger need, nothing more.

The first writer of a name wins with `put_new`; its answer may be lost, so a caller that sees `AlreadyThere` reads
the object back before it decides who won.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec
from typing_extensions import Buffer


class Stored(msgspec.Struct, frozen=True):
    """An object as read: its bytes and which write of that name it was."""

    data: bytes
    generation: int


class ObjectsError(Exception):
    """The store of objects could not be reached or refused; the outcome of a write is unknown."""


class Damaged(ObjectsError):
    """The object is there and its bytes are not those that were written: asking again gives the same."""


class Forbidden(ObjectsError):
    """The store is not for us, or not for what we want of it: waiting will not help."""


class AlreadyThere(Exception):
    """`put_new` found the name taken, perhaps by an earlier try of the same caller."""


class Objects(Protocol):
    async def put(self, path: str, data: bytes) -> int:
        """Write or replace; the answer is the new generation."""

    async def put_new(self, path: str, data: bytes) -> int:
        """Create if absent; raises `AlreadyThere`."""

    async def get(self, path: str) -> Stored | None: ...

    async def list(self, prefix: str) -> tuple[str, ...]: ...

    async def delete(self, path: str) -> None:
        """Deleting what is absent is no error."""


class Kept(msgspec.Struct, frozen=True, gc=False):
    """An object as a survey sees it. `written_at` is in seconds since the epoch, by the clock of whoever keeps it."""

    path: str
    size: int
    written_at: float


class Stock(Objects, Protocol):
    """Objects that can also be looked over and thrown away: what cleaning needs, and nobody else."""

    async def survey(self, prefix: str) -> tuple[Kept, ...]:
        """As `list`, with size and age."""

    async def remove(self, folder: str) -> None:
        """Delete all that lies under a folder (a path without its last slash); what is absent is no error.

        It may be cut off half-way; called again, it goes on.
        """

    async def lend(self, path: str, seconds: float) -> str | None:
        """An address at which anybody can read this one object for so long; None: this kind of store has none."""


class Ranged(Stock, Protocol):
    """Objects of which a part can be read: what readers of large ones need."""

    async def get_range(self, path: str, start: int, stop: int) -> bytes | None:
        """Bytes `start` up to, not including, `stop`, or up to the object's end; no checksum covers them."""


class Draft(Protocol):
    """An object that is being written: in any order, by any thread, and not to be seen before it gets its name.

    It goes with the last reference to it; what has a name stays.
    """

    def write(self, at: int, parts: Sequence[Buffer]) -> None:
        """Put the parts, one after another, at a place. Blocks: for threads."""

    async def name(self, path: str) -> int:
        """Create if absent, as `put_new`; the draft stays, and can be named again when the answer was lost."""


@runtime_checkable
class Drafting(Protocol):
    """Objects that can be written before they have a name; others get large ones from memory, all at once."""

    def draft(self) -> Draft:
        """An empty one."""
