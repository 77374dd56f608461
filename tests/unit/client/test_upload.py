"""Sending snapshots: only what is missing, the manifest last, and what happens when it is cut off."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from typing_extensions import override

from penstock.client import upload
from penstock.client.errors import ApiError
from penstock.client.upload import measure_directory, send, upload_directory, upload_directory_async
from penstock.objects.archive import unpack
from penstock.objects.content import name_of
from penstock.objects.manifest import BadSnapshot, parse
from penstock.objects.snapshots import freeze
from penstock.wire.problems import problem


class Server:
    """Stands in for the client and the server behind it: keeps what it is sent, as the real one would."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.snapshots: dict[str, bytes] = {}
        self.asked: list[int] = []
        self.sent: list[str] = []
        self.fail_after: int | None = None
        self._lock = threading.Lock()

    def missing_blobs(self, hashes: Sequence[str]) -> tuple[str, ...]:
        self.asked.append(len(hashes))
        return tuple(id for id in hashes if id not in self.blobs)

    def put_blob(self, sha256: str, data: bytes) -> None:
        with self._lock:
            if self.fail_after is not None and len(self.sent) >= self.fail_after:
                raise ConnectionError("the line broke")
            assert name_of(data) == sha256
            self.blobs[sha256] = data
            self.sent.append(sha256)

    def put_snapshot(self, sha256: str, data: bytes) -> None:
        manifest = parse(data, sha256)
        assert not {blob.id for blob in manifest.blobs} - set(self.blobs), "a snapshot before its blobs"
        self.snapshots[sha256] = data


