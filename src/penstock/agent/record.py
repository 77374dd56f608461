"""What an agent must know after it was killed: its incarnation, what it holds, how far each fence got, what it sent.

`loop` loads it at the start. Every change that the server or a payload could see goes to a journal beside it, as one
line, which is enough for an agent that is killed; replacing a file costs a hundred times as much, and this is on the
way of every snippet. Against power cuts each launch is flushed to the disk before anything starts, so that no attempt
starts twice on one host (S11). The record is written anew, and the journal emptied, when an agent starts and when the
journal has grown. No secret and no environment of a payload is in either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.agent.tree import Handle
from penstock.domain import limits
from penstock.domain.custody import Launch, Phase
from penstock.domain.nouns import Exit

CHAINS_KEPT = 64  #: fences remembered: enough for any order that could still be under way


class Kept(msgspec.Struct, kw_only=True):
    """One attempt on this host."""

    launch: Launch
    phase: Phase = Phase.LAUNCHED
    exit: Exit | None = None
    outputs: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()  #: outputs the job declared
    grace_s: float = limits.GRACE_S
    handle: Handle | None = None
    warm: bool = False  #: a snippet: its parent is a warm interpreter, not a shim
    began: float | None = None  #: seconds since boot
    said: str | None = None  #: the agent's own word for why it ends the attempt
    notice: bool = False
    stopping: bool = False
    heard: bool = False  #: somebody was there to be told so: how it ends is our doing
    forgotten: bool = False  #: the server has its end; only logs are still on their way
    durable: dict[str, int] = {}  #: per stream, how much the server keeps for good
    fence_url: str = ""  #: where its fence alone can be read when the server is away


class Record(msgspec.Struct, kw_only=True):
    """The whole file."""

    incarnation: str
    boot: str = ""
    fences: list[tuple[str, int, int]] = []  #: job, replica, highest fence ever launched here; oldest first
    held: dict[str, Kept] = {}

    def fence(self, job: str, replica: int) -> int:
        return next((fence for one, number, fence in self.fences if (one, number) == (job, replica)), 0)

    def raise_fence(self, job: str, replica: int, fence: int) -> None:
        others = [each for each in self.fences if each[:2] != (job, replica)]
        self.fences = [*others, (job, replica, fence)][-CHAINS_KEPT:]


class Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One change: an attempt as it is now, or one of which nothing is left."""

    kept: Kept | None = None
    cleared: str = ""


class Journal:
    """What changed since the record was written, oldest first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def replay(self, record: Record) -> None:
        """Bring an older record up to date. Lines that it knows already change nothing."""
        for line in self._lines():
            record.held.pop(line.cleared, None)
            if line.kept is None:
                continue
            launch = line.kept.launch
            if launch.attempt in record.held or launch.fence > record.fence(launch.job, launch.replica):
                record.held[launch.attempt] = line.kept
                record.raise_fence(launch.job, launch.replica, launch.fence)

    def _lines(self) -> Iterator[Line]:
        """What was noted; of a line that a power cut tore nothing had begun."""
        try:
            lines = self._path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return
        for line in lines:
            try:
                yield msgspec.json.decode(line, type=Line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue

    def note(self, line: Line) -> None:
        """Write it down, so that the next agent knows."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(self._fd, msgspec.json.encode(line) + b"\n")

    def flush(self) -> int:
        """All that was noted holds through a power cut when this returns; how long the journal is."""
        os.fdatasync(self._fd)
        return os.fstat(self._fd).st_size

    def clear(self) -> None:
        """The record holds all of it, synced."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
        else:
            self._path.unlink(missing_ok=True)


def load(path: Path) -> Record | None:
    """The record as last written; None when there is none. A file that cannot be read is kept aside for people."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError):
        path.replace(path.with_suffix(".unreadable"))
        return None


def save(path: Path, content: bytes, *, sync: bool) -> None:
    """Replace the file at once, readable by its owner only; `sync`: it holds through a power cut."""
    temporary = path.with_suffix(".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(fd)
    temporary.replace(path)
    if sync:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def boot_id() -> str:
    """Changes with every boot of the machine: then no process of the record can be alive."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
