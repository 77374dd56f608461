"""The way to the server: HTTP over kept connections, with a time limit on everything.

`loop`, `spool` and `launch` call through one `Link`. An answer is either decoded, or `Refused` (the server understood
and says no), or `Silent` (it could not be reached, or could not answer now): only the second may be tried again as it
is. Every call of the agent may be repeated, so a connection that the server closed while it rested is made anew without
a word; and while the server's name cannot be looked up, the server is sought where it was. It must not decide what to
do about either.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from penstock.domain import limits
from penstock.wire.problems import Problem

T = TypeVar("T")
CONNECT_S = 10.0
LOOKUP_S = 5.0  #: where the address is known: resolvers ask a silent name server for ten seconds and more
IDLE_MAX = 4  #: connections kept: a waiting sync, news, logs, an upload
BYTES_S = 900.0  #: for one upload or download of many bytes
BODY_MAX = 1 << 30
_READ_BYTES = 1 << 20
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class Silent(Exception):
    """The server did not answer, or said that it cannot now."""


class Coming(Silent):
    """The server is at it: what was asked for is on its way, and asking again is not in vain."""


class Refused(Exception):
    """The server understood and said no."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.status} {problem.code}: {problem.detail}")
        self.status = problem.status
        self.problem = problem


class _Stale(Exception):
    """A kept connection turned out to be closed before anything was answered."""


class Connection:
    """One connection, one call at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.used = False

    @property
    def open(self) -> bool:
        return not self._writer.is_closing() and not self._reader.at_eof()

    def close(self) -> None:
        self._writer.close()

    async def exchange(self, head: bytes, body: bytes | Path, into: Path | None) -> tuple[int, bytes, bool]:
        """Status, body, and whether the connection may be used again."""
        try:
            self._writer.write(head)
            await self._send(body)
            line = await self._reader.readline()
        except (ConnectionError, BrokenPipeError) as error:
            raise (_Stale() if self.used else Silent(str(error))) from error
        if not line:
            raise _Stale if self.used else Silent("the server closed the connection")
        self.used = True
        words = line.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise Silent(f"the answer is not HTTP: {line[:100]!r}")
        status = int(words[1])
        headers: dict[bytes, bytes] = {}
        while (line := await self._reader.readline()).strip():
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        if not line:
            raise Silent("the answer ended early")
        data = await self._receive(headers, into if status < 300 else None)
        return status, data, headers.get(b"connection", b"").lower() != b"close"

    async def _send(self, body: bytes | Path) -> None:
        if isinstance(body, bytes):
            self._writer.write(body)
        else:
            with body.open("rb") as file:
                while piece := file.read(_READ_BYTES):
                    self._writer.write(piece)
                    await self._writer.drain()
        await self._writer.drain()

    async def _receive(self, headers: dict[bytes, bytes], into: Path | None) -> bytes:
        """The body: in memory, or in a file and then empty here."""
        pieces: list[bytes] = []
        size = 0
        sink = into.open("wb") if into is not None else None
        try:
            async for piece in self._pieces(headers):
                size += len(piece)
                if sink is not None:
                    sink.write(piece)
                elif size > BODY_MAX:
                    raise Silent(f"the answer has more than {BODY_MAX} bytes")
                else:
                    pieces.append(piece)
        finally:
            if sink is not None:
                sink.close()
        return b"".join(pieces)

    async def _pieces(self, headers: dict[bytes, bytes]) -> Any:
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            while size := int((await self._reader.readline()).split(b";", maxsplit=1)[0], 16):
                yield await self._reader.readexactly(size)
                await self._reader.readline()
            await self._reader.readline()
            return
        left = int(headers.get(b"content-length", b"0"))
        while left:
            piece = await self._reader.read(min(left, _READ_BYTES))
            if not piece:
                raise Silent("the answer ended early")
            left -= len(piece)
            yield piece


class Link:
    """All calls of one agent. `credential` goes with every one once it is known."""

    def __init__(self, url: str, credential: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--server: {url!r} is not an address of a server; give http://HOST:PORT")
        self._tls = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._place = parts.netloc
        self._prefix = parts.path.rstrip("/")
        self._idle: deque[Connection] = deque()
        self._address = ""  #: where the server was found last
        self.credential = credential

    @property
    def host_name(self) -> str:
        """Where the server is: a name, or an address."""
        return self._host

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | Path = b"",
        *,
        media: str = "application/json",
        timeout_s: float = limits.CALL_TIMEOUT_S,
        into: Path | None = None,
    ) -> bytes:
        """The bytes of a good answer; raises `Silent` or `Refused`. `into`: write them to that file instead."""
        size = len(body) if isinstance(body, bytes) else _size(body)
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._place}\r\nContent-Length: {size}\r\n"
        if size:
            head += f"Content-Type: {media}\r\n"
        if self.credential:
            head += f"Authorization: Bearer {self.credential}\r\n"
        try:
            async with asyncio.timeout(timeout_s):
                status, data = await self._exchange((head + "\r\n").encode(), body, into)
        except TimeoutError as error:
            raise Silent(f"no answer within {timeout_s:g} s") from error
        except (OSError, EOFError, ValueError) as error:
            raise Silent(f"{type(error).__name__}: {error}") from error
        if status < 300:
            return data
        problem = _problem(status, data)
        if problem.code == "copying":
            raise Coming(problem.detail)
        if status in _AGAIN:
            raise Silent(f"{problem.status} {problem.code}: {problem.detail}")
        raise Refused(problem)

    async def ask(
        self, method: str, path: str, sent: object, answer: type[T], *, timeout_s: float = limits.CALL_TIMEOUT_S
    ) -> T:
        """A call with a struct each way."""
        body = msgspec.json.encode(sent) if sent is not None else b""
        data = await self.call(method, path, body, timeout_s=timeout_s)
        try:
            return msgspec.json.decode(data, type=answer)
        except msgspec.DecodeError as error:
            raise Silent(f"{path}: the answer is not what it should be: {error}") from error

    async def _exchange(self, head: bytes, body: bytes | Path, into: Path | None) -> tuple[int, bytes]:
        while True:
            connection = await self._connect()
            try:
                status, data, again = await connection.exchange(head, body, into)
            except _Stale:
                connection.close()
                continue  # ends: each round takes a kept one away, and a new one is never stale
            except BaseException:
                connection.close()
                raise
            if again and len(self._idle) < IDLE_MAX:
                self._idle.append(connection)
            else:
                connection.close()
            return status, data

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
            connection.close()
        try:
            async with asyncio.timeout(LOOKUP_S if self._address else CONNECT_S):
                reader, writer = await self._open(self._host)
        except (socket.gaierror, TimeoutError):
            # A host whose name server is gone, or says nothing, must still be able to say so.
            if not self._address:
                raise
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await self._open(self._address)
        if (peer := writer.get_extra_info("peername")) is not None:  # there is none when the server hung up at once
            self._address = peer[0]
        return Connection(reader, writer)

    async def _open(self, where: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = self._host if self._tls else None
        return await asyncio.open_connection(
            where, self._port, ssl=self._tls or None, server_hostname=name, limit=_READ_BYTES
        )


def _size(path: Path) -> int:
    return path.stat().st_size


def _problem(status: int, data: bytes) -> Problem:
    try:
        return msgspec.json.decode(data, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Problem(status=status, code="fault", detail=data[:200].decode("utf-8", "replace"))
