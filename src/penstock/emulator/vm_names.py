"""The name server of the emulated hosts: knows the names that `tpu emulator --name` gave, and says of all others that
they do not exist.

`vm_hosts` serves it at the address where machines of Compute Engine find theirs. A name has one IPv4 address. It asks
nobody else, so that names are no way out of the hosts' network.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping
from typing import Final, cast

from typing_extensions import override

NAME_SERVER: Final = "169.254.169.254"
NAME_PORT: Final = 53
_HEAD: Final = struct.Struct(">HHHHHH")
_QUESTION: Final = struct.Struct(">HH")
_ANSWER: Final = struct.Struct(">HHHIH4s")
_A, _INTERNET = 1, 1
_REPLY, _RECURSION_ASKED, _RECURSION_THERE, _UNKNOWN = 0x8000, 0x0100, 0x0080, 3
_TO_THE_QUESTION: Final = 0xC000 + _HEAD.size  #: an answer's name is the question's
_LIVES_S: Final = 30


class NameServer(asyncio.DatagramProtocol):
    """One question, one answer."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = {name.lower().rstrip("."): socket.inet_aton(address) for name, address in known.items()}
        self._line: asyncio.DatagramTransport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._line = cast("asyncio.DatagramTransport", transport)  # uvloop's is one without saying so

    @override
    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self.answer(data)
        if answer and self._line is not None:
            self._line.sendto(answer, addr)

    def answer(self, data: bytes) -> bytes:
        """The reply to a question; nothing to what is none."""
        if len(data) < _HEAD.size:
            return b""
        number, flags, questions, *_ = _HEAD.unpack_from(data)
        end = _name_end(data)
        if flags & _REPLY or questions != 1 or end is None or len(data) < end + _QUESTION.size:
            return b""
        name = b".".join(_labels(data[_HEAD.size : end])).decode("ascii", "replace").lower()
        kind, net = _QUESTION.unpack_from(data, end)
        address = self._known.get(name)
        found = b""
        if address is not None and (kind, net) == (_A, _INTERNET):
            found = _ANSWER.pack(_TO_THE_QUESTION, _A, _INTERNET, _LIVES_S, len(address), address)
        said = _REPLY | flags & _RECURSION_ASKED | _RECURSION_THERE | (0 if address is not None else _UNKNOWN)
        return _HEAD.pack(number, said, 1, 1 if found else 0, 0, 0) + data[_HEAD.size : end + _QUESTION.size] + found


def _name_end(data: bytes) -> int | None:
    """Where the question's name ends; None if it does not, or is one that no question has."""
    at = _HEAD.size
    while at < len(data) and 0 < data[at] < 64:
        at += data[at] + 1
    return at + 1 if at < len(data) and data[at] == 0 else None


def _labels(name: bytes) -> list[bytes]:
    found: list[bytes] = []
    while name and name[0]:
        found.append(name[1 : name[0] + 1])
        name = name[name[0] + 1 :]
    return found
