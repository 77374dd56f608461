"""Routes by which hosts keep checkpoints in the bucket and read those of earlier attempts, and learn where a fence is.

`agent.checkpoints` calls them where a host has no way to the root of its own (ADR 0019). Pieces come by hash, then a
list that names all of them: only with the list is there a checkpoint, and it is taken when every piece is there. A host
writes under the fence of its own live attempt and nowhere else, and no more once that fence is passed (S6); it reads
what its attempt may restore and nothing else. What JAX compiled is kept the same way, by job. It must not look into a
piece, nor decide what may be restored.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from penstock.controller.reports import fence_passed
from penstock.domain import limits
from penstock.domain.custody import fence_path
from penstock.domain.nouns import Attempt, Role
from penstock.ports.objects import AlreadyThere, Damaged, Objects, ObjectsError
from penstock.ports.store import Reader
from penstock.server.agents import bound_attempt, note_save, restorable
from penstock.server.regions import Root
from penstock.server.routing import ID_PATTERN, Call, Parameter, Raw, Refusal, Route
from penstock.server.service import Service
from penstock.server.transfers import checkpoints_of, transfers
from penstock.server.whole_copies import candidates
from penstock.wire.agent import FenceWay, PiecesQuery, PiecesReply, Restorable, RestoreReply, Saved

logger = logging.getLogger(__name__)

DELETES_AT_ONCE: Final = 8
LISTS_KEPT: Final = 2  #: of one host: should the newest turn out to be damaged, the one before it is restored
COMPILED: Final = "compiled"
_encode = msgspec.json.Encoder().encode


# --- where it lies ---
def _compiled(job: str) -> str:
    """What JAX compiled for a job, by replica and rank: every attempt adds to it."""
    return f"jobs/{job}/jax-cache/"


class Shelf:
    """The copies of one host of one attempt. Their pieces are its own, so that they can go when nothing names them."""

    def __init__(self, objects: Objects, prefix: str) -> None:
        self.objects = objects
        self._prefix = prefix

    def piece(self, name: str) -> str:
        return f"{self._prefix}pieces/{name}"

    def list_path(self, number: int) -> str:
        return f"{self._prefix}lists/{number:016d}.json"

    async def missing(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        there = {path.rpartition("/")[2] for path in await self.objects.list(self.piece(""))} if wanted else set()
        return tuple(name for name in dict.fromkeys(wanted) if name not in there)

    async def lists(self) -> tuple[str, ...]:
        """Oldest first."""
        return await self.objects.list(f"{self._prefix}lists/")

    async def read(self, path: str) -> Saved | None:
        """One list; None if it is gone. Raises `Damaged`."""
        stored = await self.objects.get(path)
        if stored is None:
            return None
        try:
            return msgspec.json.decode(stored.data, type=Saved)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Damaged(f"{path}: is not a list of a copy: {error}") from error

    async def newest(self) -> Saved:
        """What counts. One that a newer list is just replacing may vanish between two looks: then the newer one.

        A damaged one names nothing, but its number is taken: the next copy is sent whole.
        """
        while paths := await self.lists():
            try:
                found = await self.read(paths[-1])
            except Damaged as damaged:
                logger.warning("the next copy is sent whole: %s", damaged)
                return Saved(number=_number(paths[-1]))
            if found is not None:
                return found
        return Saved(number=0)

    async def clear_behind(self, saved: Saved) -> None:
        """Remove lists but the newest ones, and what only they named. Cut off half-way, the next one goes on.

        A newer list may have come meanwhile, from the agent that follows a killed one: then this is its business.
        """
        paths = await self.lists()
        if len(paths) <= LISTS_KEPT or paths[-1] != self.list_path(saved.number):
            return
        kept = {name for file in saved.files for name in file.pieces}
        for path in paths[-LISTS_KEPT:-1]:
            kept |= await self._named(path)
        places = asyncio.Semaphore(DELETES_AT_ONCE)

        async def delete(path: str) -> None:
            async with places:
                await self.objects.delete(path)

        for path in paths[:-LISTS_KEPT]:
            gone = await self._named(path) - kept
            await asyncio.gather(*(delete(self.piece(name)) for name in gone))
            await delete(path)

    async def _named(self, path: str) -> set[str]:
        """The pieces of a list; none of one that is damaged: what only it named goes with the job."""
        try:
            found = await self.read(path)
        except Damaged as damaged:
            logger.warning("%s", damaged)
            return set()
        return set() if found is None else {name for file in found.files for name in file.pieces}


def _number(path: str) -> int:
    return int(path.rpartition("/")[2].removesuffix(".json"))


async def _own(service: Service, call: Call) -> Shelf:
    """Where the calling host may write: for a live attempt whose fence is its job's current one."""
    attempt, rank = await bound_attempt(service, call, committed=True)
    if await service.store.read(_is_passed, attempt):
        raise Refusal("conflict", f"attempt {attempt.id}: its fence {attempt.fence} is passed", field="fence")
    if call.query.get("kind") == COMPILED:
        return Shelf(service.objects, f"{_compiled(attempt.job)}{attempt.replica}/{rank}/")
    root = service.regions.at(attempt.zone)
    return Shelf(root.objects, f"{checkpoints_of(attempt.job, attempt.fence)}{rank}/")


