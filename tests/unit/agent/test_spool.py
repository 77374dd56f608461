"""The spool: every byte arrives once and in order, whatever the server forgets, and leaves the disk only when safe."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from penstock.agent import spool
from penstock.agent.link import Link, Refused, Silent
from penstock.agent.spool import Spool
from penstock.domain import limits
from penstock.wire.agent import LogAck
from penstock.wire.problems import problem


class Book(Link):
    """A server's log of one stream, which can lose its memory and fail at will."""

    def __init__(self) -> None:
        super().__init__("http://nowhere")
        self.log = bytearray()
        self.durable = 0
        self.fates: list[str] = []
        self.gaps: list[int] = []

    @override
    async def call(self, method: str, path: str, body: bytes | Path = b"", **_: object) -> bytes:
        assert isinstance(body, bytes)
        assert len(body) <= limits.LOG_CHUNK_BYTES
        fate = self.fates.pop(0) if self.fates else "fine"
        query = parse_qs(urlsplit(path).query)
        offset = int(query["offset"][0])
        if fate == "down":
            raise Silent("down")
        if fate == "restart":
            del self.log[self.durable :]
        if fate == "refuse":
            raise Refused(problem("gone", "closed"))
        if "gap" in query and offset > len(self.log):
            self.gaps.append(offset - len(self.log))
            self.log += bytes(offset - len(self.log))
        if offset <= len(self.log):
            self.log += body[len(self.log) - offset :]
        if fate == "store" or not body:
            self.durable = len(self.log)
        if fate == "lost reply":
            raise Silent("lost")
        return msgspec.json.encode(LogAck(self.durable, len(self.log)))


def a_spool(book: Book, folder: Path, durable: int = 0) -> Spool:
    return Spool(book, "a1", 0, {"out": folder / "out"}, {"out": durable})


def hurry(patch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_FIRST_S", "RETRY_MAX_S"):
        patch.setattr(spool, name, 0.001)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


FATES = st.lists(st.sampled_from(["fine", "down", "restart", "store", "lost reply"]), max_size=30)


@given(FATES, st.integers(0, 200))
def test_every_byte_arrives_once_and_in_order(fates: list[str], size: int) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LOG_CHUNK_BYTES", 16)
        hurry(patch)
        folder, book = Path(name), Book()
        data = bytes(number % 251 for number in range(size))
        (folder / "out").write_bytes(data)
        book.fates = list(fates)
        asyncio.run(a_spool(book, folder).deliver())
        assert bytes(book.log) == data
        assert book.durable == size


def test_what_the_server_keeps_for_good_leaves_the_disk_and_is_never_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "FREED_BYTES", 1 << 20)
    data = bytes(range(256)) * 8 * 4096
    (tmp_path / "out").write_bytes(data)
    book = Book()
    book.fates = ["store"] * 20
    asyncio.run(a_spool(book, tmp_path).deliver())
    assert bytes(book.log) == data
    assert (tmp_path / "out").stat().st_blocks * 512 <= 2 << 20
    # The next agent starts from an old record; the hole must not travel as zeros.
    with (tmp_path / "out").open("ab") as file:
        file.write(b"more")
    asyncio.run(a_spool(book, tmp_path, durable=0).deliver())
    assert bytes(book.log) == data + b"more"


def test_a_server_that_lost_what_it_had_for_good_is_told_of_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "FREED_BYTES", 1 << 20)
    (tmp_path / "out").write_bytes(b"x" * (4 << 20))
    book = Book()
    book.fates = ["store"] * 20
    asyncio.run(a_spool(book, tmp_path).deliver())
    with (tmp_path / "out").open("ab") as file:
        file.write(b"more")
    fresh = Book()
    asyncio.run(a_spool(fresh, tmp_path).flush())
    assert fresh.gaps
    assert fresh.log.endswith(b"more")


def test_a_refused_stream_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"data")
    book = Book()
    book.fates = ["refuse"]
    mine = a_spool(book, tmp_path)
    asyncio.run(mine.deliver())
    assert not mine.behind


def test_the_tail_ends_with_the_errors(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("out", "err", "log")}
    files["out"].write_bytes(b"o" * 100_000)
    files["err"].write_bytes(b"Traceback\xff")
    mine = Spool(Book(), "a1", 0, files, {})
    tail = mine.tail()
    assert tail.endswith("Traceback\ufffd")
    assert tail.startswith("o")
    assert len(tail) <= limits.LOG_TAIL_BYTES
