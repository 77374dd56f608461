"""Which snapshots and blobs nobody needs, and how they go while others submit.

`server.cleaning` sweeps; `server.bytes` and `server.submission` ask before they let a snapshot in. Jobs name snapshots,
snapshots name blobs, and both are young for a day after they were last sent. A submit under way has no job yet, so
before anything is deleted a list of it is written under `clean/`, and only then is looked once more who needs what; a
submit writes its snapshot first and reads the lists afterwards. Whoever comes second sees the other: either the sweep
leaves the blobs alone, or the submit is told to send them again. No clock decides that, except how long a list holds
whose writer died. Each team has snapshots and blobs of its own, also where the bytes are equal (ADR 0021). It must not
decode a snapshot: what looks like a hash in it counts as named.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final
from urllib.parse import quote

import msgspec

from penstock.domain import limits
from penstock.ports.objects import Kept
from penstock.ports.store import Reader
from penstock.server.routing import Refusal
from penstock.server.service import Service

LISTS: Final = "clean/"
SNAPSHOTS: Final = "snapshots/"
BLOBS: Final = "blobs/"
#: Between the list and the last look: a submit that looked just before the list was written has committed by then.
SETTLE_S: Final = 1.0
DELETES_AT_ONCE: Final = 16
_PAGE: Final = 5_000
_HASH: Final = re.compile(rb"[0-9a-f]{64}")


class Doomed(msgspec.Struct, frozen=True):
    """A list under `clean/`: names (`TEAM/HASH`) that are about to go, or, with `done`, that went."""

    at: float
    names: tuple[str, ...]
    done: bool = False


class Swept(msgspec.Struct, frozen=True):
    """How much one call removed, or would remove, and whether it has to be called again."""

    gone: tuple[Kept, ...] = ()
    more: bool = False


def folder_of(team: str) -> str:
    """A team's own folder among others. Team names are any text: escaped, so that none of them is a path."""
    return quote(team, safe="").replace(".", "%2E") + "/"


def blob_path(team: str, name: str) -> str:
    return BLOBS + folder_of(team) + name


def snapshot_path(team: str, name: str) -> str:
    return f"{SNAPSHOTS}{folder_of(team)}{name}.json"


def _name_of(path: str) -> str:
    """Team and hash, as lists name them."""
    return path.partition("/")[2].removesuffix(".json")


def _hash_of(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".json")


# --- what submits ask ---
async def lost_blobs(service: Service, team: str, snapshot: str, body: bytes) -> tuple[str, ...]:
    """Which blobs a snapshot that was written just now has lost meanwhile; refused while some are being removed."""
    lists = await _lists(service)
    if not lists:
        return ()
    own = folder_of(team)
    wanted = {own + found.decode() for found in _HASH.findall(body)}
    _refuse_going(service, lists, {own + snapshot, *wanted})
    suspects = sorted(wanted & {name for one in lists for name in one.names})
    lost = [name for name in suspects if BLOBS + name not in await service.objects.list(BLOBS + name)]
    return tuple(_hash_of(name) for name in lost)


async def refuse_doomed(service: Service, team: str, snapshots: Collection[str]) -> None:
    """A job that names a snapshot which is being removed just now must send it again."""
    if snapshots:
        _refuse_going(service, await _lists(service), [folder_of(team) + snapshot for snapshot in snapshots])


def _refuse_going(service: Service, lists: Sequence[Doomed], wanted: Collection[str]) -> None:
    # Twice the time: clocks of two servers differ, and no list may end here before its writer thinks so.
    since = service.clock.now() - 2 * limits.SWEEP_S
    if any(not one.done and one.at > since and not set(wanted).isdisjoint(one.names) for one in lists):
        detail = "snapshot: parts of it were unused, and are being removed just now"
        raise Refusal("unavailable", detail, advice="send it again", retry_after_s=2 * SETTLE_S)


async def _lists(service: Service) -> list[Doomed]:
    found = [await service.objects.get(path) for path in await service.objects.list(LISTS)]
    return [msgspec.json.decode(stored.data, type=Doomed) for stored in found if stored is not None]


# --- sweeping; the caller lets nobody else sweep in this process meanwhile ---
async def sweep_snapshots(service: Service, *, dry_run: bool) -> Swept:
    """Remove snapshots that no job names and that were not sent for a day."""
    if not dry_run:
        await _drop_old_lists(service)
    doomed = await _unused_snapshots(service)
    if dry_run:
        return Swept(doomed)
    going = doomed[: limits.CLEAN_OBJECTS]
    gone = await _remove(service, going, lambda: _unused_snapshots(service))
    return Swept(gone, more=len(doomed) > len(going))


