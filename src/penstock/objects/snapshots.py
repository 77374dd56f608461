"""Freezing a working directory: which files it holds, their content, and the manifest that names the whole.

`client.upload` calls `freeze`, asks the server what it lacks, and takes those blobs from the result. Files below
`SNAPSHOT_SMALL_BYTES` share packs, larger ones are cut into chunks. Equal trees give equal ids. A file that cannot be
frozen as it is (unreadable, a socket, changing while it is read) is a one-line error, never a silent hole; links that
lead outside are left out and noted. It must not send anything, and writes nothing but the memory of `remembered`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from penstock.domain import limits
from penstock.objects.ignoring import ALWAYS, Level, above, ignored, within
from penstock.objects.manifest import (
    LINK_STEPS_MAX,
    PLAIN_MODE,
    PROGRAM_MODE,
    BadSnapshot,
    Entry,
    File,
    Folder,
    Link,
    Manifest,
    check,
    check_path,
    leads_inside,
    snapshot_id,
    to_bytes,
)
from penstock.objects.reading import Reader, Seen, unreadable
from penstock.objects.remembered import Remembered

KINDS: Final = {
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
VENV_MARK: Final = "pyvenv.cfg"
SHOWN_LARGEST: Final = 3

#: Told how many bytes of content are done, and of how many.
Progress = Callable[[int, int], None]


class Frozen:
    """A manifest with its id and canonical bytes, notes for the user, and every blob on request."""

    def __init__(self, manifest: Manifest, notes: tuple[str, ...], reader: Reader) -> None:
        self.manifest = manifest
        self.notes = notes
        self.data = to_bytes(manifest)
        self.id = snapshot_id(self.data)
        self.read_bytes = reader.read_bytes  #: of content that had to be read, because nothing was remembered of it
        self.blob = reader.blob  #: id -> stored bytes; from the files again, so `BadSnapshot` when those have changed


class Walked(NamedTuple):
    files: list[Seen]
    links: dict[str, str]
    folders: list[str]
    own: list[str]  #: our own state, left out


def freeze(
    directory: Path, cache: Path | None = None, progress: Progress | None = None, *, without: Path | None = None
) -> Frozen:
    """Freeze a directory. `cache` is a folder where hashes are remembered between calls; None: everything is read.

    `without` is a folder that stays out, wherever it lies in there: our own state, which changes while it is read.
    """
    if not directory.is_dir():
        raise BadSnapshot("directory", str(directory), "is not a directory", "give one that exists")
    directory = directory.resolve()
    remembered = Remembered(cache, directory)
    walked = _walk(directory, without)
    total = _check_total(walked.files)
    links, notes = _inner_links(walked.links)
    notes += [f"{path}: left out, the state directory of Penstock itself" for path in walked.own]
    reader = Reader(directory, remembered)
    contents = list(reader.read(walked.files, lambda done: progress(done, total) if progress else None))
    numbers = {id: number for number, id in enumerate(sorted(reader.blobs))}
    entries: list[Entry] = [Link(path, target) for path, target in links.items()]
    entries += [
        File(
            path=content.seen.path,
            mode=PROGRAM_MODE if content.seen.found.st_mode & stat.S_IXUSR else PLAIN_MODE,
            size=content.seen.found.st_size,
            sha256=content.sha256,
            parts=tuple(numbers[blob.id] for blob in content.blobs),
            offset=content.offset,
        )
        for content in contents
    ]
    entries += _empty_folders(walked.folders, entries)
    manifest = Manifest(
        blobs=tuple(reader.blobs[id] for id in numbers), entries=tuple(sorted(entries, key=lambda entry: entry.path))
    )
    check(manifest)
    remembered.save()
    return Frozen(manifest, tuple(notes), reader)


def measure(directory: Path, without: Path | None = None) -> tuple[int, int]:
    """How many files, and how many bytes of content, a freeze would hold; reads none of them."""
    walked = _walk(directory.resolve(), without)
    return len(walked.files), _check_total(walked.files)


def _walk(directory: Path, without: Path | None) -> Walked:
    walked = Walked([], {}, [], [])
    own = str(without.resolve()) if without is not None else None
    if own == str(directory):
        raise BadSnapshot("directory", own, "is the state directory of Penstock itself", "go to your project first")
    todo: list[tuple[str, tuple[Level, ...]]] = [("", above(directory))]
    while todo:
        folder, levels = todo.pop()
        try:
            with os.scandir(directory / folder) as found:
                children = list(found)
        except OSError as error:
            raise unreadable(folder or ".", error) from error
        if folder and any(child.name == VENV_MARK for child in children):
            continue
        if folder:
            walked.folders.append(folder[:-1])
        levels += within(directory, folder)
        for child in children:
            if child.name in ALWAYS:
                continue
            path = folder + child.name
            if ignored(levels, path, folder=child.is_dir(follow_symlinks=False)):
                continue
            check_path(path)
            if child.path == own:
                walked.own.append(path)
            elif child.is_dir(follow_symlinks=False):
                todo.append((path + "/", levels))
            else:
                _take(walked, directory, path, child)
        _check_count(walked)
    walked.files.sort()
    return walked


def _take(walked: Walked, directory: Path, path: str, child: os.DirEntry[str]) -> None:
    try:
        found = child.stat(follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            walked.links[path] = _relative(directory, path, os.readlink(child.path))  # noqa: PTH115 - Path would tidy it
            return
    except FileNotFoundError:
        return  # gone since its folder was listed: the snapshot is of the directory without it
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
        raise BadSnapshot("file", path, f"is {kind}, which cannot be sent", "remove it, or name it in .tpuignore")
    walked.files.append(Seen(path, found))


def _relative(directory: Path, path: str, target: str) -> str:
    """An absolute link that stays inside is written so that it does on the host, too."""
    inside = Path(target)
    if not inside.is_absolute() or ".." in inside.parts or not inside.is_relative_to(directory):
        return target
    return "../" * path.count("/") + inside.relative_to(directory).as_posix()


def _inner_links(links: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The links that lead nowhere outside, and a note for each of the others."""
    steps = iter(range(1, LINK_STEPS_MAX))
    inner: dict[str, str] = {}
    notes: list[str] = []
    for path, target in sorted(links.items()):
        sendable = target.isprintable() and not target.startswith("/")
        if sendable and leads_inside(path, target, links, steps):
            inner[path] = target
        else:
            notes.append(f"{path}: left out, a link that leads outside or in a circle ({ascii(target)[1:-1]})")
    return inner, notes


