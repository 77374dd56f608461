"""What an agent must know after it was killed: its incarnation, what it holds, how far each fence got, what it sent.

`loop` loads it at the start and writes it at every change that the server or a payload could see. A write replaces the
whole file at once, which is enough for an agent that is killed. Against power cuts there is a journal beside it: each
launch is in it, for good, before anything starts, so that no attempt starts twice on one host (S11). One line and one
flush of the disk, because this is on the way of every snippet. No secret and no environment of a payload is in either.
"""

from __future__ import annotations

import os
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
    forgotten: bool = False  #: the server has its end; only logs are still on their way
    durable: dict[str, int] = {}  #: per stream, how much the server keeps for good


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


class Journal:
    """Launches, oldest first, each on the disk before it begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def read(self) -> list[Launch]:
        """What was noted; a line that a power cut tore was never begun."""
        try:
            lines = self._path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(msgspec.json.decode(line, type=Launch))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
        return found

    def note(self, launch: Launch) -> int:
        """Write a launch down for good; how long the journal is now."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(self._fd, msgspec.json.encode(launch) + b"\n")
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
