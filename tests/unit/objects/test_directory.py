"""What only a directory can get wrong: paths and links that lead elsewhere, half-written files, disks that refuse."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.domain.admission import BadInput
from penstock.objects.directory import ABANDONED_NS, RESERVED, DirectoryObjects
from penstock.ports.objects import AlreadyThere, Damaged, ObjectsError

BAD_PATHS = [
    "", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a/.", "a\0b", "..", "a\\..\\b", "x" * 256,
    "y/" * 600 + "z", f"{RESERVED}/tmp/x", f"{RESERVED}",
]  # fmt: skip


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_path_that_could_mean_another_place_is_refused(tmp_path: Path, path: str) -> None:
    bucket = DirectoryObjects(tmp_path / "root")
    for call in (bucket.put(path, b"x"), bucket.put_new(path, b"x"), bucket.get(path), bucket.delete(path)):
        with pytest.raises(BadInput, match=r"^path: "):
            asyncio.run(call)
    assert not (tmp_path / "x").exists()


def test_a_bad_prefix_is_refused(tmp_path: Path) -> None:
    bucket = DirectoryObjects(tmp_path / "root")
    for prefix in ("../", "/etc/", "a/../../"):
        with pytest.raises(BadInput):
            asyncio.run(bucket.list(prefix))


def test_no_link_leads_out_of_the_root(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    bucket = DirectoryObjects(tmp_path / "root")
    (bucket.root / "folder").symlink_to(outside)
    (bucket.root / "file").symlink_to(outside / "secret")
    assert asyncio.run(bucket.get("folder/secret")) is None
    assert asyncio.run(bucket.get("file")) is None
    with pytest.raises(ObjectsError, match="Not a directory"):
        asyncio.run(bucket.put("folder/new", b"x"))
    assert asyncio.run(bucket.list("")) == ()
    asyncio.run(bucket.put("file", b"mine"))
    assert (outside / "secret").read_bytes() == b"secret"
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_a_pipe_in_the_way_blocks_nobody(tmp_path: Path) -> None:
    bucket = DirectoryObjects(tmp_path / "root")
    os.mkfifo(bucket.root / "pipe")
    assert asyncio.run(asyncio.wait_for(bucket.get("pipe"), 5)) is None


def test_an_object_and_a_folder_cannot_share_a_name(tmp_path: Path) -> None:
    bucket = DirectoryObjects(tmp_path / "root")
    asyncio.run(bucket.put("a", b"x"))
    with pytest.raises(ObjectsError, match="Not a directory"):
        asyncio.run(bucket.put("a/b", b"x"))
    asyncio.run(bucket.put("c/d", b"x"))
    with pytest.raises(ObjectsError, match="Is a directory"):
        asyncio.run(bucket.put("c", b"x"))


def test_a_failed_write_leaves_the_old_object_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = DirectoryObjects(tmp_path / "root")
    asyncio.run(bucket.put("a", b"old"))

    def refuse(_file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(ObjectsError, match=r"^a: No space left .*/root has \d+ bytes left: make room there"):
            asyncio.run(bucket.put("a", b"new"))
    stored = asyncio.run(bucket.get("a"))
    assert stored is not None
    assert stored.data == b"old"
    assert list((bucket.root / RESERVED / "tmp").iterdir()) == []


def test_the_file_and_its_directory_are_synced_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = DirectoryObjects(tmp_path / "root")
    synced: list[str] = []
    real = os.fsync

    def note(file: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{file}").readlink().relative_to(bucket.root)))
        real(file)

    monkeypatch.setattr(os, "fsync", note)
    asyncio.run(bucket.put_new("a/b/c", b"x"))
    assert synced[0].startswith(f"{RESERVED}/tmp/")
    assert synced[1:] == [".", "a", "a/b"]
    synced.clear()
    with pytest.raises(AlreadyThere):
        asyncio.run(bucket.put_new("a/b/c", b"x"))
    assert synced[1:] == ["a/b"], "what is read back must not be undone by a power cut"
    synced.clear()
    asyncio.run(bucket.delete("a/b/c"))
    assert synced == ["a/b"]


def test_only_the_owner_can_look_inside(tmp_path: Path) -> None:
    bucket = DirectoryObjects(tmp_path / "root")
    asyncio.run(bucket.put("a/b", b"x"))
    assert [oct(path.stat().st_mode & 0o777) for path in (bucket.root, bucket.root / "a", bucket.root / "a" / "b")] == [
        "0o700",
        "0o700",
        "0o600",
    ]


def test_empty_folders_go_with_their_last_object(tmp_path: Path) -> None:
    bucket = DirectoryObjects(tmp_path / "root")
    asyncio.run(bucket.put("jobs/j/log/x", b"x"))
    asyncio.run(bucket.put("jobs/k", b"x"))
    asyncio.run(bucket.delete("jobs/j/log/x"))
    assert sorted(path.name for path in (bucket.root / "jobs").iterdir()) == ["k"]


def test_files_of_dead_writers_are_forgotten(tmp_path: Path) -> None:
    bucket = DirectoryObjects(tmp_path / "root")
    litter = bucket.root / RESERVED / "tmp" / "old"
    litter.write_bytes(b"x")
    young = bucket.root / RESERVED / "tmp" / "young"
    young.write_bytes(b"x")
    then = young.stat().st_mtime_ns - ABANDONED_NS - 10**9
    os.utime(litter, ns=(then, then))
    DirectoryObjects(tmp_path / "root")
    assert not litter.exists()
    assert young.exists()


def test_a_draft_that_its_writer_holds_is_not_forgotten_however_old(tmp_path: Path) -> None:
    bucket = DirectoryObjects(tmp_path / "root")
    draft = bucket.draft()
    (hidden,) = (bucket.root / RESERVED / "tmp").iterdir()
    then = hidden.stat().st_mtime_ns - ABANDONED_NS - 10**9
    os.utime(hidden, ns=(then, then))
    DirectoryObjects(tmp_path / "root")
    draft.write(0, [b"late"])
    asyncio.run(draft.name("a"))
    stored = asyncio.run(bucket.get("a"))
    assert stored is not None
    assert stored.data == b"late"


def test_a_draft_whose_sync_failed_is_never_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second sync would succeed, because the system forgets what it could not write: so it must not be tried."""
    bucket = DirectoryObjects(tmp_path / "root")
    draft = bucket.draft()
    draft.write(0, [b"x"])

    def fail(_file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(Damaged, match="may not be on the disk"):
            asyncio.run(draft.name("a"))
    with pytest.raises(Damaged, match="may not be on the disk"):
        asyncio.run(draft.name("a"))
    assert asyncio.run(bucket.get("a")) is None


def test_a_root_that_is_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"")
    with pytest.raises(ObjectsError, match="must be a directory"):
        DirectoryObjects(tmp_path / "root")


