"""Lines of a file, compared with the plan while they are read: each piece between two marks has its hash there.

`formats` reads through it where nothing else says that a file is still the same, as a bucket's tag does. Bytes are
hashed on their way, so nothing is read twice and nothing is kept; a piece that differs is an error before the range of
rows it belongs to is whole, and so before a unit of it can be committed. It must not know what a line means.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO, Final, cast

from typing_extensions import override

from penstock.objects.inputs import Changed

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from penstock.extract.formats import Mark

DIGEST_LETTERS: Final = 32  #: of the SHA-256: half of it tells pieces apart as surely, and plans hold many
_CHUNK_BYTES: Final = 1 << 20


class Pieces(io.RawIOBase):
    """The bytes from the first mark to `end` (None: the file's own)."""

    def __init__(self, inner: BinaryIO, address: str, marks: Sequence[Mark], end: int | None) -> None:
        super().__init__()
        self._inner = cast("io.BufferedIOBase", inner)
        self._address = address
        self._left = list(zip(marks, [*(mark.place for mark in marks[1:]), end], strict=True))
        self._at = marks[0].place
        self._digest = hashlib.sha256()
        inner.seek(self._at)

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: WriteableBuffer) -> int:
        if not self._left:
            return 0
        view = memoryview(buffer).cast("B")
        mark, end = self._left[0]
        if end is not None:
            view = view[: end - self._at]
        count = self._inner.readinto(view)
        self._digest.update(view[:count])
        self._at += count
        if not count or self._at == end:
            if self._digest.hexdigest()[:DIGEST_LETTERS] != mark.digest:
                raise Changed(
                    f"{self._address}: is not the file that the plan was made from: it differs behind row {mark.row}; "
                    "put it back, or make a new run"
                )
            del self._left[0]
            self._digest = hashlib.sha256()
        return count

    def finish(self) -> None:
        """Compare what is left of the last piece too."""
        while self.read(_CHUNK_BYTES):
            pass
