"""Freezing: the same tree gives the same id, what is remembered is not read again, what cannot be sent is said."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.domain import limits
from penstock.objects import reading, remembered
from penstock.objects.archive import unpack
from penstock.objects.content import name_of
from penstock.objects.manifest import BadSnapshot, parse
from penstock.objects.snapshots import freeze, measure
from tests.unit.objects import trees
from tests.unit.objects.trees import Tree

SMALL = b"print('hello')\n"
LARGE = bytes(range(256)) * 400  # above SNAPSHOT_SMALL_BYTES
PROJECT: Tree = {
    "train.py": SMALL,
    "models/mlp.py": SMALL * 3,
    "weights.bin": LARGE,
    "empty.txt": b"",
    "results": None,
    "latest": "models/mlp.py",
}


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes between writing files and freezing them."""
    stamp = remembered._stamp
    monkeypatch.setattr(remembered, "_stamp", lambda folder: stamp(folder) + 1_000_000_000)


def paths(root: Path) -> list[str]:
    return [entry.path for entry in freeze(root).manifest.entries]


names = st.text("ab.é-_ ", min_size=1, max_size=6).filter(lambda name: name not in (".", "..")).map(lambda n: "n" + n)
contents = st.binary(max_size=200) | st.just(LARGE)


@st.composite
def some_trees(draw: st.DrawFn) -> Tree:
    tree: Tree = {}
    for _ in range(draw(st.integers(0, 12))):
        path = "/".join(draw(st.lists(names, min_size=1, max_size=3)))
        parents = ["/".join(path.split("/")[:cut]) for cut in range(1, path.count("/") + 1)]
        if not any(other in tree for other in [path, *parents]) and not any(key.startswith(path + "/") for key in tree):
            tree[path] = draw(contents | st.none())
    for number, target in enumerate(draw(st.lists(st.sampled_from([*sorted(tree), "nowhere"]), max_size=2))):
        tree[f"link{number}"] = target
    return tree


@settings(max_examples=40)
@given(some_trees())
def test_what_is_frozen_is_unpacked(tree: Tree) -> None:
    with tempfile.TemporaryDirectory() as folder:
        frozen = freeze(trees.write(Path(folder, "here"), tree))
        assert not frozen.notes
        manifest = parse(frozen.data, frozen.id)
        unpack(manifest, frozen.blob, Path(folder, "there"))
        assert trees.read(Path(folder, "there")) == trees.read(Path(folder, "here"))
        assert freeze(Path(folder, "there")).id == frozen.id


def test_an_id_tells_content_names_and_modes_apart(tmp_path: Path) -> None:
    root = trees.write(tmp_path / "one", PROJECT)
    seen = {freeze(root).id}
    assert freeze(trees.write(tmp_path / "two", PROJECT)).id in seen

    def changed(change: Callable[[], object]) -> None:
        change()
        id = freeze(root).id
        assert id not in seen
        seen.add(id)

    changed(lambda: (root / "train.py").write_bytes(SMALL.replace(b"hello", b"hallo")))
    changed(lambda: (root / "train.py").chmod(0o755))
    changed(lambda: (root / "train.py").rename(root / "test.py"))
    changed((root / "results").rmdir)
    changed(lambda: (root / "weights.bin").write_bytes(LARGE + b"."))
    (root / "test.py").chmod(0o711)  # only whether it is a program counts
    assert freeze(root).id in seen


def test_a_large_file_is_cut_and_equal_content_is_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SNAPSHOT_CHUNK_BYTES", 100_000)
    body = os.urandom(250_000)
    root = trees.write(tmp_path / "here", {"a.bin": body, "b.bin": body})
    frozen = freeze(root)
    unpack(frozen.manifest, frozen.blob, tmp_path / "there")
    assert trees.read(tmp_path / "there") == {"a.bin": body, "b.bin": body}
    assert sorted(blob.size for blob in frozen.manifest.blobs) == [50_000, 100_000, 100_000]
    (root / "b.bin").write_bytes(body + b"more")
    appended = {blob.id for blob in freeze(root).manifest.blobs} - {blob.id for blob in frozen.manifest.blobs}
    assert len(appended) == 1


def test_small_files_share_few_blobs(tmp_path: Path) -> None:
    root = trees.write(tmp_path, {f"p{number % 10}/m{number}.py": b"%d" % number for number in range(1_000)})
    assert len(freeze(root).manifest.blobs) < 40


# --- what is remembered ---
@pytest.mark.usefixtures("later")
def test_nothing_is_read_twice_and_one_change_reads_one_file(tmp_path: Path) -> None:
    root, cache = trees.write(tmp_path / "here", PROJECT), tmp_path / "cache"
    first = freeze(root, cache)
    assert first.read_bytes == first.manifest.size > 0
    again = freeze(root, cache)
    assert (again.id, again.read_bytes) == (first.id, 0)
    for blob in again.manifest.blobs:
        assert name_of(again.blob(blob.id)) == blob.id
    (root / "weights.bin").write_bytes(LARGE[::-1])
    changed = freeze(root, cache)
    assert changed.read_bytes == len(LARGE)
    assert changed.id == freeze(root).id != first.id


