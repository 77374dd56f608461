"""What is known of files from the last freeze, so that an unchanged gigabyte is not read again.

One JSON file per directory under `$PENSTOCK_HOME/cache/snapshots`. An entry holds while size, both times and inode are
the same; a file touched so shortly before the freeze that a later change could carry the same time is not remembered,
which is git's rule for racy entries. Losing the file costs time, never correctness. Only `snapshots` calls this.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from penstock.objects.content import CODEC
from penstock.objects.manifest import Blob

#: Kernels stamp files with a clock that ticks every 1 to 10 ms; some file systems keep whole or even seconds only.
TICK_NS: Final = 50_000_000
COARSE_TICK_NS: Final = 2_000_000_000


class Known(msgspec.Struct, frozen=True, array_like=True):
    """A file as last read. `blobs` is empty for small files: those are in packs."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    sha256: str
    blobs: tuple[Blob, ...] = ()

    @classmethod
    def of(cls, found: os.stat_result, sha256: str, blobs: tuple[Blob, ...] = ()) -> Known:
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, sha256, blobs)

    def holds(self, found: os.stat_result) -> bool:
        return (self.size, self.mtime_ns, self.ctime_ns, self.inode) == (
            found.st_size,
            found.st_mtime_ns,
            found.st_ctime_ns,
            found.st_ino,
        )


class _Stored(msgspec.Struct):
    codec: str = CODEC
    directory: str = ""
    files: dict[str, Known] = {}
    packs: dict[str, Blob] = {}


class Remembered:
    """Opened before the first file is read and saved after the last."""

    def __init__(self, folder: Path | None, directory: Path) -> None:
        """`folder` None: nothing is remembered."""
        self._path: Path | None = None
        self._started_ns = 0
        stored = _Stored()
        if folder is not None:
            self._path = folder / (hashlib.sha256(os.fsencode(directory)).hexdigest()[:32] + ".json")
            self._started_ns = _stamp(folder)
            stored = _load(self._path)
        self._stored = stored if (stored.codec, stored.directory) == (CODEC, str(directory)) else _Stored()
        self._fresh = _Stored(directory=str(directory))

    def file(self, path: str, found: os.stat_result) -> Known | None:
        known = self._stored.files.get(path)
        if known is None or not known.holds(found):
            return None
        self._fresh.files[path] = known
        return known

    def learn(self, path: str, known: Known) -> None:
        """Keep what was read, unless the file is so young that a change after the reading might not show."""
        tick = COARSE_TICK_NS if known.ctime_ns % 1_000_000_000 == 0 else TICK_NS
        if known.ctime_ns + tick < self._started_ns:
            self._fresh.files[path] = known

    def pack(self, key: str) -> Blob | None:
        blob = self._stored.packs.get(key)
        if blob is not None:
            self._fresh.packs[key] = blob
        return blob

    def learn_pack(self, key: str, blob: Blob) -> None:
        self._fresh.packs[key] = blob

    def save(self) -> None:
        """Replace the file at once; a full or read-only disk is no reason to fail a submit that went well."""
        if self._path is None or self._fresh == self._stored:
            return
        with contextlib.suppress(OSError):
            _write(self._path, msgspec.json.encode(self._fresh))


def _stamp(folder: Path) -> int:
    """The time now by the clock that stamps files; 0 (believe nothing young) where nothing can be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_ctime_ns
    except OSError:
        return 0


def _load(path: Path) -> _Stored:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Stored)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return _Stored(codec="")


def _write(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
