"""The checksum of a whole file of this machine, by several threads, and remembered for as long as the file is the same.

Plans name weights and columnar data by it, and every worker computes it again before it uses them; of several workers
of one machine the first does, and the others read what it found in the user's cache folder. A file counts as the same
while its path, device, inode, size and both times are: the time of change cannot be set by a program, so an edit that
puts the old date back is seen too. Small files are not remembered: hashing them costs less than a file of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from penstock.domain import ledger
from penstock.objects.inputs import Changed

THREADS: Final = 8
REMEMBERED_FROM: Final = 64 << 20  #: bytes
#: A file that was changed so shortly ago may be changed again without another time: then nothing is remembered.
SETTLED_NS: Final = 2_000_000_000
_READ_BYTES: Final = 1 << 20


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """What does not stay the same when a file is written to or replaced."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class _Remembered(msgspec.Struct, frozen=True):
    path: str
    identity: Identity
    checksum: str


def identity(file: int | Path) -> Identity:
    """Of an open file (its descriptor) or of what a path leads to now."""
    found = os.stat(file)  # noqa: PTH116 (a descriptor has no path)
    return Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def checksum_of_file(path: Path, environment: Mapping[str, str] = os.environ) -> str:
    """As `ledger.checksum_of_blocks` has it."""
    if path.stat().st_size < REMEMBERED_FROM:
        return _hashed(path)[1]
    note = cache(environment) / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    with _one_at_a_time(note):
        kept = _recall(note)
        if kept is not None and (kept.path, kept.identity) == (str(path), identity(path)):
            return kept.checksum
        found, checksum = _hashed(path)
        _remember(note, _Remembered(str(path), found, checksum))
    return checksum


def cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Where checksums are remembered on this machine; for a user without a home a place that cannot be written to."""
    own = environment.get("XDG_CACHE_HOME")
    above = Path(own) if own else Path(environment.get("HOME") or "~") / ".cache"
    try:
        above = above.expanduser()
    except RuntimeError:
        above = Path(os.devnull)
    return above / "penstock" / "checksums"


def _hashed(path: Path) -> tuple[Identity, str]:
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(THREADS, "penstock-hash") as threads:
        before = identity(file.fileno())
        buffers = threading.local()

        def digest(start: int) -> bytes:
            if not hasattr(buffers, "own"):
                buffers.own = memoryview(bytearray(_READ_BYTES))
            found, stop = hashlib.sha256(), min(start + ledger.BLOCK_BYTES, before.size)
            while start < stop:
                count = os.preadv(file.fileno(), [buffers.own[: stop - start]], start)
                if not count:
                    raise Changed(f"{path}: was shortened while it was read")
                found.update(buffers.own[:count])
                start += count
            return found.digest()

        checksum = ledger.checksum_of_blocks(threads.map(digest, range(0, before.size, ledger.BLOCK_BYTES)))
        if identity(file.fileno()) != before:
            raise Changed(f"{path}: was changed while it was read")
    return before, checksum


def _recall(note: Path) -> _Remembered | None:
    try:
        return msgspec.json.decode(note.read_bytes(), type=_Remembered)
    except (OSError, msgspec.DecodeError):  # not there yet, or left half by a machine that fell over
        return None


def _remember(note: Path, found: _Remembered) -> None:
    fresh = note.with_name(f".{note.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # whoever cannot remember has to hash again: slower, and as right
        fresh.write_bytes(msgspec.json.encode(found))
        written = fresh.stat().st_mtime_ns
        if written - max(found.identity.modified_ns, found.identity.changed_ns) >= SETTLED_NS:
            fresh.replace(note)
        else:
            fresh.unlink()


@contextlib.contextmanager
def _one_at_a_time(note: Path) -> Iterator[None]:
    """Workers that start together: one hashes, the others wait for what it finds."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a home that cannot be written to: each hashes for itself
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = stack.enter_context(note.with_suffix(".lock").open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