@pytest.mark.usefixtures("later")
def test_a_change_that_hides_its_time_is_seen(tmp_path: Path) -> None:
    root, cache = trees.write(tmp_path / "here", PROJECT), tmp_path / "cache"
    first = freeze(root, cache)
    before = (root / "weights.bin").stat()
    (root / "weights.bin").write_bytes(LARGE[::-1])
    os.utime(root / "weights.bin", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert freeze(root, cache).id != first.id


def test_a_file_as_young_as_the_freeze_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, cache = trees.write(tmp_path / "here", PROJECT), tmp_path / "cache"
    ctime = (root / "weights.bin").stat().st_ctime_ns
    monkeypatch.setattr(remembered, "_stamp", lambda folder: (folder.mkdir(exist_ok=True), ctime + 1)[1])
    total = freeze(root, cache).read_bytes
    assert freeze(root, cache).read_bytes == total
    # One tick later both contents could no longer carry the same time.
    monkeypatch.setattr(remembered, "_stamp", lambda folder: ctime + 2 * remembered.TICK_NS)
    freeze(root, cache)
    assert freeze(root, cache).read_bytes < total


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"codec": "of tomorrow"}', b"\xff\xfe"])
@pytest.mark.usefixtures("later")
def test_a_broken_memory_costs_time_only(tmp_path: Path, garbage: bytes) -> None:
    root, cache = trees.write(tmp_path / "here", PROJECT), tmp_path / "cache"
    first = freeze(root, cache)
    (memory,) = cache.glob("*.json")
    memory.write_bytes(garbage)
    again = freeze(root, cache)
    assert (again.id, again.read_bytes) == (first.id, first.manifest.size)
    assert freeze(root, cache).read_bytes == 0


@pytest.mark.usefixtures("later")
def test_another_codec_forgets_the_names_of_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, cache = trees.write(tmp_path / "here", PROJECT), tmp_path / "cache"
    freeze(root, cache)
    monkeypatch.setattr(remembered, "CODEC", "zstd of tomorrow")
    assert freeze(root, cache).read_bytes > 0


def test_a_memory_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    root = trees.write(tmp_path / "here", PROJECT)
    (tmp_path / "file").write_bytes(b"")
    assert freeze(root, tmp_path / "file" / "cache").id == freeze(root).id


# --- what cannot be sent ---
def refused(root: Path) -> str:
    with pytest.raises(BadSnapshot) as caught:
        freeze(root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sockets_and_pipes_are_named(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{short}/agent.sock")
        assert refused(Path(short)).startswith("file: 'agent.sock' is a socket, which cannot be sent; remove it")
        Path(short, ".tpuignore").write_text("*.sock\n")
        assert paths(Path(short)) == [".tpuignore"]
    os.mkfifo(tmp_path / "pipe")
    assert "a named pipe" in refused(tmp_path)


def test_our_own_state_stays_out_and_is_told(tmp_path: Path) -> None:
    trees.write(tmp_path, {"train.py": b"1", "deep/state/penstock.db": b"x", "deep/other.py": b"2"})
    home = tmp_path / "deep" / "state"
    os.mkfifo(home / "keeper.sock")
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    for place, own in ((tmp_path, home), (link, home), (tmp_path, link / "deep" / "state")):
        frozen = freeze(place, without=own)
        assert [entry.path for entry in frozen.manifest.entries] == ["deep/other.py", "train.py"]
        assert frozen.notes == ("deep/state: left out, the state directory of Penstock itself",)
        assert measure(place, own) == (2, 2)
    with pytest.raises(BadSnapshot, match="is the state directory of Penstock itself; go to your project first"):
        freeze(home, without=home)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.write(tmp_path, {"secret.bin": LARGE})
    real = os.open

    def denied(path: Path, *rest: int) -> int:
        if Path(path).name == "secret.bin":
            raise PermissionError(13, "Permission denied")
        return real(path, *rest)

    monkeypatch.setattr(os, "open", denied)
    assert refused(tmp_path).startswith("file: 'secret.bin' cannot be read: Permission denied; make it readable")


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_file_that_changes_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    trees.write(tmp_path, {"train.log": b"." * size})
    real = os.open

    def written(path: Path, *rest: int) -> int:
        handle = real(path, *rest)
        with (tmp_path / "train.log").open("ab") as log:
            log.write(b"one more line")
        return handle

    monkeypatch.setattr(os, "open", written)
    assert "'train.log' changed while it was being read; wait" in refused(tmp_path)


def test_a_file_that_becomes_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.write(tmp_path, {"here/a.txt": SMALL, "outside": b"x" * len(SMALL)})
    real = os.open

    def swapped(path: Path, *rest: int) -> int:
        Path(path).unlink()
        Path(path).symlink_to(tmp_path / "outside")
        return real(path, *rest)

    monkeypatch.setattr(os, "open", swapped)
    assert "'a.txt' cannot be read" in refused(tmp_path / "here")


def test_a_blob_of_files_that_changed_since_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "KEPT_BYTES", 0)
    frozen = freeze(trees.write(tmp_path, {"a.txt": SMALL}))
    (tmp_path / "a.txt").write_bytes(SMALL + b"#")
    with pytest.raises(BadSnapshot, match="changed while it was being read"):
        frozen.blob(frozen.manifest.blobs[0].id)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(BadSnapshot, match="cannot be read: No such file"):
        frozen.blob(frozen.manifest.blobs[0].id)


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"two\nlines", b"bell\x07", "a\u202etxt.exe".encode(), b"x" * 255])
def test_odd_names_are_refused_or_kept_whole(tmp_path: Path, name: bytes) -> None:
    with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:  # noqa: PTH118, PTH123 - bytes as they are
        file.write(SMALL)
    if len(name) == 255:
        assert paths(tmp_path) == [name.decode()]
    else:
        assert "rename it or name it in .tpuignore" in refused(tmp_path)


