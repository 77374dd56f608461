"""What of a payload's checkpoint directory is finished: looked at again and again while it runs, and when it has ended.

`agent.checkpoints` copies what this says. An entry is never taken under a temporary name. It is taken at once when it
is a directory that got its name after all that is in it was written, or that carries orbax's mark; otherwise when
it rests. It must not read a file's content, nor follow a link.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from penstock.domain import limits
from penstock.domain.admission import BadInput
from penstock.objects.names import parts_of

PENDING_S: Final = 60.0  #: what did not change for so long is not being written
MARK: Final = "_CHECKPOINT_METADATA"  #: orbax writes it before it gives a checkpoint its name
#: Names under which programs write what is not finished: orbax's, those on .tmp and the like, and `tempfile`'s.
TEMPORARY: Final = re.compile(
    r"\.orbax-checkpoint-tmp|\.(tmp|temp|part|partial|incomplete)$|\.tmp[.-]?\w+$|^tmp[a-z0-9_]{8}$"
)


class Changed(Exception):
    """A file was written to, or taken away, while it was read: it will be looked at again."""


class Stamp(msgspec.Struct, frozen=True):
    """One file or folder as a look found it; the same stamp means the same bytes."""

    path: str
    inode: int
    size: int
    mtime_ns: int
    mode: int
    folder: bool = False


class Entry(msgspec.Struct, frozen=True):
    """One name directly in the checkpoint directory, with all that is below."""

    name: str
    inode: int
    stamps: tuple[Stamp, ...]
    unfinished: bool  #: something below has a temporary name
    named_last: bool  #: a directory that carries orbax's mark, or was renamed when all in it was written


# --- looking ---
def entries(folder: Path, refuse: Callable[[str], None]) -> Iterator[Entry]:
    """What is in a checkpoint directory now, temporary names included."""
    try:
        with os.scandir(folder) as found:
            tops = sorted(found, key=lambda each: each.name)
    except FileNotFoundError:
        return
    for top in tops:
        try:
            yield _entry(folder, top.name, refuse)
        except FileNotFoundError:
            continue  # renamed or thrown away under our eyes
        except (BadInput, Changed) as error:
            refuse(str(error))


def _entry(folder: Path, name: str, refuse: Callable[[str], None]) -> Entry:
    own = (folder / name).lstat()
    stamps: list[Stamp] = []
    unfinished = TEMPORARY.search(name) is not None
    if not unfinished:
        for path in _below(folder, name, own, refuse):
            stamps.append(path)
            unfinished = unfinished or any(TEMPORARY.search(part) for part in path.path.split("/")[1:])
            if len(stamps) > limits.CHECKPOINT_FILES_MAX:
                raise Changed(f"checkpoint {name!r}: has more than {limits.CHECKPOINT_FILES_MAX} files, and stays here")
    named_last = any(stamp.path == f"{name}/{MARK}" for stamp in stamps) or _was_renamed(own, stamps)
    return Entry(name, own.st_ino, tuple(stamps), unfinished, named_last)


def _was_renamed(own: os.stat_result, stamps: list[Stamp]) -> bool:
    """A rename stamps the directory itself, later than the last name in it was made; who writes on shows in a file."""
    return (
        stat.S_ISDIR(own.st_mode)
        and own.st_ctime_ns > own.st_mtime_ns
        and all(stamp.mtime_ns <= own.st_ctime_ns for stamp in stamps)
    )


def _below(folder: Path, name: str, own: os.stat_result, refuse: Callable[[str], None]) -> Iterator[Stamp]:
    parts_of(name)
    if not (stat.S_ISREG(own.st_mode) or stat.S_ISDIR(own.st_mode)):
        raise Changed(f"checkpoint {name!r}: is neither a file nor a folder, and stays here")
    yield stamp_of(name, own)
    if not stat.S_ISDIR(own.st_mode):
        return
    for here, folders, files in os.walk(folder / name, followlinks=False):
        for each in (*folders, *files):
            path = Path(here, each)
            relative = path.relative_to(folder).as_posix()
            parts_of(relative)
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
                yield stamp_of(relative, found)
            else:
                refuse(f"checkpoint {relative!r}: is no plain file, and stays here")


def stamp_of(path: str, found: os.stat_result) -> Stamp:
    if stat.S_ISDIR(found.st_mode):  # its times change with what is in it, which has stamps of its own
        return Stamp(path, found.st_ino, 0, 0, stat.S_IMODE(found.st_mode), folder=True)
    return Stamp(path, found.st_ino, found.st_size, found.st_mtime_ns, stat.S_IMODE(found.st_mode))


class Looks:
    """What one look after another says of what is finished."""

    def __init__(
        self, folder: Path, refuse: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._refuse, self._clock = folder, refuse, clock
        self._rests: dict[str, tuple[tuple[Stamp, ...], float]] = {}  #: name -> as it is, since when
        self._temporary: set[int] = set()  #: inodes seen under a temporary name

    def look(self, *, ended: bool = False) -> tuple[dict[str, Entry], bool]:
        """The finished entries, and whether others are being written.

        `ended`: the payload left by itself, so that all it left under a name that is not temporary is finished.
        """
        now = self._clock()
        ready: dict[str, Entry] = {}
        pending = False
        rests, self._rests = self._rests, {}
        for entry in entries(self._folder, self._refuse):
            stamps, since = rests.get(entry.name, ((), now))
            since = since if stamps == entry.stamps and stamps else now
            self._rests[entry.name] = (entry.stamps, since)
            if entry.unfinished:
                self._temporary.add(entry.inode)
                pending = pending or self._is_young(entry.name)
            elif (
                ended or entry.named_last or entry.inode in self._temporary or now - since >= limits.CHECKPOINT_SETTLE_S
            ):
                ready[entry.name] = entry
            else:
                pending = pending or now - since < PENDING_S
        return ready, pending

    def _is_young(self, name: str) -> bool:
        """Whether something below a temporary name was written to lately, by the clock that stamps files."""
        newest = 0.0
        for here, _, files in os.walk(self._folder / name, followlinks=False):
            for each in ("", *files):
                try:
                    newest = max(newest, Path(here, each).lstat().st_mtime)
                except FileNotFoundError:
                    continue
        return time.time() - newest < PENDING_S  # noqa: TID251 (files carry the time of this machine)