class AsyncServer:
    """The same behind coroutines."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def missing_blobs(self, hashes: Sequence[str]) -> tuple[str, ...]:
        return self._server.missing_blobs(hashes)

    async def put_blob(self, sha256: str, data: bytes) -> None:
        self._server.put_blob(sha256, data)

    async def put_snapshot(self, sha256: str, data: bytes) -> None:
        self._server.put_snapshot(sha256, data)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five large files, many small ones, and a state directory of their own."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    root = tmp_path / "tree"
    (root / "code").mkdir(parents=True)
    for number in range(5):
        (root / f"part{number}.bin").write_bytes(bytes([number]) * 100_000)
    for number in range(300):
        (root / "code" / f"m{number}.py").write_text(f"x = {number}\n")
    return root


def test_everything_goes_up_and_comes_back(tree: Path, tmp_path: Path) -> None:
    server = Server()
    id = upload_directory(server, tree)
    unpack(parse(server.snapshots[id], id), server.blobs.__getitem__, tmp_path / "back")
    assert freeze(tmp_path / "back").id == id


def test_a_second_upload_sends_only_what_changed(tree: Path) -> None:
    server = Server()
    upload_directory(server, tree)
    before = len(server.sent)
    upload_directory(server, tree)
    assert len(server.sent) == before
    (tree / "part3.bin").write_bytes(b"!" * 100_000)
    upload_directory(server, tree)
    assert len(server.sent) == before + 1
    (tree / "code" / "m7.py").write_text("x = 'seven'\n")
    upload_directory(server, tree)
    assert len(server.sent) == before + 2  # its pack


def test_an_upload_that_was_cut_off_goes_on(tree: Path) -> None:
    server = Server()
    server.fail_after = 3
    with pytest.raises(ConnectionError):
        upload_directory(server, tree)
    assert not server.snapshots
    server.fail_after = None
    id = upload_directory(server, tree)
    assert id in server.snapshots
    assert len(server.sent) == len(set(server.sent)) == len(server.blobs)


def test_many_blobs_are_asked_about_in_pages(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "ASKED_AT_ONCE", 4)
    server = Server()
    upload_directory(server, tree)
    assert max(server.asked) == 4
    assert sum(server.asked) == len(server.blobs)


def test_a_server_gets_no_other_bytes_than_those_offered(tree: Path) -> None:
    class Greedy(Server):
        @override
        def missing_blobs(self, hashes: Sequence[str]) -> tuple[str, ...]:
            return (*super().missing_blobs(hashes), "../../etc/passwd", "0" * 64, *hashes)

    server = Greedy()
    upload_directory(server, tree)
    assert len(server.sent) == len(server.blobs)


def test_progress_and_notes_are_told(tree: Path) -> None:
    (tree / "data").symlink_to("/mnt/data")
    told: list[str] = []
    notes: list[str] = []
    server = Server()
    upload_directory(server, tree, progress=told.append, note=notes.append)
    assert told[0].startswith("freezing ")
    assert "freezing 502 of 502 kB" in told
    sent = sum(map(len, server.blobs.values()))
    assert told[-1] == f"sending {sent / 1e3:.0f} of {sent / 1e3:.0f} kB"
    assert [note.partition(":")[0] for note in notes] == ["data"]
    assert send(server, freeze(tree)) == 0


def test_a_file_that_changes_before_it_is_sent_fails_the_upload(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.objects.reading.KEPT_BYTES", 0)

    class Slow(Server):
        @override
        def missing_blobs(self, hashes: Sequence[str]) -> tuple[str, ...]:
            (tree / "part1.bin").write_bytes(b"?" * 100_000)
            return super().missing_blobs(hashes)

    server = Slow()
    with pytest.raises(BadSnapshot, match=r"'part1\.bin' changed"):
        upload_directory(server, tree)
    assert not server.snapshots


def test_the_memory_lies_in_the_state_directory(tree: Path, tmp_path: Path) -> None:
    upload_directory(Server(), tree)
    (memory,) = (tmp_path / "home" / "cache" / "snapshots").glob("*.json")
    assert memory.stat().st_mode & 0o077 == 0


def test_measuring_sends_nothing(tree: Path) -> None:
    assert measure_directory(tree) == (305, 500_000 + sum(len(f"x = {number}\n") for number in range(300)))


def test_the_async_way_does_the_same(tree: Path) -> None:
    server = Server()
    id = asyncio.run(upload_directory_async(AsyncServer(server), tree))
    assert upload_directory(server, tree) == id
    assert len(server.sent) == len(server.blobs)


def test_the_async_way_fails_with_the_clients_own_error(tree: Path) -> None:
    server = Server()
    server.fail_after = 2
    with pytest.raises(ConnectionError, match="the line broke"):
        asyncio.run(upload_directory_async(AsyncServer(server), tree))
    assert not server.snapshots


class Cleaned(Server):
    """Says that it has everything, and only finds out with the snapshot that some of it was cleaned away."""

    def __init__(self, gone: dict[str, bytes]) -> None:
        super().__init__()
        self._gone = set(gone)

    @override
    def missing_blobs(self, hashes: Sequence[str]) -> tuple[str, ...]:
        return tuple(id for id in super().missing_blobs(hashes) if id not in self._gone)

    @override
    def put_snapshot(self, sha256: str, data: bytes) -> None:
        if self._gone:
            self._gone = set()
            raise ApiError(problem("conflict", "snapshot: 7 of its blobs were removed since they were asked about"))
        super().put_snapshot(sha256, data)


def test_blobs_that_were_cleaned_away_meanwhile_are_sent_again(tree: Path) -> None:
    first = Server()
    id = upload_directory(first, tree)
    for case in ("sync", "async"):
        server = Cleaned(first.blobs)
        if case == "sync":
            assert upload_directory(server, tree) == id
        else:
            assert asyncio.run(upload_directory_async(AsyncServer(server), tree)) == id
        assert server.blobs == first.blobs
        assert id in server.snapshots


def test_other_refusals_of_a_snapshot_are_told(tree: Path) -> None:
    class Full(Server):
        @override
        def put_snapshot(self, sha256: str, data: bytes) -> None:
            raise ApiError(problem("unavailable", "the disk is full"))

    with pytest.raises(ApiError, match="the disk is full"):
        upload_directory(Full(), tree)
    with pytest.raises(ApiError, match="the disk is full"):
        asyncio.run(upload_directory_async(AsyncServer(Full()), tree))
