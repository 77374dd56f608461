"""The hosts' name server, asked by hand: what it knows, what it denies, and what it does not answer."""

from __future__ import annotations

import socket
import struct

import pytest

from penstock.emulator.vm_names import NameServer

A, AAAA = 1, 28
SERVER = NameServer({"Penstock.internal": "10.0.0.7"})


def asked(name: str, kind: int = A, *, flags: int = 0x0100, questions: int = 1) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack(">HHHHHH", 77, flags, questions, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


def told(question: bytes) -> tuple[int, list[str]]:
    """The code of a reply, and its addresses."""
    answer = SERVER.answer(question)
    number, flags, questions, answers, *_ = struct.unpack_from(">HHHHHH", answer)
    assert (number, flags & 0x8180, questions) == (77, 0x8180, 1)
    assert answer[12 : len(question)] == question[12:]
    rest = answer[len(question) :]
    assert len(rest) == 16 * answers
    return flags & 0xF, [socket.inet_ntoa(rest[at + 12 : at + 16]) for at in range(0, len(rest), 16)]


def test_a_name_has_its_address_in_whatever_letters_and_no_other_kind_of_it() -> None:
    assert told(asked("penstock.internal")) == (0, ["10.0.0.7"])
    assert told(asked("PENSTOCK.Internal")) == (0, ["10.0.0.7"])
    assert told(asked("penstock.internal", AAAA)) == (0, [])


def test_any_other_name_does_not_exist() -> None:
    assert told(asked("example.org")) == (3, [])
    assert told(asked("x.penstock.internal")) == (3, [])


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\0" * 11,
        asked("a", flags=0x8180),  # a reply
        asked("a", questions=2),
        asked("a")[:-1],
        struct.pack(">HHHHHH", 1, 0, 1, 0, 0, 0) + b"\xc0\x0c\0\1\0\1",  # a name that points at itself
        struct.pack(">HHHHHH", 1, 0, 1, 0, 0, 0) + b"\x3fabc",
    ],
)
def test_what_is_no_question_gets_no_answer(bad: bytes) -> None:
    assert SERVER.answer(bad) == b""
