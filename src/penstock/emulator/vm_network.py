"""The network of the emulated hosts: a namespace of its own, where 127.0.0.0/8 is theirs and nothing leads out but ways
that were opened.

`vm_hosts` starts hosts inside it and serves their metadata there. A way is a listener inside, at the same address and
port as a server outside, whose connections are passed on; so a host sees the server at the address that its startup
script names. It needs root: a process that has threads cannot make a network for itself otherwise.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final

_CLONE_NEWNET: Final = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_SIOCSIFADDR, _SIOCSIFNETMASK = 0x8916, 0x891C
_CHUNK: Final = 64 * 1024

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


class NoNetwork(Exception):
    """This machine does not let us make a network for hosts."""


class HostNetwork:
    """One namespace. A thread lives in it, because only a thread can enter one without the rest of the process."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._doors: dict[str, asyncio.Server] = {}  #: from this machine to a host, by its address
        self._lines: list[asyncio.DatagramTransport] = []
        ready: Future[int] = Future()
        self._thread = threading.Thread(target=self._live, args=(ready,), name="host-network", daemon=True)
        self._thread.start()
        self.descriptor = ready.result()  #: of the namespace, for those who are to enter it

    def close(self) -> None:
        for server in (*self._servers.values(), *self._doors.values()):
            server.close()
        for line in self._lines:
            line.close()
        self._servers.clear()
        self._doors.clear()
        self._lines.clear()
        self._asked.put(None)
        self._thread.join()
        os.close(self.descriptor)

    async def listen(self, address: str, port: int, serve: Serve) -> None:
        """Serve at an address inside; once is enough."""
        if (address, port) in self._servers:
            return
        listener = self._inside(lambda: _listener(address, port))
        self._servers[address, port] = await asyncio.start_server(serve, sock=listener)

    def unlisten(self, address: str, port: int) -> None:
        server = self._servers.pop((address, port), None)
        if server is not None:
            server.close()

    async def answer_datagrams(self, address: str, port: int, protocol: asyncio.DatagramProtocol) -> None:
        """Answer datagrams at an address inside that need not be of the loopback."""
        line = self._inside(lambda: _datagrams(address, port))
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: protocol, sock=line)
        self._lines.append(transport)

    async def open_way(self, address: str, port: int) -> None:
        """Let hosts reach a server outside under its own address."""

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                outer_reader, outer_writer = await asyncio.open_connection(address, port)
            except OSError:
                writer.close()
                return
            await asyncio.gather(_pipe(reader, outer_writer), _pipe(outer_reader, writer))

        await self.listen(address, port, pass_on)

    async def open_door(self, address: str, outside: int, inside: int) -> None:
        """Let this machine reach a host at its address, on a port of our choice; `close_door` ends it."""

        async def pass_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                line = self._inside(lambda: socket.create_connection((address, inside)))
                inner_reader, inner_writer = await asyncio.open_connection(sock=line)
            except OSError:
                writer.close()
                return
            await asyncio.gather(_pipe(reader, inner_writer), _pipe(inner_reader, writer))

        if address not in self._doors:
            self._doors[address] = await asyncio.start_server(pass_in, sock=_listener(address, outside))

    def close_door(self, address: str) -> None:
        server = self._doors.pop(address, None)
        if server is not None:
            server.close()

    def _inside(self, what: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        self._asked.put((what, done))
        return done.result()

    def _live(self, ready: Future[int]) -> None:
        try:
            ready.set_result(_new_network())
        except OSError as error:
            ready.set_exception(NoNetwork(f"a network namespace cannot be made: {error}"))
            return
        while (asked := self._asked.get()) is not None:
            what, done = asked
            try:
                done.set_result(what())
            except OSError as error:
                done.set_exception(error)


def _new_network() -> int:
    """Put this thread into a new namespace with its loopback up; a descriptor of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, asked))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _datagrams(address: str, port: int) -> socket.socket:
    line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for what, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.255")):
        place = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
        fcntl.ioctl(line, what, struct.pack("16s16s", b"lo:1", place))
    line.bind((address, port))
    line.setblocking(False)
    return line


def _listener(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(128)
    listener.setblocking(False)
    return listener


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except (OSError, RuntimeError):  # uvloop's word for a connection that was closed meanwhile is the latter
        writer.close()  # the other side is gone, and both ends of a way go together