def _is_passed(reader: Reader, attempt: Attempt) -> bool:
    job = reader.job(attempt.job)
    return job is None or fence_passed(job, attempt)


# --- writing ---
async def saved(service: Service, call: Call) -> Saved:
    """What this host has copied so far, for an agent that follows a killed one."""
    return await (await _own(service, call)).newest()


async def missing_pieces(service: Service, call: Call) -> PiecesReply:
    """Which of these pieces still have to be sent."""
    return PiecesReply(await (await _own(service, call)).missing(call.given(PiecesQuery).pieces))


async def put_piece(service: Service, call: Call) -> None:
    """Store a piece under the hash of these very bytes; storing it again is harmless."""
    body, name = call.body, call.params["sha256"]
    assert isinstance(body, bytes)
    shelf = await _own(service, call)
    found = await asyncio.to_thread(lambda: hashlib.sha256(body).hexdigest())
    if found != name:
        raise Refusal("conflict", f"sha256: the body's is {found}, not {name}", field="sha256", advice="send it again")
    try:
        await shelf.objects.put_new(shelf.piece(name), body)
    except AlreadyThere:
        # Sent before, its answer lost. The list will count on it: what is there is looked at, and mended.
        try:
            stored = await shelf.objects.get(shelf.piece(name))
        except ObjectsError:
            stored = None
        if stored is None or stored.data != body:
            await shelf.objects.put(shelf.piece(name), body)


async def put_saved(service: Service, call: Call) -> None:
    """Make a copy count: all its pieces are there, and it is newer than every other of this host."""
    given, shelf = call.given(Saved), await _own(service, call)
    if given.number < 1:
        raise Refusal("conflict", f"number: {given.number} means that nothing was copied yet", field="number")
    lost = await shelf.missing(tuple(name for file in given.files for name in file.pieces))
    if lost:
        detail = f"pieces: {len(lost)} are not here, {lost[0]} first"
        raise Refusal("conflict", detail, field="pieces", advice="ask which are missing, and send those")
    data = _encode(given)
    there = await shelf.newest()
    if there.number > given.number:
        raise Refusal("conflict", f"number: {there.number} is newer than {given.number}", field="number")
    try:
        await shelf.objects.put_new(shelf.list_path(given.number), data)
    except AlreadyThere:
        stored = await shelf.objects.get(shelf.list_path(given.number))
        if stored is None or stored.data != data:  # else it was this very call, its answer lost
            detail = f"number: {given.number} is another copy's"
            raise Refusal("conflict", detail, field="number", advice="look what there is, and go on from it") from None
    if given.files and call.query.get("kind") != COMPILED:
        await _note_save(service, call)
    try:
        await shelf.clear_behind(given)
    except ObjectsError as error:
        logger.warning("older checkpoints stay until the next one: %s", error)


async def _note_save(service: Service, call: Call) -> None:
    """For the cost ledger: what ran until now is safe."""
    attempt, rank = await bound_attempt(service, call)
    said = service.progress.get(attempt.id)
    await note_save(service, attempt.id, rank, said.save_s if said is not None else None)


