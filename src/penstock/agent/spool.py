"""Sends a payload's output from the spool to the server, by offset, and keeps it until it is durable there.

`course` makes one `Spool` per attempt and host. The files are written by the keeper (see `keeper`), so nothing is lost
with the agent; the server says after each chunk where the stream stands with it, and that is where the next one begins,
whatever either side forgot. What is durable is cut out of the file again, so that a long log needs little disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.agent.link import Link, Refused, Silent
from penstock.agent.pump import punch
from penstock.domain import limits
from penstock.wire.agent import LogAck

logger = logging.getLogger(__name__)

FREED_BYTES = 16 << 20  #: durable bytes are cut out of a spool file in steps of this
RETRY_FIRST_S, RETRY_MAX_S = 0.1, 5.0


class Stream:
    """One file and how far it got."""

    def __init__(self, name: str, path: Path, durable: int) -> None:
        self.name, self.path = name, path
        self.sent = self.durable = durable
        self.freed = _hole(path)  #: no longer in the file: it was durable
        self.asked = False  #: whether the server said where the stream stands with it
        self.refused = ""  #: the server will not have the rest

    @property
    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def read(self) -> bytes:
        """What comes next, at most one chunk."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, limits.LOG_CHUNK_BYTES, self.sent)
        finally:
            os.close(fd)

    def take(self, ack: LogAck) -> None:
        """The server's word on where the stream stands counts, also when that is behind what was sent."""
        self.asked = True
        self.durable = max(self.durable, ack.durable)
        self.sent = ack.received
        if self.durable - self.freed >= FREED_BYTES:
            punch(str(self.path), self.durable)
            self.freed = self.durable


def _hole(path: Path) -> int:
    """How much of the beginning of a file was cut out."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        return os.lseek(fd, 0, os.SEEK_DATA)
    except OSError:  # empty, or nothing but a hole
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


class Spool:
    """The output of one attempt on one host."""

    def __init__(
        self, link: Link, attempt: str, rank: int, files: Mapping[str, Path], durable: Mapping[str, int]
    ) -> None:
        self._link = link
        self._where = f"/v1/agent/attempts/{attempt}/logs?rank={rank}"
        self.streams = [Stream(name, path, durable.get(name, 0)) for name, path in files.items()]

    @property
    def durable(self) -> dict[str, int]:
        return {stream.name: stream.durable for stream in self.streams}

    @property
    def behind(self) -> bool:
        """Something was written that the server does not have."""
        return any(stream.sent < stream.size and not stream.refused for stream in self.streams)

    @property
    def _unsafe(self) -> list[Stream]:
        """Streams of which something would be lost with the server."""
        return [stream for stream in self.streams if stream.durable < stream.size and not stream.refused]

    async def follow(self) -> None:
        """Send what is written, as it is written, until cancelled."""
        while True:
            await asyncio.sleep(limits.LOG_POLL_S)  # first: what ends sooner is sent at its end
            await self.flush()

    async def flush(self) -> None:
        """Send all that is there now, however long the server is away."""
        rest_s = RETRY_FIRST_S
        while self.behind:
            try:
                for stream in self.streams:
                    if stream.sent < stream.size and not stream.refused:
                        await self._send(stream)
                rest_s = RETRY_FIRST_S
            except Silent:
                await asyncio.sleep(rest_s)
                rest_s = min(2 * rest_s, RETRY_MAX_S)

    async def deliver(self) -> None:
        """Send all, and come back when it is durable there: whoever sees the end finds the log, at any server."""
        rest_s = RETRY_FIRST_S
        while unsafe := self._unsafe:
            try:
                for stream in unsafe:
                    await self._send(stream, last=True)
                if self.behind:  # more than one chunk, or the server forgot some: that comes without a pause
                    continue
                if not self._unsafe:
                    return
            except Silent as silent:
                logger.info("the end of a log is not durable yet: %s", silent)
            await asyncio.sleep(rest_s)
            rest_s = min(2 * rest_s, RETRY_MAX_S)

    def tail(self, most: int = limits.LOG_TAIL_BYTES) -> str:
        """The end of what it wrote, errors last, for whoever finds out why it ended."""
        said = []
        for name in ("log", "out", "err"):
            for stream in self.streams:
                size = stream.size
                if stream.name == name and size:
                    with stream.path.open("rb") as file:
                        file.seek(max(0, size - most // 3))
                        said.append(file.read().decode("utf-8", "replace"))
        return "\n".join(said)

    async def _send(self, stream: Stream, *, last: bool = False) -> None:
        if not stream.asked and stream.freed:  # an agent before this one sent some of it
            await self._post(stream, stream.sent, b"")
        # Bytes that were durable once may have left the file; a server that lost them is told that there is a gap.
        gap = stream.sent < stream.freed
        stream.sent = max(stream.sent, stream.freed)
        data = stream.read() if stream.sent < stream.size else b""
        whole = last and stream.sent + len(data) >= stream.size
        await self._post(stream, stream.sent, data, gap=gap, last=whole)

    async def _post(self, stream: Stream, offset: int, data: bytes, *, gap: bool = False, last: bool = False) -> None:
        path = f"{self._where}&stream={stream.name}&offset={offset}"
        path += ("&gap=true" if gap else "") + ("&last=true" if last else "")
        try:
            answer = await self._link.call("POST", path, data, media="application/octet-stream")
        except Refused as refused:
            if refused.status == 401:  # the credential is being renewed
                raise Silent(str(refused)) from refused
            stream.refused = str(refused)
            return
        stream.take(_ack(answer))


def _ack(answer: bytes) -> LogAck:
    try:
        return msgspec.json.decode(answer, type=LogAck)
    except msgspec.DecodeError as error:
        raise Silent(f"the answer about a log is not what it should be: {error}") from error
