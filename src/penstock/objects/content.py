"""Blobs: how bytes are named, stored and checked, and which small files share one.

A blob is named by the SHA-256 of the bytes as stored, so that whoever holds it (client, server, bucket, host) can check
it without knowing what is inside. Stored bytes open with four that say how the rest is written: `PSR1` plain, `PSZ1`
zstd; what does not shrink by a tenth is stored plain. `snapshots` and `archive` call this; it must not touch files.
"""

from __future__ import annotations

import hashlib
import sys
import zlib
from collections.abc import Sequence
from typing import Final

from penstock.domain import limits

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PLAIN: Final = b"PSR1"
ZSTD: Final = b"PSZ1"
LEVEL: Final = 1  #: twice as fast as the default and within a tenth of its size on source code
SAMPLE_BYTES: Final = 64 << 10
#: Stored bytes are the same as long as this is: caches of blob names belong to it.
CODEC: Final = f"1 zstd {zstd.zstd_version} level {LEVEL}"
#: A pack ends after a path whose checksum is 0 modulo this: packs hold so many files on average.
PACK_FILES: Final = 64


class BadBlob(Exception):
    """Bytes that are not the blob they were taken for.

    `damaged`: they have another hash, so fetching them again may help; else what was sent is itself wrong.
    """

    def __init__(self, blob: str, why: str, *, damaged: bool = False) -> None:
        super().__init__(f"blob {blob[:12]}: {why}")
        self.blob = blob
        self.damaged = damaged


def name_of(stored: bytes) -> str:
    return hashlib.sha256(stored).hexdigest()


def encode(raw: bytes) -> bytes:
    """Stored form. The same bytes give the same form on every machine with the same `CODEC`."""
    if _shrinks(raw[:SAMPLE_BYTES], zstd.compress(raw[:SAMPLE_BYTES], level=LEVEL)):
        packed = zstd.compress(raw, level=LEVEL)
        if _shrinks(raw, packed):
            return ZSTD + packed
    return PLAIN + raw


def decode(blob: str, stored: bytes, size: int) -> bytes:
    """The `size` bytes inside; raises `BadBlob` when the name, the form or the size is not what was said."""
    if name_of(stored) != blob:
        raise BadBlob(blob, "the bytes have another SHA-256 than the name says", damaged=True)
    if size > limits.BLOB_BYTES_MAX:
        raise BadBlob(blob, f"{size} bytes are more than the {limits.BLOB_BYTES_MAX} a blob may hold")
    form, body = stored[:4], stored[4:]
    if form == PLAIN:
        raw = body
    elif form == ZSTD:
        raw = _decompress(blob, body, size)
    else:
        raise BadBlob(blob, f"begins with {form!r}, which is no known form")
    if len(raw) != size:
        raise BadBlob(blob, f"holds {len(raw)} bytes where {size} were declared")
    return raw


def packs(files: Sequence[tuple[str, int]]) -> list[range]:
    """Cut small files (path and size, in order of path) into packs.

    Where a pack ends depends on the path it ends with, not on what came before, so a file that is added, changed or
    removed changes its own pack and, when that was full, a neighbour. Which is why equal trees give equal packs.
    """
    cuts: list[range] = []
    start = total = 0
    for index, (path, size) in enumerate(files):
        if total + size > limits.SNAPSHOT_PACK_BYTES and index > start:
            cuts.append(range(start, index))
            start, total = index, 0
        total += size
        if zlib.crc32(path.encode()) % PACK_FILES == 0:
            cuts.append(range(start, index + 1))
            start, total = index + 1, 0
    if start < len(files):
        cuts.append(range(start, len(files)))
    return cuts


def _shrinks(raw: bytes, packed: bytes) -> bool:
    return len(packed) < len(raw) * 0.9


def _decompress(blob: str, body: bytes, size: int) -> bytes:
    decoder = zstd.ZstdDecompressor()
    try:
        # One byte more than declared is enough to know that a bomb is one.
        raw = decoder.decompress(body, max_length=size + 1)
    except zstd.ZstdError as error:
        raise BadBlob(blob, f"is not what zstd wrote: {error}") from error
    if len(raw) > size:
        raise BadBlob(blob, f"holds more than the {size} bytes declared")
    if not decoder.eof or decoder.unused_data:
        raise BadBlob(blob, "is cut short" if not decoder.eof else "has bytes after its end")
    return raw