_WRITER = """
import asyncio, sys
from pathlib import Path
from penstock.objects.directory import DirectoryObjects

async def write(bucket):
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        await bucket.put("page", str(number % 10).encode() * 200_000)

asyncio.run(write(DirectoryObjects(Path(sys.argv[1]))))
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_object(tmp_path: Path) -> None:
    bucket = DirectoryObjects(tmp_path / "root")
    asyncio.run(bucket.put("page", b"0" * 200_000))
    last = 0
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(bucket.root)], stdout=subprocess.PIPE)
        with writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            for _ in range(20):
                stored = asyncio.run(bucket.get("page"))
                assert stored is not None
                assert stored.data == stored.data[:1] * 200_000
                assert stored.generation >= last
                last = stored.generation
            writer.kill()
        stored = asyncio.run(bucket.get("page"))
        assert stored is not None
        assert stored.data == stored.data[:1] * 200_000
        last = max(last, asyncio.run(bucket.put("page", b"0" * 200_000)))


def test_removing_a_folder_takes_all_that_payloads_left_and_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("stays")
    root = tmp_path / "root"
    bucket = DirectoryObjects(root)
    asyncio.run(bucket.put("jobs/j1/checkpoints/1/data", b"x"))
    left = root / "jobs" / "j1" / "checkpoints" / "1"
    (left / "link").symlink_to(outside)
    (left / "empty").mkdir()
    (left / "closed" / "below").mkdir(parents=True)
    (left / "closed" / "below" / "file").write_text("x")
    (left / "closed" / "below").chmod(0o000)
    (left / "closed").chmod(0o000)
    os.mkfifo(left / "pipe")
    asyncio.run(bucket.remove("jobs/j1/checkpoints/1"))
    assert not (root / "jobs").exists()
    assert (outside / "precious").read_text() == "stays"
    (root / "jobs").symlink_to(outside)
    asyncio.run(bucket.remove("jobs"))
    with pytest.raises(BadInput):
        asyncio.run(bucket.remove(".penstock"))
    assert (outside / "precious").read_text() == "stays"
    assert (root / ".penstock").is_dir()
