"""Reading the files of a working directory into blobs: hashes, packs, chunks, and what was remembered of them.

`snapshots` hands over the files its walk found and gets each one's content hash and blobs. Work is done by a few
threads, a pack or a large file at a time; encoded blobs are kept in memory up to a bound and otherwise made again from
the files when they are sent. A file must be the same before, while and after it is read: anything else is an error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Final, NamedTuple

from penstock.domain import limits
from penstock.objects.content import encode, name_of, packs
from penstock.objects.manifest import BadSnapshot, Blob
from penstock.objects.remembered import Known, Remembered

THREADS: Final = min(8, os.cpu_count() or 1)  #: hashing and compressing release the interpreter's lock
KEPT_BYTES: Final = 128 << 20  #: of encoded blobs, so that a project of the usual size is read once
EMPTY: Final = hashlib.sha256().hexdigest()


class Seen(NamedTuple):
    """A regular file as the walk found it."""

    path: str
    found: os.stat_result


class Piece(NamedTuple):
    """A stretch of a file that a blob was made of."""

    seen: Seen
    offset: int
    size: int


class Content(NamedTuple):
    """A file with its hash and where its bytes are: from `offset` in one blob, or in several whole ones."""

    seen: Seen
    sha256: str
    blobs: tuple[Blob, ...] = ()
    offset: int = 0


class Reader:
    """Reads one directory once; afterwards `blob` makes any of its blobs again."""

    def __init__(self, directory: Path, remembered: Remembered) -> None:
        self.blobs: dict[str, Blob] = {}
        self.read_bytes = 0  #: content that was read because nothing was remembered of it
        self._directory = directory
        self._remembered = remembered
        self._pieces: dict[str, tuple[Piece, ...]] = {}
        self._kept: dict[str, bytes] = {}
        self._kept_bytes = 0
        self._lock = Lock()

    def read(self, files: list[Seen], tell: Callable[[int], None]) -> Iterator[Content]:
        """Every file's content; `tell` is called with the bytes done so far, from the caller's thread."""
        small = [seen for seen in files if 0 < seen.found.st_size < limits.SNAPSHOT_SMALL_BYTES]
        work = [small[cut.start : cut.stop] for cut in packs([(seen.path, seen.found.st_size) for seen in small])]
        work += [[seen] for seen in files if seen.found.st_size >= limits.SNAPSHOT_SMALL_BYTES]
        yield from (Content(seen, EMPTY) for seen in files if seen.found.st_size == 0)
        done = 0
        with ThreadPoolExecutor(THREADS, "penstock-freeze") as threads:
            for contents in threads.map(self._one, work):
                yield from contents
                done += sum(content.seen.found.st_size for content in contents)
                tell(done)

    def blob(self, id: str) -> bytes:
        """Stored bytes; `BadSnapshot` when the files have changed since they were read."""
        with self._lock:
            kept = self._kept.get(id)
        if kept is not None:
            return kept
        pieces = self._pieces[id]
        stored = encode(b"".join(self._again(piece) for piece in pieces))
        if name_of(stored) != id:
            raise changed(pieces[0].seen.path)
        return stored

    def _one(self, seen: list[Seen]) -> list[Content]:
        if seen[0].found.st_size < limits.SNAPSHOT_SMALL_BYTES:
            return self._pack(seen)
        return [self._large(seen[0])]

    def _pack(self, seen: list[Seen]) -> list[Content]:
        known = [self._remembered.file(one.path, one.found) for one in seen]
        hashes = [one.sha256 for one in known if one is not None]
        blob = self._remembered.pack(_pack_key(hashes)) if len(hashes) == len(seen) else None
        if blob is None:
            raws = [self._whole(one) for one in seen]
            hashes = [hashlib.sha256(raw).hexdigest() for raw in raws]
            blob = self._made(b"".join(raws))
            for one, sha256 in zip(seen, hashes, strict=True):
                self._remembered.learn(one.path, Known.of(one.found, sha256))
            self._remembered.learn_pack(_pack_key(hashes), blob)
        offset, pieces, contents = 0, [], []
        for one, sha256 in zip(seen, hashes, strict=True):
            contents.append(Content(one, sha256, (blob,), offset))
            pieces.append(Piece(one, 0, one.found.st_size))
            offset += one.found.st_size
        self._add(blob, tuple(pieces))
        return contents

    def _large(self, seen: Seen) -> Content:
        known = self._remembered.file(seen.path, seen.found)
        if known is None:
            digest = hashlib.sha256()
            blobs: list[Blob] = []
            for raw in self._chunks(seen):
                digest.update(raw)
                blobs.append(self._made(raw))
            known = Known.of(seen.found, digest.hexdigest(), tuple(blobs))
            self._remembered.learn(seen.path, known)
        offset = 0
        for blob in known.blobs:
            self._add(blob, (Piece(seen, offset, blob.size),))
            offset += blob.size
        return Content(seen, known.sha256, known.blobs)

    def _made(self, raw: bytes) -> Blob:
        stored = encode(raw)
        blob = Blob(name_of(stored), len(raw), len(stored))
        with self._lock:
            if self._kept_bytes + len(stored) <= KEPT_BYTES and blob.id not in self._kept:
                self._kept[blob.id] = stored
                self._kept_bytes += len(stored)
        return blob

    def _add(self, blob: Blob, pieces: tuple[Piece, ...]) -> None:
        with self._lock:
            self.blobs[blob.id] = blob
            self._pieces.setdefault(blob.id, pieces)

    def _whole(self, seen: Seen) -> bytes:
        return b"".join(self._chunks(seen))

    def _chunks(self, seen: Seen) -> Iterator[bytes]:
        """All of a file in chunks, sure that it stayed as the walk had found it."""
        with _opened(self._directory, seen) as file:
            left = seen.found.st_size
            while left:
                raw = file.read(min(left, limits.SNAPSHOT_CHUNK_BYTES))
                if not raw:
                    raise changed(seen.path)
                left -= len(raw)
                yield raw
            if not _same(os.fstat(file.fileno()), seen.found):
                raise changed(seen.path)
        with self._lock:
            self.read_bytes += seen.found.st_size

    def _again(self, piece: Piece) -> bytes:
        with _opened(self._directory, piece.seen) as file:
            file.seek(piece.offset)
            return file.read(piece.size)


@contextmanager
def _opened(directory: Path, seen: Seen) -> Iterator[BinaryIO]:
    try:
        # What was a file at the walk may be a link or a pipe by now: follow neither, wait for neither.
        handle = os.open(directory / seen.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not _same(os.fstat(handle), seen.found):
                raise changed(seen.path)
            yield file
    except OSError as error:
        raise unreadable(seen.path, error) from error


def changed(path: str) -> BadSnapshot:
    return BadSnapshot(
        "file", path, "changed while it was being read", "wait until its writer is done, or name it in .tpuignore"
    )


def unreadable(path: str, error: OSError) -> BadSnapshot:
    return BadSnapshot(
        "file", path, f"cannot be read: {error.strerror or error}", "make it readable, or name it in .tpuignore"
    )


def _same(now: os.stat_result, then: os.stat_result) -> bool:
    return (now.st_mode, now.st_size, now.st_mtime_ns, now.st_ino) == (
        then.st_mode,
        then.st_size,
        then.st_mtime_ns,
        then.st_ino,
    )


def _pack_key(hashes: list[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()