# --- reading ---
async def restore(service: Service, call: Call) -> RestoreReply:
    """What the newest earlier attempt with a whole copy had copied, of all its hosts; `skip` asks for older ones."""
    attempt, _ = await bound_attempt(service, call)
    if call.query.get("kind") == COMPILED:
        return await _all_compiled(service, await _jobs(service, attempt))
    skip, notes = int(call.query.get("skip", "0")), list[str]()
    here = service.regions.at(attempt.zone)
    for job, fence in await service.store.read(restorable, attempt.id):
        hosts, zone = await service.store.read(_origin, job, fence)
        # Its own region's root first. Roots may have been named, or named otherwise, since it was written.
        for root in service.regions.all(service.regions.at(zone)):
            async for whole in _whole(root, job, fence, hosts, notes):
                if skip:
                    skip -= 1
                elif await _is_here(service, attempt, whole, root, here, notes):
                    return RestoreReply(whole, tuple(notes))
    return RestoreReply(notes=tuple(notes))


async def _is_here(
    service: Service, attempt: Attempt, whole: tuple[Restorable, ...], root: Root, here: Root, notes: list[str]
) -> bool:
    """Have a checkpoint of another region's root copied to this region's; False: it turned out to be damaged."""
    if root.objects is here.objects:
        return True
    try:
        copied = await transfers(service).bring(attempt, whole, root, here)
    except Damaged as damaged:
        logger.warning("%s", damaged)
        number = max(each.saved.number for each in whole)
        notes.append(f"checkpoint {number} of attempt {whole[0].fence} is skipped: {damaged}")
        return False
    if copied is not None:
        notes.append(copied.told)
    return True


async def _whole(
    root: Root, job: str, fence: int, hosts: int, notes: list[str]
) -> AsyncIterator[tuple[Restorable, ...]]:
    """The whole copies of one attempt in a root, best first; what is not whole is noted."""
    prefix = checkpoints_of(job, fence)
    lists: dict[int, list[Saved]] = {}
    pieces: dict[int, set[str]] = {}
    for path in reversed(await root.objects.list(prefix)):
        rank, kind, name = (*path.removeprefix(prefix).split("/", 2), "", "")[:3]
        if not rank.isdecimal():
            continue
        if kind == "pieces":
            pieces.setdefault(int(rank), set()).add(name)
        elif kind == "lists":
            try:
                found = await Shelf(root.objects, f"{prefix}{rank}/").read(path)
            except Damaged as damaged:
                logger.warning("%s", damaged)
                notes.append(
                    f"checkpoint {_number(path)} of attempt {fence}, host {rank}, is skipped: its list is damaged"
                )
                continue
            lists.setdefault(int(rank), []).extend([] if found is None else [found])
    silent = [rank for rank in range(hosts) if not lists.get(rank)]
    if silent and any(saved.files for each in lists.values() for saved in each):
        notes.append(
            f"the checkpoints of attempt {fence} are skipped: host {silent[0]} of {hosts} has none that is whole"
        )
    for choice in candidates(lists, hosts):
        lost = {
            (rank, saved.number)
            for rank, saved in choice.items()
            if not {name for file in saved.files for name in file.pieces} <= pieces.get(rank, set())
        }
        if lost:
            notes.extend(
                f"checkpoint {number} of attempt {fence}, host {rank}, is skipped: pieces of it are missing"
                for rank, number in sorted(lost)
            )
            continue
        yield tuple(
            Restorable(job=job, fence=fence, rank=rank, saved=saved)
            for rank, saved in sorted(choice.items())
            if saved.files
        )


def _origin(reader: Reader, job: str, fence: int) -> tuple[int, str]:
    """How many hosts an attempt had, and in which zone."""
    return next(((each.hosts, each.zone) for each in reader.attempts_of(job) if each.fence == fence), (1, ""))


async def _jobs(service: Service, attempt: Attempt) -> tuple[str, ...]:
    """Whose compiled code an attempt may use: its own job's, and that of those it goes on from."""
    line = await service.store.read(restorable, attempt.id)
    return tuple(dict.fromkeys((attempt.job, *(job for job, _ in line))))