async def sweep_blobs(service: Service, *, dry_run: bool, fresh: bool) -> Swept:
    """Remove blobs that no snapshot names. Large roots take several calls; `fresh` says that this is the first."""
    named = service.part(Named)
    if fresh:
        named.forget()
    # What a real run has removed by now, a dry run must not count either.
    leaving = frozenset(kept.path for kept in await _unused_snapshots(service)) if dry_run else frozenset()
    if not await named.catch_up(leaving, limits.CLEAN_READ_BYTES):
        return Swept(more=True)
    doomed = await _unused_blobs(service, named)
    if dry_run:
        return Swept(doomed)

    async def still() -> tuple[Kept, ...]:
        await named.catch_up(frozenset(), None)
        return await _unused_blobs(service, named)

    going = doomed[: limits.CLEAN_OBJECTS]
    gone = await _remove(service, going, still)
    return Swept(gone, more=len(doomed) > len(going))


class Named:
    """Every blob that its team's snapshots name, as far as they were read; one that went meanwhile still counts."""

    def __init__(self, service: Service) -> None:
        self._objects = service.objects
        self._read: set[str] = set()
        self._hashes: dict[str, set[bytes]] = {}  #: by the folder of the team

    def __contains__(self, path: str) -> bool:
        """Whether a snapshot names the blob of this path."""
        return bytes.fromhex(_hash_of(path)) in self._hashes.get(_folder(path), ())

    def forget(self) -> None:
        self._read.clear()
        self._hashes.clear()

    async def catch_up(self, leaving: Collection[str], bytes_max: int | None) -> bool:
        """Read snapshots that are new, up to so many bytes; whether all are read."""
        size = 0
        for path in await self._objects.list(SNAPSHOTS):
            if path in self._read or path in leaving:
                continue
            if bytes_max is not None and size >= bytes_max:
                return False
            stored = await self._objects.get(path)
            if stored is not None:
                size += len(stored.data)
                hashes = self._hashes.setdefault(_folder(path), set())
                hashes.update(bytes.fromhex(found.decode()) for found in _HASH.findall(stored.data))
            self._read.add(path)
        return True


def _folder(path: str) -> str:
    return _name_of(path).rpartition("/")[0]


async def _unused_snapshots(service: Service) -> tuple[Kept, ...]:
    old = await _old(service, SNAPSHOTS)
    if not old:
        return ()
    used = await _snapshots_in_use(service)
    return tuple(kept for kept in old if _hash_of(kept.path) not in used)


async def _unused_blobs(service: Service, named: Named) -> tuple[Kept, ...]:
    return tuple(kept for kept in await _old(service, BLOBS) if kept.path not in named)


async def _old(service: Service, prefix: str) -> list[Kept]:
    """What was not sent for a day. Whatever else lies there is not ours to judge."""
    before = service.clock.now() - service.settings.retention.unused_s
    return [
        kept
        for kept in await service.objects.survey(prefix)
        if kept.written_at < before and _HASH.fullmatch(_hash_of(kept.path).encode())
    ]


async def _snapshots_in_use(service: Service) -> set[str]:
    """Of all jobs that there are. One that is made meanwhile has sent its snapshot, which is young, or has a parent."""
    used: set[str] = set()
    after = ""
    while True:
        page = await service.store.read(_snapshots_page, after)
        used.update(snapshot for _, snapshot in page if snapshot is not None)
        if len(page) < _PAGE:
            return used
        after = page[-1][0]


def _snapshots_page(reader: Reader, after: str) -> list[tuple[str, str | None]]:
    return reader.snapshots_page(after, _PAGE)


async def _remove(
    service: Service, going: Sequence[Kept], still: Callable[[], Awaitable[Collection[Kept]]]
) -> tuple[Kept, ...]:
    """List what goes, look once more, delete it, and say that it went."""
    if not going:
        return ()
    objects, clock = service.objects, service.clock
    began = clock.steady()
    doomed = Doomed(clock.now(), tuple(_name_of(kept.path) for kept in going))
    path = f"{LISTS}{int(doomed.at * 1000):015d}-{secrets.token_hex(8)}.json"
    await objects.put_new(path, msgspec.json.encode(doomed))
    await clock.sleep(SETTLE_S)
    sure = {kept.path for kept in await still()}
    left = [kept for kept in going if kept.path in sure]
    gone: list[Kept] = []
    while left and clock.steady() - began < limits.SWEEP_S:
        batch, left = left[:DELETES_AT_ONCE], left[DELETES_AT_ONCE:]
        await asyncio.gather(*(objects.delete(kept.path) for kept in batch))
        gone += batch
    await objects.put(path, msgspec.json.encode(msgspec.structs.replace(doomed, done=True)))
    return tuple(gone)


async def _drop_old_lists(service: Service) -> None:
    """A submit that began before such a list was written is over."""
    before = service.clock.now() - limits.UNUSED_S
    for kept in await service.objects.survey(LISTS):
        if kept.written_at < before:
            await service.objects.delete(kept.path)