def _empty_folders(folders: list[str], entries: list[Entry]) -> list[Folder]:
    filled: set[str] = set()
    for path in [entry.path for entry in entries] + folders:
        cut = path.rfind("/")
        while cut > 0 and path[:cut] not in filled:
            filled.add(path[:cut])
            cut = path.rfind("/", 0, cut)
    return [Folder(path) for path in folders if path not in filled]


def _check_count(walked: Walked) -> None:
    """Before the walk has gone through a million files, not after."""
    count = len(walked.files) + len(walked.links)
    if count > limits.SNAPSHOT_FILES_MAX:
        folders: dict[str, int] = {}
        for seen in walked.files:
            top = seen.path.partition("/")[0]
            folders[top] = folders.get(top, 0) + 1
        largest = max(folders, key=lambda name: folders[name], default="")
        raise BadSnapshot(
            "directory",
            f"{count}+ files",
            f"are more than the {limits.SNAPSHOT_FILES_MAX} of one snapshot",
            f"name data folders in .tpuignore (most are in {largest!a})",
        )


def _check_total(files: list[Seen]) -> int:
    total = sum(seen.found.st_size for seen in files)
    if total > limits.SNAPSHOT_BYTES_MAX:
        largest = sorted(files, key=lambda seen: -seen.found.st_size)[:SHOWN_LARGEST]
        named = ", ".join(f"{seen.path!a} {seen.found.st_size / 1e9:.1f} GB" for seen in largest)
        raise BadSnapshot(
            "directory",
            f"{total / 1e9:.1f} GB",
            f"is more than the {limits.SNAPSHOT_BYTES_MAX / 1e9:.0f} GB of one snapshot",
            f"keep data in a bucket and name it in .tpuignore (largest: {named})",
        )
    return total
