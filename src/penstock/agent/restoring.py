"""What earlier attempts copied to the bucket, back on this disk before the next attempt starts.

`launch` calls it where this host reaches the root through the server alone (ADR 0019); `checkpoints` made the copies.
Every piece is held against its hash. A copy of which a piece is damaged or gone is skipped, and the next older one that
is whole is taken: all hosts of a gang read all pieces of it, so that all of them skip the same. A storage that does not
answer is waited for, though not for ever. It must not change anything in the bucket.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from penstock.agent.checkpoints import TooSilent, patiently, some_at_once
from penstock.agent.link import BYTES_S, Link, Refused
from penstock.domain import limits
from penstock.domain.admission import BadInput
from penstock.objects.names import parts_of
from penstock.wire.agent import Restorable, RestoreReply, SavedFile

logger = logging.getLogger(__name__)

SILENT_S: Final = 900.0  #: a storage that is away longer than a server may be: this host gives the attempt back
READS: Final = 3  #: of one piece: what is damaged on the way is not damaged there
COMPILED_S: Final = 60.0  #: compiling again takes about as long


class Unreadable(Exception):
    """What the bucket has of a checkpoint cannot be put on this disk now: the fault of a host, not of a job."""


class Damaged(Exception):
    """A copy is not what was copied, and will not be."""


class _Piece(NamedTuple):
    whose: Restorable
    file: SavedFile
    number: int
    taken: bool  #: False: another host's file of that name counts here; it is only looked at


async def restore(link: Link, attempt: str, rank: int, into: Path, say: Callable[[str], None]) -> Path | None:
    """Put the newest whole copy of earlier attempts into a folder below `into`; None if there is none.

    The copies of all hosts of that attempt are laid together; where two have a file of one name, this host's counts.
    Cut off, it is begun anew; done, it is found done. Raises `Unreadable` and `Refused`.
    """
    if (done := await asyncio.to_thread(_done, into)) is not None:
        return done
    where = f"/v1/agent/attempts/{attempt}/restore"
    partial = into.with_name(f"{into.name}.part")
    said: set[str] = set()
    skip = 0

    def tell(text: str) -> None:
        if text not in said:
            said.add(text)
            say(text)

    while found := await _ask(link, f"{where}?skip={skip}", tell):
        await asyncio.to_thread(shutil.rmtree, partial, True)
        folder = partial / str(found[0].fence)
        try:
            await _bring(link, where, found, rank, folder)
        except (Damaged, BadInput) as damaged:
            numbers = ", ".join(str(number) for number in sorted({each.saved.number for each in found}))
            tell(f"checkpoint {numbers} of attempt {found[0].fence} is skipped: {damaged}")
            skip += 1
        except (OSError, TooSilent) as error:
            raise Unreadable(f"the checkpoint of attempt {found[0].fence} cannot be restored: {error}") from error
        else:
            partial.rename(into)
            return into / folder.name
    if said:
        say("no whole checkpoint of an earlier attempt is left: it starts anew")
    return None


async def _ask(link: Link, where: str, tell: Callable[[str], None]) -> tuple[Restorable, ...]:
    try:
        reply = await patiently(lambda: link.ask("GET", where, None, RestoreReply), SILENT_S)
    except TooSilent as error:
        raise Unreadable(f"whether there is a checkpoint cannot be learned: {error}") from error
    for note in reply.notes:
        tell(note)
    return reply.found


async def bring_compiled(link: Link, attempt: str, rank: int, folder: Path) -> None:
    """What JAX compiled in earlier attempts, unless some lies here already. Without it, it is compiled again."""
    if await asyncio.to_thread(os.listdir, folder):
        return
    where, partial = f"/v1/agent/attempts/{attempt}/restore", folder.with_name(f"{folder.name}.{attempt}.part")
    try:
        async with asyncio.timeout(COMPILED_S):
            reply = await patiently(lambda: link.ask("GET", f"{where}?kind=compiled", None, RestoreReply), COMPILED_S)
            if not reply.found:
                return
            await asyncio.to_thread(shutil.rmtree, partial, True)
            await _bring(link, where, reply.found, rank, partial, "&kind=compiled")
            for each in partial.iterdir():
                each.rename(folder / each.name)
    except (Damaged, BadInput, OSError, Refused, TooSilent, TimeoutError) as error:
        logger.warning("attempt %s compiles again: %s", attempt, error)
    finally:
        await asyncio.to_thread(shutil.rmtree, partial, True)


async def _bring(link: Link, where: str, found: Sequence[Restorable], rank: int, folder: Path, kind: str = "") -> None:
    pieces = await asyncio.to_thread(_prepare, found, rank, folder)

    async def fetch(piece: _Piece) -> None:
        whose, file = piece.whose, piece.file
        name = file.pieces[piece.number]
        asked = f"{where}/{name}?job={whose.job}&fence={whose.fence}&rank={whose.rank}{kind}"
        for _ in range(READS):
            try:
                data = await patiently(lambda: link.call("GET", asked, timeout_s=BYTES_S), SILENT_S)
            except Refused as refused:
                if refused.problem.field == "sha256":
                    raise Damaged(f"{file.path}, host {whose.rank}: {refused.problem.detail}") from refused
                raise
            if await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest()) == name:  # noqa: B023 (awaited here)
                break
        else:
            raise Damaged(f"{file.path}, host {whose.rank}: the SHA-256 of a piece is not {name}")
        if piece.taken:
            await asyncio.to_thread(_write, folder / file.path, piece.number * limits.CHECKPOINT_PIECE_BYTES, data)

    await some_at_once(fetch, pieces)
    await asyncio.to_thread(_complete, folder, {each.file.path: each.file for each in pieces if each.taken}.values())


def _done(into: Path) -> Path | None:
    return next(into.iterdir(), None) if into.is_dir() else None


def _prepare(found: Sequence[Restorable], rank: int, folder: Path) -> list[_Piece]:
    """Folders, and files in their sizes; which piece comes from whom."""
    chosen: dict[str, SavedFile] = {}
    pieces: list[_Piece] = []
    folder.mkdir(parents=True)
    for each in sorted(found, key=lambda one: (one.rank != rank, one.rank)):
        for file in each.saved.files:
            parts_of(file.path)
            taken = chosen.setdefault(file.path, file) is file
            pieces += [_Piece(each, file, number, taken) for number in range(len(file.pieces))]
        for path in each.saved.folders:
            parts_of(path)
            (folder / path).mkdir(parents=True, exist_ok=True)
    wanted = sum(file.size for file in chosen.values()) + limits.HOST_FREE_BYTES
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise OSError(f"it needs {wanted} bytes with some to spare, and the disk has {free}")
    for path, file in chosen.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("xb"):
            pass
        if not file.pieces:
            _complete(folder, (file,))
    return pieces


def _write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _complete(folder: Path, files: Iterable[SavedFile]) -> None:
    for file in files:
        path = folder / file.path
        if path.lstat().st_size != file.size:
            raise Damaged(f"{file.path}: has {path.lstat().st_size} bytes and should have {file.size}")
        path.chmod((file.mode & 0o777) | 0o600)
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
