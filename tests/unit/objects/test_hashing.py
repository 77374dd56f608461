"""A file's checksum is that of its blocks; it is remembered for as long as nothing about the file has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.domain import ledger
from penstock.objects import hashing

DATA = os.urandom(3 << 20)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(hashing, "REMEMBERED_FROM", 1 << 20)
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def written(path: Path, data: bytes = DATA, *, settled: bool = True) -> Path:
    path.write_bytes(data)
    if settled:
        os.utime(path, ns=(0, 0))
    return path


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which files are read from now on."""
    read: list[Path] = []
    inner = hashing._hashed

    def noted(path: Path) -> tuple[hashing.Identity, str]:
        read.append(path)
        return inner(path)

    monkeypatch.setattr(hashing, "_hashed", noted)
    return read


@pytest.mark.parametrize("size", [0, 1, ledger.BLOCK_BYTES, 2 * ledger.BLOCK_BYTES + 7])
def test_it_is_the_checksum_that_objects_have(size: int, tmp_path: Path, own: dict[str, str]) -> None:
    data = (DATA * (size // len(DATA) + 1))[:size]
    found = hashing.checksum_of_file(written(tmp_path / "a", data), own)
    assert found.startswith(ledger.BLOCKS_KIND)
    assert ledger.matches(data, found)


def test_a_file_that_stays_the_same_is_read_once(
    tmp_path: Path, own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "SETTLED_NS", 0)
    read, path = hashed(monkeypatch), written(tmp_path / "a")
    first = hashing.checksum_of_file(path, own)
    assert hashing.checksum_of_file(path, own) == first
    assert read == [path]
    other = bytearray(DATA)
    other[1_700_000] ^= 1  # in the middle, with the old size and the old date
    written(path, bytes(other))
    assert path.stat().st_mtime_ns == 0
    second = hashing.checksum_of_file(path, own)
    assert second != first
    assert read == [path, path]
    written(tmp_path / "b", DATA).replace(path)
    assert hashing.checksum_of_file(path, own) == first


def test_a_user_without_a_home_remembers_nothing(
    tmp_path: Path, own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    path, read = written(tmp_path / "a"), hashed(monkeypatch)
    assert ledger.matches(DATA, hashing.checksum_of_file(path, {}))
    assert hashing.checksum_of_file(path, {}) == hashing.checksum_of_file(path, own | {"XDG_CACHE_HOME": ""})
    assert len(read) == 3


def test_a_file_that_may_still_be_changing_is_not_remembered(
    tmp_path: Path, own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "SETTLED_NS", 10**18)
    read, path = hashed(monkeypatch), written(tmp_path / "a", settled=False)
    assert hashing.checksum_of_file(path, own) == hashing.checksum_of_file(path, own)
    assert read == [path, path]
    assert not list(hashing.cache(own).glob("*.json"))


def test_a_cache_that_cannot_be_written_or_holds_rubbish_costs_time_only(
    tmp_path: Path, own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "SETTLED_NS", 0)
    path = written(tmp_path / "a")
    right = hashing.checksum_of_file(path, own)
    (note,) = hashing.cache(own).glob("*.json")
    note.write_bytes(b'{"path"')
    assert hashing.checksum_of_file(path, own) == right
    (tmp_path / "file").write_text("no folder")
    assert hashing.checksum_of_file(path, {"XDG_CACHE_HOME": str(tmp_path / "file")}) == right


def test_the_users_cache_folder_is_used() -> None:
    assert hashing.cache({"HOME": "/h"}) == Path("/h/.cache/penstock/checksums")
    assert hashing.cache({"HOME": "/h", "XDG_CACHE_HOME": "/c"}) == Path("/c/penstock/checksums")