async def _all_compiled(service: Service, jobs: tuple[str, ...]) -> RestoreReply:
    """What the newest of these jobs that compiled anything has, of all replicas and hosts."""
    for job in jobs:
        prefix = _compiled(job)
        places = {tuple(path.removeprefix(prefix).split("/")[:2]) for path in await service.objects.list(prefix)}
        found = []
        for replica, rank in sorted(place for place in places if len(place) == 2 and "".join(place).isdecimal()):
            saved = await Shelf(service.objects, f"{prefix}{replica}/{rank}/").newest()
            if saved.files:
                found.append(Restorable(job=job, fence=int(replica), rank=int(rank), saved=saved))
        if found:
            return RestoreReply(tuple(found))
    return RestoreReply()


async def get_piece(service: Service, call: Call) -> Raw:
    """A piece of what this attempt may restore."""
    attempt, _ = await bound_attempt(service, call)
    job, fence, name = call.query["job"], int(call.query["fence"]), call.params["sha256"]
    objects: Objects = service.objects
    if call.query.get("kind") == COMPILED:
        allowed, folder = job in await _jobs(service, attempt), f"{_compiled(job)}{fence}/"
    else:
        allowed = (job, fence) in await service.store.read(restorable, attempt.id)
        folder, objects = checkpoints_of(job, fence), service.regions.at(attempt.zone).objects
    if not allowed:
        raise Refusal("forbidden", f"attempt {attempt.id} does not resume attempt {fence} of job {job}")
    try:
        stored = await objects.get(Shelf(objects, f"{folder}{int(call.query['rank'])}/").piece(name))
    except Damaged as damaged:
        logger.warning("%s", damaged)
        raise Refusal("conflict", f"sha256: the piece {name} is damaged in the bucket", field="sha256") from damaged
    if stored is None:
        raise Refusal("not_found", f"sha256: there is no piece {name} in the bucket", field="sha256")
    return Raw(stored.data)


async def fence_way(service: Service, call: Call) -> FenceWay:
    """An address of this attempt's fence object, for when the server is away; it opens nothing else."""
    attempt, _ = await bound_attempt(service, call)
    try:
        return FenceWay(await service.objects.lend(fence_path(attempt.job, attempt.replica), limits.FENCE_WAY_S))
    except ObjectsError as error:
        logger.warning("hosts cannot read fences without this server: %s", error)
        return FenceWay()


_BASE: Final = "/v1/agent/attempts/{attempt}"
_KIND: Final = Parameter("kind", "what is kept: checkpoints, or compiled code", choices=("checkpoints", COMPILED))
_SKIP: Final = Parameter(
    "skip", "whole copies to leave out: those turned out damaged", "integer", least=0, most=1_000_000
)
_WHOSE: Final = (
    Parameter("job", "whose checkpoint", required=True, pattern=ID_PATTERN),
    Parameter(
        "fence", "of which attempt; of compiled code the replica", "integer", required=True, least=0, most=1 << 53
    ),
    Parameter("rank", "of which host", "integer", required=True, least=0, most=1_000_000),
    _KIND,
)

ROUTES: Final = (
    Route("GET", f"{_BASE}/checkpoints", saved, gives=Saved, role=Role.AGENT, query=(_KIND,)),
    Route(
        "PUT",
        f"{_BASE}/checkpoints",
        put_saved,
        takes=Saved,
        role=Role.AGENT,
        status=204,
        query=(_KIND,),
        body_max=limits.CHECKPOINT_LIST_BYTES_MAX,
    ),
    Route(
        "POST",
        f"{_BASE}/checkpoints/missing",
        missing_pieces,
        takes=PiecesQuery,
        gives=PiecesReply,
        role=Role.AGENT,
        query=(_KIND,),
        body_max=limits.CHECKPOINT_LIST_BYTES_MAX,
    ),
    Route(
        "PUT",
        f"{_BASE}/checkpoints/pieces/{{sha256}}",
        put_piece,
        takes=bytes,
        role=Role.AGENT,
        status=204,
        query=(_KIND,),
        body_max=limits.CHECKPOINT_PIECE_BYTES,
    ),
    Route("GET", f"{_BASE}/restore", restore, gives=RestoreReply, role=Role.AGENT, query=(_KIND, _SKIP)),
    Route("GET", f"{_BASE}/restore/{{sha256}}", get_piece, gives="bytes", role=Role.AGENT, query=_WHOSE),
    Route("GET", f"{_BASE}/fence", fence_way, gives=FenceWay, role=Role.AGENT),
)
