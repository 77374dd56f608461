"""Copies of a payload's checkpoints to the bucket: while it runs, and when it ends.

`course` follows a running payload with `Copies`, only where this host reaches the root through the server alone (ADR
0019); what JAX compiled goes the same way. A copy is a list of files by pieces, sent last, so that there is a whole
checkpoint or none; `restoring` brings it back. What is finished is said by `checkpoint_looks`; while it is sent, hard
links hold it, so that a payload may throw it away meanwhile. It must not read anything but plain files, nor follow a
link.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import shutil
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from penstock.agent.checkpoint_looks import Changed, Entry, Looks, Stamp, entries, stamp_of
from penstock.agent.link import BYTES_S, Coming, Link, Refused, Silent
from penstock.domain import limits
from penstock.domain.custody import Launch
from penstock.wire.agent import PiecesQuery, PiecesReply, Saved, SavedFile

logger = logging.getLogger(__name__)

T = TypeVar("T")
AT_ONCE: Final = 4  #: pieces under way
RETRY_FIRST_S, RETRY_MAX_S = 0.1, 5.0
LOOK_MAX_S: Final = 30.0
LAST_LOOKS: Final = 5  #: after the payload's end: nobody writes any more, so the second finds nothing new
COMPILED_S: Final = 60.0  #: between two copies of what JAX compiled: only time is lost with it
COMPILED_LAST_S: Final = 30.0  #: for the last of it
WHOLE: Final = ".whole"  #: says of the links of a round that all of them are there


class TooSilent(Exception):
    """The server did not answer for longer than somebody would wait."""


# --- copying ---
class Copies:
    """The checkpoints of one attempt on one host, on their way to the bucket; `compiled`: what JAX compiled instead.

    A host of a `gang` says so before it has anything to copy, and again when it begins to save: what the others copied
    counts only with its share.
    """

    def __init__(
        self,
        link: Link,
        attempt: str,
        folder: Path,
        pins: Path,
        say: Callable[[str], None],
        *,
        gang: bool = False,
        compiled: bool = False,
    ) -> None:
        self._gang, self._compiled = gang, compiled
        self._link, self._folder, self._tell = link, folder, say
        self._places, self._pins = pins, pins  #: of all rounds, and of this one
        self._rounds = 0
        self._turn = asyncio.Lock()  #: a round that was cut off lets go of its links before the next begins
        self._where = f"/v1/agent/attempts/{attempt}/checkpoints"
        self._kind = "?kind=compiled" if compiled else ""
        self._left: tuple[Path, list[Entry]] = (pins, [])  #: links of an agent before this one, and all they hold
        self._looks = Looks(folder, self._say_once)
        self._look_s = 0.0  #: how long the last look took
        self._said: set[str] = set()
        self._saved: Saved | None = None  #: what counts in the bucket; None: not asked yet
        self._known: dict[str, tuple[Stamp, SavedFile]] = {}
        self._over = False  #: the server will have no more of it

    @property
    def anything(self) -> bool:
        """Whether there is anything on this disk that may have to be copied."""
        return _has_entries(self._folder) or _has_entries(self._places)

    async def follow(self) -> None:
        """Copy what is finished, as it gets finished, until cancelled."""
        while not self._over:
            # A directory that takes long to look through is looked through less often.
            look_s = COMPILED_S if self._compiled else limits.CHECKPOINT_LOOK_S
            await asyncio.sleep(max(look_s, min(LOOK_MAX_S, 4 * self._look_s)))
            await self._look_and_copy()

    async def finish(self, *, by_itself: bool) -> None:
        """Copy the last of it: the payload's processes are gone. It goes on for as long as the server is away."""
        if self._saved is None and not self.anything:
            return
        for _ in range(LAST_LOOKS):
            if self._over or not await self._look_and_copy(ended=by_itself):
                return

    async def _look_and_copy(self, *, ended: bool = False) -> bool:
        """Whether there was anything new."""
        before = time.monotonic()
        ready, pending = await asyncio.to_thread(lambda: self._looks.look(ended=ended))
        self._look_s = time.monotonic() - before
        if not ready and self._saved is None and not self._gang and not _has_entries(self._places):
            return False
        try:
            async with self._turn:
                return await self._copy(ready, pending)
        except Changed as changed:
            logger.info("%s: it is looked at again", changed)
            return True
        except Refused as refused:
            self._over = True
            self._say_once(f"checkpoints are no longer copied: {refused}")
            return False
        except OSError as error:
            self._say_once(f"checkpoints cannot be copied: {error}")
            return False

    async def _copy(self, ready: dict[str, Entry], pending: bool) -> bool:
        if self._saved is None:
            self._saved = await self._patiently(
                lambda: self._link.ask("GET", f"{self._where}{self._kind}", None, Saved)
            )
            self._left = await asyncio.to_thread(self._inherit)
            await asyncio.to_thread(self._recall, [*ready.values(), *self._left[1]])
        if ready:
            self._left = self._left[0], []  # what came after it counts
        held = {entry.name for entry in self._left[1]}
        fresh = [entry for entry in ready.values() if not self._has(entry)]
        fresh_left = [entry for entry in self._left[1] if not self._has(entry)]
        vanished = set() if self._compiled else _tops(self._saved) - held - set(os.listdir(self._folder))  # noqa: PTH208
        news = self._gang and (self._saved.number == 0 or self._begins())
        if not fresh and not fresh_left and not news and (pending or not vanished):
            return False  # what went may have made room for what is still being written: until then it is kept
        if pending and not fresh:
            vanished = set()
        if fresh_left:
            self._pins = self._left[0]
            await asyncio.to_thread(self._cut, fresh_left)
            await self._commit(fresh_left, None, vanished)
            return True
        self._rounds += 1
        # A folder for each round: the thread of one that was cut off may still be at work.
        self._pins = self._places / f"{os.getpid()}-{self._rounds}"
        try:
            await asyncio.to_thread(self._pin, fresh)
            await asyncio.to_thread(self._cut, fresh)
            await self._commit(fresh, ready, vanished)
        finally:
            await asyncio.to_thread(self._unpin)
        return True

    def _begins(self) -> bool:
        assert self._saved is not None
        return not self._saved.writing and _has_entries(self._folder)

    def _inherit(self) -> tuple[Path, list[Entry]]:
        """What an agent before this one held whole when it was killed, and the payload has thrown away since.

        With nothing newer on the disk it is the payload's last checkpoint. All other links go.
        """
        here = set(os.listdir(self._folder))  # noqa: PTH208
        found: tuple[Path, list[Entry]] = (self._places, [])
        for place in sorted(self._places.iterdir()) if self._places.is_dir() else ():
            if place.suffix == WHOLE:
                links = place.with_suffix("")
                held = [each for each in entries(links, self._say_once) if each.name not in here]
                found = (links, held) if held else found
        for place in list(self._places.iterdir()) if self._places.is_dir() else ():
            if place.suffix != WHOLE and place != found[0]:
                shutil.rmtree(place, ignore_errors=True)
                place.with_suffix(WHOLE).unlink(missing_ok=True)
        return found

    def _unpin(self) -> None:
        self._pins.with_suffix(WHOLE).unlink(missing_ok=True)
        shutil.rmtree(self._pins, ignore_errors=True)

    def _has(self, entry: Entry) -> bool:
        """Whether the bucket has an entry exactly as it is now."""
        assert self._saved is not None
        there = {file.path: file for file in self._saved.files if file.path.split("/")[0] == entry.name}
        files = [stamp for stamp in entry.stamps if not stamp.folder]
        return (
            len(files) == len(there)
            and (bool(files) or entry.name in self._saved.folders)
            and all(stamp.path in there and self._same(stamp, there[stamp.path]) for stamp in files)
        )

    def _same(self, stamp: Stamp, file: SavedFile) -> bool:
        known = self._known.get(stamp.path)
        return known is not None and known == (stamp, file)

    def _recall(self, found: Sequence[Entry]) -> None:
        """After a killed agent: files that are in the bucket with their size and time need not be read again."""
        assert self._saved is not None
        there = {file.path: file for file in self._saved.files}
        for entry in found:
            for stamp in entry.stamps:
                file = there.get(stamp.path)
                if file is not None and (file.size, file.mtime_ns) == (stamp.size, stamp.mtime_ns):
                    self._known[stamp.path] = (stamp, file)

    def _pin(self, fresh: Sequence[Entry]) -> None:
        """Hold files by links of our own, as they were when they were looked at."""
        self._unpin()
        for entry in fresh:
            for stamp in entry.stamps:
                pin = self._pins / stamp.path
                if stamp.folder:
                    pin.mkdir(parents=True, exist_ok=True)
                    continue
                pin.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(self._folder / stamp.path, pin, follow_symlinks=False)
                    found = pin.lstat()
                except FileNotFoundError as error:
                    raise Changed(f"checkpoint {stamp.path!r} went away") from error
                if not stat.S_ISREG(found.st_mode) or stamp_of(stamp.path, found) != stamp:
                    raise Changed(f"checkpoint {stamp.path!r} changed")
        if fresh and not self._compiled:
            self._pins.with_suffix(WHOLE).touch()

    def _cut(self, fresh: Sequence[Entry]) -> None:
        """The hashes of all pieces."""
        for stamp in _files(fresh):
            known = self._known.get(stamp.path)
            if known is not None and known[0] == stamp:
                continue
            names = [
                hashlib.sha256(self._read(stamp, number)).hexdigest()
                for number in range(-(-stamp.size // limits.CHECKPOINT_PIECE_BYTES))
            ]
            if stamp_of(stamp.path, (self._pins / stamp.path).lstat()) != stamp:
                raise Changed(f"checkpoint {stamp.path!r} changed")
            file = SavedFile(stamp.path, stamp.size, stamp.mode & 0o777, stamp.mtime_ns, tuple(names))
            self._known[stamp.path] = (stamp, file)

    def _read(self, stamp: Stamp, number: int) -> bytes:
        fd = os.open(self._pins / stamp.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size = limits.CHECKPOINT_PIECE_BYTES
            data = os.pread(fd, size, number * size)
        finally:
            os.close(fd)
        if len(data) != min(size, stamp.size - number * size):
            raise Changed(f"checkpoint {stamp.path!r} changed")
        return data

    async def _commit(self, fresh: Sequence[Entry], ready: dict[str, Entry] | None, vanished: set[str]) -> None:
        """Send what is missing, then the list: with it the copy counts. `ready`: all that is finished on the disk."""
        while True:
            saved = self._next(fresh, vanished)
            await self._send_missing(fresh)
            try:
                await self._patiently(
                    lambda: self._link.call(
                        "PUT",
                        f"{self._where}{self._kind}",
                        msgspec.json.encode(saved),  # noqa: B023 (awaited here)
                        timeout_s=BYTES_S,
                    )
                )
            except Refused as refused:
                if refused.problem.field == "pieces":  # cleared away since we asked: unchanged entries are sent as well
                    self._saved = Saved(number=saved.number - 1, writing=saved.writing)
                    if ready is not None:
                        fresh = list(ready.values())
                        await asyncio.to_thread(self._pin, fresh)
                        await asyncio.to_thread(self._cut, fresh)
                elif refused.problem.field == "number":  # a call of an agent before this one came late
                    self._saved = await self._patiently(
                        lambda: self._link.ask("GET", f"{self._where}{self._kind}", None, Saved)
                    )
                else:
                    raise
            else:
                self._saved = saved
                there = {file.path for file in saved.files}
                self._known = {path: known for path, known in self._known.items() if path in there}
                return

    def _next(self, fresh: Sequence[Entry], vanished: set[str]) -> Saved:
        """All that the bucket has and the disk still has, with what is new in the place of what was before."""
        assert self._saved is not None
        gone = vanished | {entry.name for entry in fresh}
        stays = tuple(file for file in self._saved.files if file.path.split("/")[0] not in gone)
        folders = [path for path in self._saved.folders if path.split("/")[0] not in gone]
        folders += [stamp.path for entry in fresh for stamp in entry.stamps if stamp.folder]
        files = (*stays, *(self._known[stamp.path][1] for stamp in _files(fresh)))
        writing = self._saved.writing or bool(files) or _has_entries(self._folder)
        return Saved(number=self._saved.number + 1, files=files, folders=tuple(folders), writing=writing)

    async def _send_missing(self, fresh: Sequence[Entry]) -> None:
        pieces = {
            name: (stamp, number)
            for stamp in _files(fresh)
            for number, name in enumerate(self._known[stamp.path][1].pieces)
        }
        query = PiecesQuery(tuple(pieces))
        where = f"{self._where}/missing{self._kind}"
        reply = await self._patiently(lambda: self._link.ask("POST", where, query, PiecesReply))

        async def send(name: str) -> None:
            data = await asyncio.to_thread(self._read, *pieces[name])
            await self._patiently(
                lambda: self._link.call(
                    "PUT",
                    f"{self._where}/pieces/{name}{self._kind}",
                    data,
                    media="application/octet-stream",
                    timeout_s=BYTES_S,
                )
            )

        try:
            await some_at_once(send, [name for name in reply.missing if name in pieces])
        except Refused as refused:
            if refused.problem.field == "sha256":
                raise Changed(f"a checkpoint changed while it was read: {refused}") from refused
            raise

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        return await patiently(call)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._tell(text)


class Carried:
    """All that one host carries to the bucket for an attempt: its checkpoints, and what JAX compiled for the job."""

    def __init__(
        self, link: Link, launch: Launch, folder: Path, compiled: Path, pins: Path, say: Callable[[str], None]
    ) -> None:
        self._attempt = launch.attempt
        self._saves = Copies(link, launch.attempt, folder, pins, say, gang=launch.world_size > 1)
        pins = pins.with_name(f"{pins.name}-compiled")
        self._compiled = Copies(link, launch.attempt, compiled, pins, logger.info, compiled=True)

    @property
    def anything(self) -> bool:
        """Whether there are checkpoints on this disk that may have to be copied."""
        return self._saves.anything

    def follow(self) -> tuple[Coroutine[object, object, None], Coroutine[object, object, None]]:
        return self._saves.follow(), self._compiled.follow()

    async def finish(self, *, by_itself: bool) -> None:
        """The last of it. Checkpoints must arrive; of compiled code only time is lost."""
        await self._saves.finish(by_itself=by_itself)
        try:
            await asyncio.wait_for(self._compiled.finish(by_itself=by_itself), COMPILED_LAST_S)
        except (TimeoutError, OSError, Refused) as error:
            logger.warning("attempt %s: what it compiled is not kept: %r", self._attempt, error)


def _has_entries(folder: Path) -> bool:
    try:
        with os.scandir(folder) as found:
            return next(found, None) is not None
    except OSError:
        return False


def _files(fresh: Sequence[Entry]) -> Iterator[Stamp]:
    return (stamp for entry in fresh for stamp in entry.stamps if not stamp.folder)


def _tops(saved: Saved) -> set[str]:
    return {path.split("/")[0] for path in (*(file.path for file in saved.files), *saved.folders)}


# --- calling ---
async def patiently(call: Callable[[], Awaitable[T]], within_s: float = math.inf) -> T:
    """Call until the server answers; raises `Refused` and `TooSilent`. The credential is renewed by others."""
    rest_s, until = RETRY_FIRST_S, time.monotonic() + within_s
    while True:
        try:
            return await call()
        except Refused as refused:
            if refused.status != 401:
                raise
        except Coming:
            until = time.monotonic() + within_s  # it answers, and is at work for us
        except Silent as silent:
            if time.monotonic() >= until:
                raise TooSilent(f"the server did not answer for {within_s:.0f} s: {silent}") from silent
            rest_s = min(2 * rest_s, RETRY_MAX_S)
        await asyncio.sleep(rest_s)


async def some_at_once(do: Callable[[T], Awaitable[None]], what: Sequence[T]) -> None:
    """All of it, a few at a time; the first failure ends the rest."""
    left = iter(what)

    async def one_after_another() -> None:
        for each in left:
            await do(each)

    tasks = [asyncio.ensure_future(one_after_another()) for _ in range(min(AT_ONCE, len(what)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
