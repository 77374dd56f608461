"""Takes one stream of a payload's output from its pipe into a file: capped, with secrets hidden, never blocking.

`keeper` runs pumps in a process of its own that outlives the agent; `spool` sends the files. Whatever cannot be kept,
because of the cap or the disk, is counted and said in the stream itself (S18). Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import time
from collections.abc import Mapping

READ_BYTES = 1 << 20
PIPE_BYTES = 1 << 20  #: a writer of much output waits less often
MARKER_BYTES = 256  #: of the cap, kept for the line that says what is missing
DRAIN_S = 5.0  #: after the last process of a payload died its pipes end at once; this is for the kernel
HIDDEN_LEAST = 4  #: a shorter "secret" occurs in every text: hiding it would only ruin the log
_KEEP_SIZE_PUNCH_HOLE = 3
_libc = ctypes.CDLL(None, use_errno=True)


class Redactor:
    """Replaces secrets by `***`, also where one is split over several writes."""

    def __init__(self, hidden: list[bytes]) -> None:
        self._hidden = sorted({each for each in hidden if len(each) >= HIDDEN_LEAST}, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._hidden))) if self._hidden else None
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may go out now. The beginning of a secret is held back until the next bytes tell."""
        if self._pattern is None:
            return data
        data = self._held + data
        cut = self._safe(data)
        self._held = data[cut:]
        return self._pattern.sub(b"***", data[:cut])

    def rest(self) -> bytes:
        held, self._held = self._held, b""
        return self._pattern.sub(b"***", held) if self._pattern is not None else held

    def _safe(self, data: bytes) -> int:
        """How many bytes can be judged: none after the first place from which a secret might still be forming."""
        assert self._pattern is not None
        cut = min(self._forming(each, data) for each in self._hidden)
        for match in self._pattern.finditer(data):  # a secret that reaches over the cut waits with it
            if match.start() < cut < match.end():
                return match.start()
        return cut

    @staticmethod
    def _forming(secret: bytes, data: bytes) -> int:
        """Where the end of `data` begins to be the beginning of `secret`; its length when it does not."""
        at = data.find(secret[:1], max(0, len(data) - len(secret) + 1))
        while at >= 0:
            if secret.startswith(data[at:]):
                return at
            at = data.find(secret[:1], at + 1)
        return len(data)


class Pump:
    """One stream: from a pipe into a file, up to a cap, never blocking the writer."""

    def __init__(self, read_fd: int, path: str, cap: int, spare: int, hidden: list[bytes]) -> None:
        self.fd = read_fd
        os.set_blocking(read_fd, False)
        self._path = path
        self._file = -1  #: made with the first byte: most streams of snippets stay empty
        self._redactor = Redactor(hidden)
        try:
            self._size = os.stat(path).st_size  # noqa: PTH116 (as plain as all of this module)
        except FileNotFoundError:
            self._size = 0
        self._cap, self._spare = cap, spare
        self._dropped = 0
        self._room_checked = -READ_BYTES
        self._has_room = True

    def pump(self) -> bool:
        """Take what is there now; False at the end."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return True
        if data:
            self._keep(self._redactor.feed(data))
        return bool(data)

    def drain(self) -> None:
        """All that was written; for when no writer is left, or none that counts."""
        until = time.monotonic() + DRAIN_S
        with contextlib.suppress(BlockingIOError):  # empty, though somebody still holds the other end
            while time.monotonic() < until and (data := os.read(self.fd, READ_BYTES)):
                self._keep(self._redactor.feed(data))
        self._keep(self._redactor.rest())
        self._mark()
        if self._file >= 0:
            os.close(self._file)
        os.close(self.fd)

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        room = max(0, self._cap - MARKER_BYTES - self._size) if self._has_disk() else 0
        if self._dropped and room:
            self._mark()
        self._dropped += len(data) - self._append(data[:room])

    def _mark(self) -> None:
        """Say in the stream itself how much is missing at this place."""
        line = b"\n[penstock: %d bytes of output are missing here: the cap of the stream or the disk was full]\n"
        if self._dropped and self._append(line % self._dropped):
            self._dropped = 0

    def _append(self, data: bytes) -> int:
        """How much of it the disk took."""
        kept = 0
        while kept < len(data):
            try:
                if self._file < 0:
                    self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                kept += os.write(self._file, data[kept:] if kept else data)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
                    raise
                break
        self._size += kept
        return kept

    def _has_disk(self) -> bool:
        """Looked up once per megabyte: a flood must not fill the disk that everything else needs."""
        if self._size + self._dropped - self._room_checked >= READ_BYTES:
            self._room_checked = self._size + self._dropped
            disk = os.statvfs(os.path.dirname(self._path))  # noqa: PTH120
            self._has_room = disk.f_bavail * disk.f_frsize > self._spare
        return self._has_room


def pump_of(reader: int, path: str, order: Mapping[str, object]) -> Pump:
    try:
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:  # beyond what this user may have: the usual 64 KiB do
        os.set_blocking(reader, False)
    hidden = [str(each).encode("utf-8", "surrogateescape") for each in order["hidden"]]  # type: ignore[attr-defined]
    return Pump(reader, path, int(order["cap"]), int(order["spare"]), hidden)  # type: ignore[call-overload]


def punch(path: str, upto: int) -> bool:
    """Give back the disk under the beginning of a file, whose size stays; whether the file system can do that."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        return bool(_libc.fallocate(fd, _KEEP_SIZE_PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(upto)) == 0)
    finally:
        os.close(fd)
