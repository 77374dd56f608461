"""Copies a checkpoint to the root of the region where its job goes on, before it goes on.

`server.checkpoints` asks for it when the newest whole checkpoint lies in another region's root. Pieces go first, each
held against its hash, those that are there are not sent again, and a marker is written last: with it the copy is whole.
So it may be cut off at any moment, and whoever is asked next goes on where it was. How many bytes that is and what they
cost is committed before the first of them is sent. Hosts that ask meanwhile are told to ask again. It must not choose a
checkpoint, nor change the root that it copies from.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.controller.verbs import Outdated
from penstock.domain import limits
from penstock.domain.catalogue_egress import egress_usd
from penstock.domain.nouns import Attempt
from penstock.domain.transfers import Transfer
from penstock.ports.objects import AlreadyThere, Damaged
from penstock.ports.store import StoreError
from penstock.server.regions import Root
from penstock.server.routing import Refusal
from penstock.server.service import Service
from penstock.wire.agent import Restorable

logger = logging.getLogger(__name__)

AT_ONCE: Final = 8  #: pieces under way, of all copies together: 64 MiB of memory
HOLD_S: Final = 10.0  #: a host's question waits so long for the end of a copy; its call would wait three times as long
UNWANTED_S: Final = 60.0  #: a copy that nobody asked for in this time stops: hosts ask every few seconds
_DAMAGED_KEPT: Final = 1_000


class Piece(msgspec.Struct, frozen=True):
    """A part of a file: whose host's, its hash, its size."""

    rank: int
    name: str
    size: int


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """The marker of a whole copy: what it is, where it came from, how much it was."""

    source: str
    size: int
    found: tuple[Restorable, ...]


def checkpoints_of(job: str, fence: int) -> str:
    """Where the copies of an attempt's hosts lie, in whichever root."""
    return f"jobs/{job}/checkpoints/{fence}/"


def marker_of(found: Sequence[Restorable]) -> str:
    """Where the marker of a copy of exactly this lies: two markers of one name say the same."""
    digest = hashlib.sha256(msgspec.json.encode(found)).hexdigest()
    return f"{checkpoints_of(found[0].job, found[0].fence)}copied/{digest}.json"


def pieces_of(found: Sequence[Restorable]) -> tuple[Piece, ...]:
    """Every piece once."""
    each = limits.CHECKPOINT_PIECE_BYTES
    pieces = (
        Piece(whose.rank, name, min(each, file.size - number * each))
        for whose in found
        for file in whose.saved.files
        for number, name in enumerate(file.pieces)
    )
    return tuple(dict.fromkeys(pieces))