def test_twins_in_two_unicode_forms_are_refused_and_letter_case_is_not(tmp_path: Path) -> None:
    trees.write(tmp_path / "case", {"README": SMALL, "readme": SMALL})
    assert paths(tmp_path / "case") == ["README", "readme"]
    trees.write(tmp_path / "form", {"caf\u00e9/a": SMALL, "cafe\u0301/b": SMALL})
    assert "two Unicode forms" in refused(tmp_path / "form")


def test_limits_come_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = trees.write(tmp_path, {"train.py": SMALL, "data/a.bin": LARGE, "data/b.bin": LARGE, "data/c": b""})
    monkeypatch.setattr(limits, "SNAPSHOT_BYTES_MAX", 150_000)
    assert ".tpuignore (largest: 'data/a.bin'" in refused(root)
    monkeypatch.undo()
    monkeypatch.setattr(limits, "SNAPSHOT_FILES_MAX", 3)
    assert "most are in 'data'" in refused(root)


def test_a_sparse_giant_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "giant").open("wb") as file:
        file.truncate(limits.SNAPSHOT_BYTES_MAX + 1)
    assert "'giant' 17.2 GB" in refused(tmp_path)


def test_only_directories_are_frozen(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for wrong in (tmp_path / "file", tmp_path / "absent"):
        with pytest.raises(BadSnapshot, match="is not a directory"):
            freeze(wrong)


# --- links ---
def test_links_are_kept_when_they_stay_inside(tmp_path: Path) -> None:
    inside: Tree = {
        "a/file": SMALL,
        "a/up": "../b",
        "b/here": "../a/./file",
        "broken": "nowhere/yet",
        "absolute": str(tmp_path / "here" / "a"),
        "c/d/absolute": str(tmp_path / "here" / "a/file"),
    }
    frozen = freeze(trees.write(tmp_path / "here", inside))
    assert not frozen.notes
    targets = {link.path: link.target for link in frozen.manifest.links}
    assert targets == {
        "a/up": "../b",
        "absolute": "a",
        "b/here": "../a/./file",
        "broken": "nowhere/yet",
        "c/d/absolute": "../../a/file",
    }


def test_links_that_leave_or_circle_are_left_out_and_noted(tmp_path: Path) -> None:
    outside: Tree = {
        "data": "/mnt/data",
        "up": "..",
        "p/q/r/deep": "../../../x",
        "x/file": SMALL,
        "tricky": "p/q/r/deep/../../..",  # seems to be p; is the parent of the directory
        "one": "two",
        "two": "one",
        "through": "data/file",
        "kept": "x/file",
    }
    frozen = freeze(trees.write(tmp_path / "here", outside))
    assert {link.path for link in frozen.manifest.links} == {"kept", "p/q/r/deep"}
    assert [note.partition(":")[0] for note in frozen.notes] == ["data", "one", "through", "tricky", "two", "up"]
    assert all("\n" not in note for note in frozen.notes)


def test_a_linked_directory_is_a_link_not_a_copy(tmp_path: Path) -> None:
    root = trees.write(tmp_path, {"a/file": SMALL, "b": "a", "loop": "."})
    assert paths(root) == ["a/file", "b", "loop"]


def test_measuring_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = trees.write(tmp_path, PROJECT)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("read a file"))
    assert measure(root) == (4, len(SMALL) * 4 + len(LARGE))


def test_progress_is_told_up_to_the_end(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    frozen = freeze(trees.write(tmp_path, PROJECT), None, lambda done, total: told.append((done, total)))
    assert told[-1] == (frozen.manifest.size, frozen.manifest.size)
    assert told == sorted(told)
