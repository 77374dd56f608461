"""Unpacking a snapshot onto a host, and comparing what lies there with what was sent (rule S22).

`agent.environment` calls this. Nothing in a manifest is believed: `manifest.check` is asked first, each blob must have
its own hash, and at the end the tree on disk is read back and compared entry by entry. Folders come first, then files
that must not exist yet, links last, so that nothing is written through a link. It must not run what it unpacks.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from penstock.domain import limits
from penstock.objects.content import BadBlob, decode
from penstock.objects.manifest import BadSnapshot, Blob, File, Folder, Link, Manifest, check

THREADS: Final = min(4, os.cpu_count() or 1)

#: Stored bytes of a blob by its id; called from several threads.
GetBlob = Callable[[str], bytes]


class NoRoom(Exception):
    """The host's disk is too full: the job's fault only if its snapshot is."""


def unpack(manifest: Manifest, get_blob: GetBlob, into: Path) -> None:
    """Write the snapshot into a directory that does not exist yet, and verify it. What fails leaves nothing behind.

    Raises `BadSnapshot` for what was sent, `BadBlob` for bytes damaged on the way, `NoRoom` and OSError for the disk.
    """
    check(manifest)
    into.parent.mkdir(parents=True, exist_ok=True)
    room = shutil.disk_usage(into.parent).free
    if manifest.size + limits.HOST_FREE_BYTES > room:
        raise NoRoom(
            f"unpacking needs {manifest.size} bytes and {limits.HOST_FREE_BYTES} to spare; {into.parent} has {room}"
        )
    into.mkdir(mode=0o755)
    try:
        _write(manifest, get_blob, into)
        verify(manifest, into)
    except OSError as error:
        shutil.rmtree(into)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoom(f"the disk of {into.parent} became full while unpacking") from error
        raise
    except BaseException:
        shutil.rmtree(into)
        raise


def verify(manifest: Manifest, directory: Path) -> None:
    """Raise `BadSnapshot` unless the directory holds exactly what the manifest says."""
    found = _listing(directory)
    wanted = {entry.path: entry for entry in manifest.entries}
    different = wanted.keys() ^ found.keys()
    if different:
        raise _differs(min(different), "is missing" if min(different) in wanted else "is there and should not be")
    for entry in manifest.entries:
        mode = found[entry.path]
        match entry:
            case Folder():
                if not stat.S_ISDIR(mode):
                    raise _differs(entry.path, "is not a folder")
            case Link():
                if not stat.S_ISLNK(mode) or os.readlink(directory / entry.path) != entry.target:  # noqa: PTH115 - Path would tidy it
                    raise _differs(entry.path, "is not the link that was sent")
            case File():
                if not stat.S_ISREG(mode) or stat.S_IMODE(mode) != entry.mode:
                    raise _differs(entry.path, "is not a file, or has other permissions")
    files = manifest.files
    with ThreadPoolExecutor(THREADS, "penstock-verify") as threads:
        for file, sha256 in zip(files, threads.map(lambda file: _sha256(directory / file.path), files), strict=True):
            if sha256 != file.sha256:
                raise _differs(file.path, "has other content")


def _write(manifest: Manifest, get_blob: GetBlob, into: Path) -> None:
    made: set[str] = set()
    for entry in manifest.entries:
        folder = entry.path if isinstance(entry, Folder) else entry.path.rpartition("/")[0]
        if folder and folder not in made:
            (into / folder).mkdir(mode=0o755, parents=True, exist_ok=True)
            made.add(folder)
    with ThreadPoolExecutor(THREADS, "penstock-unpack") as threads:
        for _ in threads.map(lambda files: _write_together(manifest.blobs, files, get_blob, into), _groups(manifest)):
            pass
    for link in manifest.links:
        (into / link.path).symlink_to(link.target)


def _groups(manifest: Manifest) -> list[list[File]]:
    """Files that share a blob together, so that it is decoded once."""
    shared: dict[int, list[File]] = {}
    alone: list[list[File]] = []
    for file in manifest.files:
        if len(file.parts) == 1:
            shared.setdefault(file.parts[0], []).append(file)
        else:
            alone.append([file])
    return list(shared.values()) + alone


def _write_together(blobs: Sequence[Blob], files: list[File], get_blob: GetBlob, into: Path) -> None:
    def raw(part: int) -> bytes:
        blob = blobs[part]
        try:
            return decode(blob.id, get_blob(blob.id), blob.size)
        except BadBlob as error:
            if error.damaged:
                raise
            raise BadSnapshot("blob", blob.id, f"is not what the manifest says: {error}", "send it again") from error

    if len(files[0].parts) == 1:
        shared = memoryview(raw(files[0].parts[0]))
        for file in files:
            _create(into, file, iter([shared[file.offset : file.offset + file.size]]))
    else:
        _create(into, files[0], map(raw, files[0].parts))


def _create(into: Path, file: File, pieces: Iterator[bytes | memoryview]) -> None:
    try:
        handle = os.open(into / file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise BadSnapshot(
            "path", file.path, "is the same as another to this host's file system", "rename one of them"
        ) from error
    with os.fdopen(handle, "wb") as target:
        for piece in pieces:
            target.write(piece)
        os.fchmod(handle, file.mode)


def _listing(directory: Path) -> dict[str, int]:
    """Path and mode of every file, link and empty folder; links are not followed."""
    found: dict[str, int] = {}
    todo = [""]
    while todo:
        folder = todo.pop()
        with os.scandir(directory / folder) as children:
            empty = True
            for child in children:
                empty = False
                if child.is_dir(follow_symlinks=False):
                    todo.append(f"{folder}{child.name}/")
                else:
                    found[folder + child.name] = child.stat(follow_symlinks=False).st_mode
            if empty and folder:
                found[folder[:-1]] = stat.S_IFDIR
    return found


def _sha256(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _differs(path: str, how: str) -> BadSnapshot:
    return BadSnapshot("snapshot", path, f"{how}: what lies on the host is not what was sent", "run the job again")
