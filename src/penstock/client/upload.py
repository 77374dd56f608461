"""From a working directory to a snapshot the server has: freeze, ask what is missing, send that, then the manifest.

`Client.upload` and `tpu run` call it; `AsyncClient` has its own entrance. The manifest goes last, so that the server
holds all blobs of any snapshot it knows. An upload that is cut off is simply done again: what arrived is not sent
twice. It decides nothing about what belongs into a snapshot (`objects.snapshots` does) and starts no job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

from penstock.client import settings
from penstock.client.errors import ApiError
from penstock.objects.snapshots import Frozen, freeze, measure

AT_ONCE: Final = 8  #: blobs under way: hides the delay of each on a long line, and stays within 130 MB of memory
ASKED_AT_ONCE: Final = 10_000  #: what one request for missing blobs may name

#: Shown over itself while it changes: "sending 3 of 12 MB".
Progress = Callable[[str], None]
#: Said once: a file that was left out, and why.
Note = Callable[[str], None]


class Sender(Protocol):
    """What is used of `client.Client`; called from several threads."""

    def missing_blobs(self, hashes: Sequence[str], /) -> Sequence[str]: ...

    def put_blob(self, sha256: str, data: bytes, /) -> None: ...

    def put_snapshot(self, sha256: str, data: bytes, /) -> None: ...


class AsyncSender(Protocol):
    """What is used of `client.AsyncClient`."""

    async def missing_blobs(self, hashes: Sequence[str], /) -> Sequence[str]: ...

    async def put_blob(self, sha256: str, data: bytes, /) -> None: ...

    async def put_snapshot(self, sha256: str, data: bytes, /) -> None: ...


def upload_directory(
    client: Sender, directory: Path, *, progress: Progress | None = None, note: Note | None = None
) -> str:
    """Freeze a directory and send what the server lacks of it; the snapshot's id."""
    frozen = _frozen(directory, progress, note)
    send(client, frozen, progress)
    return frozen.id


def send(client: Sender, frozen: Frozen, progress: Progress | None = None) -> int:
    """Send what is missing; how many bytes of blobs that was."""
    sent = _send_blobs(client, frozen, progress)
    try:
        client.put_snapshot(frozen.id, frozen.data)
    except ApiError as error:
        if error.code != "conflict":
            raise
        # Blobs that nothing used any more were cleaned away after the server said that it had them.
        sent += _send_blobs(client, frozen, progress)
        client.put_snapshot(frozen.id, frozen.data)
    return sent


def _send_blobs(client: Sender, frozen: Frozen, progress: Progress | None) -> int:
    missing = [id for asked in _asked(frozen) for id in _wanted(asked, client.missing_blobs(asked))]
    tally = _Tally(frozen, missing, progress)

    def put(id: str) -> str:
        client.put_blob(id, frozen.blob(id))
        return id

    with ThreadPoolExecutor(AT_ONCE, "penstock-upload") as threads:
        for id in threads.map(put, missing):
            tally.sent(id)
    return tally.done


async def upload_directory_async(
    client: AsyncSender, directory: Path, *, progress: Progress | None = None, note: Note | None = None
) -> str:
    """As `upload_directory`; reading and compressing happen beside the loop, so `progress` is called from a thread."""
    frozen = await asyncio.to_thread(_frozen, directory, progress, note)
    await _send_blobs_async(client, frozen, progress)
    try:
        await client.put_snapshot(frozen.id, frozen.data)
    except ApiError as error:
        if error.code != "conflict":
            raise
        await _send_blobs_async(client, frozen, progress)  # see `send`
        await client.put_snapshot(frozen.id, frozen.data)
    return frozen.id


async def _send_blobs_async(client: AsyncSender, frozen: Frozen, progress: Progress | None) -> None:
    missing = [id for asked in _asked(frozen) for id in _wanted(asked, await client.missing_blobs(asked))]
    tally = _Tally(frozen, missing, progress)
    places = asyncio.Semaphore(AT_ONCE)

    async def put(id: str) -> None:
        async with places:
            await client.put_blob(id, await asyncio.to_thread(frozen.blob, id))
        tally.sent(id)

    try:
        async with asyncio.TaskGroup() as group:
            for id in missing:
                group.create_task(put(id))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed  # callers know the client's errors, not groups of them


def measure_directory(directory: Path) -> tuple[int, int]:
    """How many files, and how many bytes, would be frozen; nothing is read or sent."""
    return measure(directory, settings.home())


def _frozen(directory: Path, progress: Progress | None, note: Note | None) -> Frozen:
    def told(done: int, total: int) -> None:
        if progress is not None:
            progress(f"freezing {_of(done, total)}")

    home = settings.home()
    frozen = freeze(directory, home / "cache" / "snapshots", told, without=home)
    if note is not None:
        for line in frozen.notes:
            note(line)
    return frozen


def _asked(frozen: Frozen) -> Iterator[tuple[str, ...]]:
    ids = tuple(blob.id for blob in frozen.manifest.blobs)
    for start in range(0, len(ids), ASKED_AT_ONCE):
        yield ids[start : start + ASKED_AT_ONCE]


def _wanted(asked: tuple[str, ...], missing: Sequence[str]) -> list[str]:
    """In our order, and only what was asked about: a server cannot ask for other bytes."""
    named = set(missing)
    return [id for id in asked if id in named]


class _Tally:
    """Counts the bytes that arrived, and says so."""

    def __init__(self, frozen: Frozen, missing: list[str], progress: Progress | None) -> None:
        sizes = {blob.id: blob.stored for blob in frozen.manifest.blobs}
        self._sizes = {id: sizes[id] for id in missing}
        self._total = sum(self._sizes.values())
        self._progress = progress
        self.done = 0

    def sent(self, id: str) -> None:
        self.done += self._sizes[id]
        if self._progress is not None:
            self._progress(f"sending {_of(self.done, self._total)}")


def _of(done: int, total: int) -> str:
    unit, size = ("MB", 1e6) if total >= 1e6 else ("kB", 1e3)
    return f"{done / size:.0f} of {total / size:.0f} {unit}"