class Transfers:
    """The copies under way in this server, each once however many hosts wait for it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tasks: dict[tuple[str, str], asyncio.Task[Transfer]] = {}
        self._stops: dict[tuple[str, str], asyncio.TimerHandle] = {}  #: when each of them is wanted no more
        self._sending = asyncio.Semaphore(AT_ONCE)
        self._damaged: dict[tuple[str, str], str] = {}  #: copies that cannot be made, and why

    async def close(self) -> None:
        """The server stops: the next one goes on where these are."""
        tasks = list(self._tasks.values())
        for key, task in list(self._tasks.items()):
            self._forget(key, task)
        if tasks:
            await asyncio.wait(tasks)

    async def bring(
        self, attempt: Attempt, found: tuple[Restorable, ...], source: Root, target: Root
    ) -> Transfer | None:
        """See to it that the target has a checkpoint, whole; None: it had it already.

        Raises `Refusal` ("copying") while it is on its way, `Damaged` when it cannot be had, and `ObjectsError`.
        """
        key = (target.region, marker_of(found))
        if key in self._damaged:
            raise Damaged(self._damaged[key])
        task = self._tasks.get(key)
        if task is None:
            if await target.objects.get(key[1]) is not None:
                return None
            # Looked up again: another host of the gang may have come while we asked.
            task = self._tasks.get(key) or asyncio.create_task(self._copy(attempt, found, source, target))
            self._tasks[key] = task
        self._want(key, task)
        await asyncio.wait((task,), timeout=HOLD_S)
        if not task.done():
            size = sum(piece.size for piece in pieces_of(found))
            detail = f"the checkpoint of {size} bytes is being copied from {source.region} to {target.region}"
            raise Refusal("copying", detail, advice="ask again", retry_after_s=1.0)
        self._forget(key, task)
        if task.cancelled():
            raise Refusal("unavailable", "the copy was stopped, or the server stops", retry_after_s=1.0)
        try:
            return task.result()
        except Damaged as damaged:
            self._damaged[key] = str(damaged)
            if len(self._damaged) > _DAMAGED_KEPT:
                del self._damaged[next(iter(self._damaged))]
            raise

    def _want(self, key: tuple[str, str], task: asyncio.Task[Transfer]) -> None:
        """Put off the end of a copy: bytes cost money, and the attempt that asked for them may be over."""
        if key in self._stops:
            self._stops[key].cancel()
        self._stops[key] = asyncio.get_running_loop().call_later(UNWANTED_S, self._forget, key, task)

    def _forget(self, key: tuple[str, str], task: asyncio.Task[Transfer]) -> None:
        """Stop a copy that has not ended; never one that was begun since under the same key."""
        if self._tasks.get(key) is task:
            del self._tasks[key]
            self._stops.pop(key).cancel()
            task.cancel()

    async def _copy(self, attempt: Attempt, found: tuple[Restorable, ...], source: Root, target: Root) -> Transfer:
        prefix, clock = checkpoints_of(found[0].job, found[0].fence), self._service.clock
        pieces = pieces_of(found)
        size = sum(piece.size for piece in pieces)
        transfer = Transfer(
            source=source.region,
            target=target.region,
            size=size,
            usd=egress_usd(source.region, target.region, size),
            begun_at=clock.now(),
        )
        await self._note(attempt, transfer)
        there = set(await target.objects.list(prefix))
        left = iter([piece for piece in pieces if _path(prefix, piece) not in there])

        async def one_after_another() -> None:
            for piece in left:
                async with self._sending:
                    await _send(piece, prefix, source, target)

        work = [asyncio.ensure_future(one_after_another()) for _ in range(AT_ONCE)]
        try:
            await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        marker = msgspec.json.encode(Copied(source=source.region, size=size, found=found))
        try:
            await target.objects.put_new(marker_of(found), marker)
        except AlreadyThere:
            logger.info("attempt %s: another server, or an answer that was lost, has finished the copy", attempt.id)
        done = msgspec.structs.replace(transfer, done_at=clock.now())
        await self._note(attempt, done)
        return done

    async def _note(self, attempt: Attempt, transfer: Transfer) -> None:
        """Say it in the log. That it cannot be said must not cost the checkpoint."""
        try:
            await self._service.controller.commands.note_transfer(attempt.id, transfer)
        except (Outdated, StoreError) as error:
            logger.warning("attempt %s: a copy between regions is not in the log: %s", attempt.id, error)


async def _send(piece: Piece, prefix: str, source: Root, target: Root) -> None:
    path = _path(prefix, piece)
    stored = await source.objects.get(path)
    if stored is None:
        raise Damaged(f"{path}: a piece of it is missing")
    if await asyncio.to_thread(lambda: hashlib.sha256(stored.data).hexdigest()) != piece.name:
        raise Damaged(f"{path}: the SHA-256 of a piece of it is not {piece.name}")
    try:
        await target.objects.put_new(path, stored.data)
    except AlreadyThere:
        return  # an answer that was lost, or another server: the name is the hash


def _path(prefix: str, piece: Piece) -> str:
    return f"{prefix}{piece.rank}/pieces/{piece.name}"


def transfers(service: Service) -> Transfers:
    return service.part(Transfers)
