"""Unpacking: hostile manifests are refused whole, nothing is left behind, and what lies there is what was sent."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.domain import limits
from penstock.objects import archive
from penstock.objects.archive import NoRoom, unpack, verify
from penstock.objects.content import PLAIN, BadBlob, encode, name_of
from penstock.objects.manifest import (
    BadSnapshot,
    Blob,
    File,
    Folder,
    Link,
    Manifest,
    parse,
    snapshot_id,
    to_bytes,
)
from penstock.objects.snapshots import freeze
from tests.unit.objects import trees

RAW = b"0123456789" * 10
STORED = encode(RAW)
BLOB = Blob(name_of(STORED), len(RAW), len(STORED))


def file(path: str, **changes: Any) -> File:
    body = RAW[changes.get("offset", 0) :][: changes.get("size", 10)]
    plain: dict[str, Any] = {"mode": 0o644, "size": 10, "sha256": hashlib.sha256(body).hexdigest(), "parts": (0,)}
    return File(path, **(plain | changes))


def manifest(*entries: File | Link | Folder, blobs: tuple[Blob, ...] = (BLOB,)) -> Manifest:
    return Manifest(blobs, entries)


def get_blob(id: str) -> bytes:
    return {BLOB.id: STORED}[id]


def test_the_plain_case_is_unpacked(tmp_path: Path) -> None:
    """The corpus below differs from this in one thing each."""
    good = manifest(Folder("empty"), file("a/b", mode=0o755, offset=90), file("a/c"), Link("l", "a/c"), blobs=(BLOB,))
    good = Manifest(good.blobs, tuple(sorted(good.entries, key=lambda entry: entry.path)))
    unpack(parse(to_bytes(good), snapshot_id(to_bytes(good))), get_blob, tmp_path / "there")
    assert trees.read(tmp_path / "there") == {"a/b": RAW[:10], "a/c": RAW[:10], "empty": None, "l": "a/c"}
    assert (tmp_path / "there/a/b").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "there/a/c").stat().st_mode & 0o7777 == 0o644


LONG = "/".join(["d" * 100] * 11)
HOSTILE: dict[str, tuple[Manifest, str]] = {
    "absolute": (manifest(file("/etc/cron.d/x")), "is empty or absolute"),
    "empty": (manifest(file("")), "is empty or absolute"),
    "climbs": (manifest(file("../x")), "has '..' as a name"),
    "climbs later": (manifest(file("a/../../x")), "has '..' as a name"),
    "ends by climbing": (manifest(file("a/..")), "has '..' as a name"),
    "dot": (manifest(file("./x")), "has '.' as a name"),
    "double slash": (manifest(file("a//x")), "has '' as a name"),
    "ends with a slash": (manifest(file("a/")), "has '' as a name"),
    "nul": (manifest(file("a\0b")), "control or direction marks"),
    "newline": (manifest(file("a\nb")), "control or direction marks"),
    "escape": (manifest(file("\x1b[2Ja")), "control or direction marks"),
    "right to left": (manifest(file("a\u202egpj.sh")), "control or direction marks"),
    "long name": (manifest(file("n" * 256)), "longer than 255 bytes"),
    "long path": (manifest(file(LONG)), "longer than 1024 bytes"),
    "twice": (manifest(file("a"), file("a")), "out of order, or there twice"),
    "unordered": (manifest(file("b"), file("a")), "out of order, or there twice"),
    "unicode twins": (manifest(file("cafe\u0301"), file("caf\u00e9")), "two Unicode forms"),
    "folder twins": (manifest(file("cafe\u0301/a"), file("caf\u00e9/b")), "two Unicode forms"),
    "twin of an ascii name": (manifest(file("K"), file("\u212a")), "two Unicode forms"),
    "file below a file": (manifest(file("a"), file("a/b")), "lies below a file"),
    "file through a link": (manifest(Link("a", "b"), file("a/passwd"), file("b/x")), "lies below a file"),
    "file deep through a link": (manifest(Link("a", "b"), file("a/x/y"), file("b/x/z")), "lies below a file"),
    "link through a link": (manifest(Link("a", "b"), Link("a/c", "d"), file("b/x")), "lies below a file"),
    "folder with content": (manifest(Folder("a"), file("a/b")), "lies below a file"),
    "link out": (manifest(file("a"), Link("l", "../secret")), "leads out"),
    "absolute link": (manifest(file("a"), Link("l", "/etc/passwd")), "leads out"),
    "link deep out": (manifest(file("a"), Link("d/l", "../../x")), "leads out"),
    "link out through a link": (
        manifest(Link("p/q/r/l", "../../../x"), Link("t", "p/q/r/l/../../.."), file("x/a")),
        "leads out",
    ),
    "link circle": (manifest(file("a"), Link("l", "m"), Link("m", "l")), "leads out of the directory, or in a circle"),
    "link to itself": (manifest(file("a"), Link("l", "l")), "in a circle"),
    "empty link": (manifest(file("a"), Link("l", "")), "empty or impossible target"),
    "link with nul": (manifest(file("a"), Link("l", "a\0b")), "empty or impossible target"),
    "long link": (manifest(file("a"), Link("l", "x/" * 600)), "empty or impossible target"),
    "setuid": (manifest(file("a", mode=0o4755)), "neither 0o644 nor 0o755"),
    "sticky": (manifest(file("a", mode=0o1644)), "neither 0o644 nor 0o755"),
    "world writable": (manifest(file("a", mode=0o666)), "neither 0o644 nor 0o755"),
    "device": (manifest(file("a", mode=0o20666)), "neither 0o644 nor 0o755"),
    "negative mode": (manifest(file("a", mode=-1)), "neither 0o644 nor 0o755"),
    "size beyond the blob": (manifest(file("a", size=101)), "does not fit its blobs"),
    "offset beyond the blob": (manifest(file("a", offset=91)), "does not fit its blobs"),
    "no parts": (manifest(file("a", parts=()), file("b")), "does not fit its blobs"),
    "nothing of a part": (manifest(file("a", size=0), file("b")), "does not fit its blobs"),
    "part of several": (manifest(file("a", parts=(0, 0), size=150)), "does not fit its blobs"),
    "offset in several": (manifest(file("a", parts=(0, 0), size=200, offset=1)), "does not fit its blobs"),
    "unknown part": (manifest(file("a", parts=(1,))), "not in the list"),
    "unused blob": (manifest(file("a", size=0, parts=()), blobs=(BLOB,)), "belong to no file"),
    "blob twice": (manifest(file("a", parts=(0, 1), size=200), blobs=(BLOB, BLOB)), "not in order"),
    "empty blob": (manifest(file("a"), blobs=(Blob(BLOB.id, 0, 4),)), "is empty or larger"),
    "giant blob": (manifest(file("a"), blobs=(Blob(BLOB.id, 1 << 40, 4),)), "is empty or larger"),
    "version": (Manifest((BLOB,), (file("a"),), 2), "unknown here"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused_whole(tmp_path: Path, name: str) -> None:
    hostile, why = HOSTILE[name]
    (tmp_path / "secret").write_bytes(b"untouched")
    before = trees.read(tmp_path)
    for act in (
        lambda: unpack(hostile, get_blob, tmp_path / "there"),
        lambda: parse(to_bytes(hostile), snapshot_id(to_bytes(hostile))),
    ):
        with pytest.raises(BadSnapshot, match=why) as caught:
            act()
        assert "\n" not in str(caught.value)
        assert "\x1b" not in str(caught.value)
    assert trees.read(tmp_path) == before


def test_a_million_entries_are_refused_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    many = manifest(*(file(f"{number:07}") for number in range(limits.SNAPSHOT_FILES_MAX + 1)))
    with pytest.raises(BadSnapshot, match="more than the 100000 of one snapshot"):
        parse(to_bytes(many), snapshot_id(to_bytes(many)))
    data = to_bytes(manifest(file("a")))
    monkeypatch.setattr(limits, "SNAPSHOT_MANIFEST_BYTES_MAX", 100)
    with pytest.raises(BadSnapshot, match="100 are the most"):
        parse(data, snapshot_id(data))


def test_tangled_links_do_not_hold_a_host_up() -> None:
    """Each link is two of the one before: followed to the end they are 2^40 names long."""
    links = [Link(f"l{number:02}", f"l{number - 1:02}/../l{number - 1:02}") for number in range(1, 40)]
    with pytest.raises(BadSnapshot, match="in a circle"):
        unpack(manifest(file("a"), Link("l00", "a"), *links), get_blob, Path("/nowhere"))


def test_one_blob_many_times_is_bounded_by_the_size_it_declares(tmp_path: Path) -> None:
    big = Blob(BLOB.id, limits.BLOB_BYTES_MAX, 1000)
    times = limits.SNAPSHOT_BYTES_MAX // big.size + 1
    bomb = manifest(file("a", parts=(0,) * times, size=times * big.size), blobs=(big,))
    with pytest.raises(BadSnapshot, match="bytes are more than"):
        unpack(bomb, get_blob, tmp_path / "there")


CANONICAL = to_bytes(manifest(file("a")))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "cannot be read"),
        (b"[]", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"blobs":[],"entries":[],"version":1,"more":1}', "cannot be read"),
        (b'{"blobs":[],"entries":[{"kind":"device","path":"a"}],"version":1}', "cannot be read"),
        (b'{"blobs":[],"entries":[],"version":1e400}', "cannot be read"),
        (b'{"blobs":[],"entries":[], "version":1}', "not in canonical form"),
        (b'{"version":1,"blobs":[],"entries":[]}', "not in canonical form"),
        (b'{"blobs":[],"entries":[],"version":2,"version":1}', "not in canonical form"),
        (CANONICAL + b"\n", "not in canonical form"),
        (CANONICAL.replace(b'"path":"a"', b'"path":"\\u0061"'), "not in canonical form"),
        (CANONICAL.replace(b'"path":"a"', b'"path":"\\ud800"'), "cannot be read|not in canonical form"),
        (CANONICAL.replace(BLOB.id.encode(), b"../../../../etc/passwd"), "cannot be read"),
        (CANONICAL.replace(BLOB.id.encode(), BLOB.id.encode() + b"\\n"), "cannot be read"),
    ],
)
def test_only_canonical_manifests_are_read(data: bytes, why: str) -> None:
    with pytest.raises(BadSnapshot, match=why):
        parse(data, snapshot_id(data))


def test_the_id_is_the_hash_of_the_manifest() -> None:
    with pytest.raises(BadSnapshot, match="is not the SHA-256"):
        parse(CANONICAL, snapshot_id(b"another"))
    assert json.loads(CANONICAL)["entries"][0]["path"] == "a"


# --- blobs that are not what they should be ---
def unpacked_from(tmp_path: Path, stored: bytes, size: int, **changes: Any) -> None:
    one = manifest(file("a", **changes), blobs=(Blob(name_of(stored), size, len(stored)),))
    unpack(one, lambda id: stored, tmp_path / "there")


def test_wrong_blobs_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(BadSnapshot, match="holds 3 bytes where 100"):
        unpacked_from(tmp_path, PLAIN + b"abc", 100)
    with pytest.raises(BadSnapshot, match="has other content"):
        unpacked_from(tmp_path, STORED, 100, sha256="0" * 64)
    with pytest.raises(BadBlob, match="another SHA-256") as caught:
        unpack(manifest(file("a")), lambda id: STORED + b".", tmp_path / "there")
    assert caught.value.damaged
    with pytest.raises(KeyError):
        unpack(manifest(file("a"), blobs=(Blob("0" * 64, 100, 50),)), get_blob, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_file_of_many_blobs_is_put_together(tmp_path: Path) -> None:
    pieces = [bytes([number]) * 50 for number in range(4)]
    stored = {name_of(encode(piece)): encode(piece) for piece in pieces}
    ids = sorted(stored)
    whole = b"".join(pieces * 2)
    parts = tuple(ids.index(name_of(encode(piece))) for piece in pieces) * 2
    blobs = tuple(Blob(id, 50, len(stored[id])) for id in ids)
    one = manifest(file("a", size=400, parts=parts, sha256=hashlib.sha256(whole).hexdigest()), blobs=blobs)
    unpack(one, lambda id: stored[id], tmp_path / "there")
    assert (tmp_path / "there/a").read_bytes() == whole


# --- the host's side ---
def test_nothing_is_unpacked_over_anything(tmp_path: Path) -> None:
    trees.write(tmp_path / "there", {"a": b"mine"})
    with pytest.raises(FileExistsError):
        unpack(manifest(file("a")), get_blob, tmp_path / "there")
    assert trees.read(tmp_path / "there") == {"a": b"mine"}
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        unpack(manifest(file("a")), get_blob, tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_is_already_there_is_not_written_through(tmp_path: Path) -> None:
    """As on a file system that takes two names as one, or with somebody who plants links meanwhile."""
    (tmp_path / "secret").write_bytes(b"untouched")

    def plant(id: str) -> bytes:
        (tmp_path / "there/a").symlink_to(tmp_path / "secret")
        return STORED

    with pytest.raises(BadSnapshot, match="same as another to this host's file system"):
        unpack(manifest(file("a")), plant, tmp_path / "there")
    assert (tmp_path / "secret").read_bytes() == b"untouched"


def test_a_full_disk_is_told_before_and_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(limits, "HOST_FREE_BYTES", 1 << 60)
        with pytest.raises(NoRoom, match="unpacking needs 10 bytes"):
            unpack(manifest(file("a")), get_blob, tmp_path / "there")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive, "_create", full)
    with pytest.raises(NoRoom, match="became full"):
        unpack(manifest(file("a")), get_blob, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_strict_umask_changes_no_mode(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        unpack(manifest(file("a", mode=0o755)), get_blob, tmp_path / "there")
    finally:
        os.umask(before)
    assert (tmp_path / "there/a").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda root: (root / "a/file").write_bytes(b"y"), "has other content"),
        (lambda root: (root / "a/file").chmod(0o755), "other permissions"),
        (lambda root: (root / "b").unlink(), "is missing"),
        (lambda root: (root / "new").write_bytes(b""), "is there and should not be"),
        (lambda root: (root / "new").mkdir(), "is there and should not be"),
        (lambda root: (root / "empty/new").write_bytes(b""), "is missing|should not be"),
        (lambda root: ((root / "link").unlink(), (root / "link").symlink_to("b")), "not the link"),
        (lambda root: ((root / "link").unlink(), (root / "link").write_bytes(b"")), "not the link"),
        (lambda root: ((root / "a/file").unlink(), (root / "a/file").symlink_to("../b")), "not a file"),
        (lambda root: ((root / "empty").rmdir(), (root / "empty").write_bytes(b"")), "not a folder"),
    ],
)
def test_whatever_differs_from_what_was_sent_is_found(
    tmp_path: Path, change: Callable[[Path], object], why: str
) -> None:
    root = trees.write(tmp_path, {"a/file": b"x", "b": b"x", "empty": None, "link": "a/file"})
    sent = freeze(root).manifest
    verify(sent, root)
    change(root)
    with pytest.raises(BadSnapshot, match=why):
        verify(sent, root)


def test_every_field_of_an_entry_is_checked_on_reading() -> None:
    """A manifest with any one value of the wrong kind is refused, never guessed at."""
    plain = json.loads(CANONICAL)
    for key in plain["entries"][0]:
        values: list[object] = [None, True, -1, 1.5, "x" * 5000, [], {}]
        for wrong in values:
            bent = json.loads(CANONICAL)
            bent["entries"][0][key] = wrong
            data = msgspec.json.encode(bent, order="sorted")
            if data != CANONICAL:
                with pytest.raises(BadSnapshot):
                    parse(data, snapshot_id(data))
