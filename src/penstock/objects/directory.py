"""A bucket on a disk: `ports.objects` over one directory, with writes that survive a crash or do not show at all.

The embedded server keeps everything under its root here; agents on the same machine may read it too. Objects are plain
files, so people can look at them. A write goes to a hidden file, is synced, gets its name by link or rename, and the
directory is synced before anybody is told; a root on a scratch disk can be opened without syncs. A generation is the
file's time of change, made to rise with every write of a name. Payloads may write below the root, so no symbolic link
is ever followed and no path can leave it. It must not block the event loop: file work runs in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import threading
import zlib
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from errno import EACCES, EDQUOT, ELOOP, ENOENT, ENOSPC, ENOTDIR, EPERM, EROFS
from pathlib import Path
from typing import BinaryIO, Final

from typing_extensions import Buffer

from penstock.domain.admission import BadInput
from penstock.objects.drafts import write_parts
from penstock.objects.names import parts_of
from penstock.ports.objects import AlreadyThere, Damaged, Forbidden, Kept, ObjectsError, Stored

#: Our own corner of the root: files being written, and locks. No object may be named under it.
RESERVED: Final = ".penstock"
#: Writers of one name take turns; so many locks keep writers of different names apart.
STRIPES: Final = 64
#: A hidden file that nobody has written to for this long, or holds, belongs to a writer that died.
ABANDONED_NS: Final = 3600 * 10**9
#: A directory that was emptied and removed while a write was on its way is made again, this often.
TRIES: Final = 20

_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Not blocking, because somebody may have put a pipe there.
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
#: To a reader, a file where a folder should be, and a link in either place, mean that there is no such object.
_NOT_HERE: Final = frozenset({ENOENT, ENOTDIR, ELOOP})
_FULL: Final = frozenset({ENOSPC, EDQUOT})
_DENIED: Final = frozenset({EACCES, EPERM, EROFS})

#: Told of each file that was looked for, while its directory is open; and without an entry of each folder that a
#: payload closed, with a slash at its end.
Note = Callable[[str, os.DirEntry[str] | None], None]


class DirectoryObjects:
    """Implements `ports.objects.Ranged`; any number of processes may share one root."""

    def __init__(self, root: Path, *, synced: bool = True, to_read: bool = False) -> None:
        """Make the root if it is not there, readable by its owner only; not if it is opened `to_read` alone.

        Unless `synced`, a power cut can take what was written last, names and bytes, or bytes alone.
        """
        self.root = root
        self.synced = synced
        self._tmp = root / RESERVED / "tmp"
        if to_read:
            with _refusing(str(root)):
                os.close(os.open(root, os.O_RDONLY | os.O_DIRECTORY))
            return
        try:
            for folder in (root, root / RESERVED, root / RESERVED / "tmp", root / RESERVED / "locks"):
                folder.mkdir(mode=0o700, parents=folder == root, exist_ok=True)
            self._forget_abandoned()
        except OSError as error:
            raise ObjectsError(f"{root}: {error.strerror}; the root must be a directory that can be written") from error

    async def put(self, path: str, data: bytes) -> int:
        return await asyncio.to_thread(self._write, path, data, new=False)

    async def put_new(self, path: str, data: bytes) -> int:
        return await asyncio.to_thread(self._write, path, data, new=True)

    async def get(self, path: str) -> Stored | None:
        return await asyncio.to_thread(self._read, path)

    async def list(self, prefix: str) -> tuple[str, ...]:
        return await asyncio.to_thread(self._list, prefix)

    async def delete(self, path: str) -> None:
        await asyncio.to_thread(self._delete, path)

    async def survey(self, prefix: str) -> tuple[Kept, ...]:
        return await asyncio.to_thread(self._survey, prefix)

    async def lend(self, path: str, seconds: float) -> str | None:  # noqa: ARG002 (there is none to give)
        return None  # hosts of this machine read it where it is

    async def get_range(self, path: str, start: int, stop: int) -> bytes | None:
        return await asyncio.to_thread(self._read_range, path, start, stop)

    async def remove(self, folder: str) -> None:
        await asyncio.to_thread(self._remove, folder)

    def draft(self) -> DirectoryDraft:
        hidden = self._tmp / secrets.token_hex(16)
        with _refusing("an object to be written", self.root):
            file = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed: it may be written to seldom, and is not abandoned
        return DirectoryDraft(self, hidden, file)

    # --- on threads ---
    def _sync(self, file: int) -> None:
        # None at all: a file system with a journal lets the sync of one small file wait for the bytes of all others.
        if self.synced:
            os.fsync(file)

    def _write(self, path: str, data: bytes, *, new: bool) -> int:
        *folders, name = _parts(path)
        with _refusing(path, self.root), self._turn(path) as turn:
            hidden = self._tmp / secrets.token_hex(16)
            try:
                file = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(file, "wb") as writer:
                    writer.write(data)
                    writer.flush()
                    generation = self._next_generation(turn, os.fstat(file).st_mtime_ns, folders, name)
                    os.utime(file, ns=(generation, generation))
                    self._sync(file)
                self._give_name(hidden, folders, name, path, new=new)
            finally:
                hidden.unlink(missing_ok=True)
            os.pwrite(turn, generation.to_bytes(8), 0)
        return generation

    def name_draft(self, hidden: Path, file: int, path: str) -> int:
        """Give a hidden file a name that is free. On a thread."""
        *folders, name = _parts(path)
        with _refusing(path, self.root):
            self._sync_draft(file, path)  # before our turn: this is what takes long
            with self._turn(path) as turn:
                with self._folder(folders) as folder:
                    # Looked at first: if it is this very file, whose answer was lost, its generation must not change.
                    if folder is not None and _is_there(name, folder):
                        self._sync(folder)
                        raise AlreadyThere(path)
                generation = self._next_generation(turn, os.fstat(file).st_mtime_ns, folders, name)
                os.utime(file, ns=(generation, generation))
                self._sync_draft(file, path)
                self._give_name(hidden, folders, name, path, new=True)
                os.pwrite(turn, generation.to_bytes(8), 0)
        return generation

    def _sync_draft(self, file: int, path: str) -> None:
        """A sync that failed must not be tried again: the system has forgotten by then what it could not write."""
        try:
            self._sync(file)
        except OSError as error:
            raise Damaged(f"{path}: its bytes may not be on the disk: {error.strerror}") from error

    def _give_name(self, hidden: Path, folders: Sequence[str], name: str, path: str, *, new: bool) -> None:
        for tries_left in reversed(range(TRIES)):
            try:
                with self._folder(folders, make=True) as folder:
                    assert folder is not None
                    self._enter_name(hidden, folder, name, path, new=new)
                return
            except FileNotFoundError:
                if not tries_left:
                    raise  # otherwise a delete emptied a directory on the way and removed it just now: make it again

    def _enter_name(self, hidden: Path, folder: int, name: str, path: str, *, new: bool) -> None:
        try:
            if new:
                os.link(hidden, name, dst_dir_fd=folder)
            else:
                os.replace(hidden, name, dst_dir_fd=folder)
        except FileExistsError:
            # Whoever reads it back to see who won must not see what a power cut could still undo.
            self._sync(folder)
            raise AlreadyThere(path) from None
        self._sync(folder)

    def _next_generation(self, turn: int, now_ns: int, folders: Sequence[str], name: str) -> int:
        """Above every earlier one of this name, deleted ones included; about the time in nanoseconds."""
        last = int.from_bytes(os.pread(turn, 8, 0))
        with self._folder(folders) as folder:
            if folder is not None:
                with contextlib.suppress(FileNotFoundError):
                    last = max(last, os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns)
        return max(now_ns, last + 1)

    def _read(self, path: str) -> Stored | None:
        with _refusing(path), self._open(path) as reader:
            if reader is None:
                return None
            # The file behind a name is replaced, never rewritten: bytes and generation belong together.
            return Stored(reader.read(), os.fstat(reader.fileno()).st_mtime_ns)

    def _read_range(self, path: str, start: int, stop: int) -> bytes | None:
        with _refusing(path), self._open(path) as reader:
            if reader is None:
                return None
            reader.seek(start)
            return reader.read(max(0, stop - start))

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[BinaryIO | None]:
        """The file of an object; None when there is none, or something that is no file."""
        *folders, name = _parts(path)
        with self._folder(folders) as folder:
            if folder is None:
                yield None
                return
            try:
                file = os.open(name, _OPEN_FILE, dir_fd=folder)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                yield None
                return
            if not stat.S_ISREG(os.fstat(file).st_mode):
                os.close(file)
                yield None
                return
            with os.fdopen(file, "rb") as reader:
                yield reader

    def _list(self, prefix: str) -> tuple[str, ...]:
        found: MutableSequence[str] = []

        def note(path: str, entry: os.DirEntry[str] | None) -> None:
            if entry is None:
                raise PermissionError(EACCES, os.strerror(EACCES))
            found.append(path)

        self._look_through(prefix, note)
        return tuple(sorted(found))

    def _survey(self, prefix: str) -> tuple[Kept, ...]:
        found: MutableSequence[Kept] = []

        def note(path: str, entry: os.DirEntry[str] | None) -> None:
            if entry is None:  # what is in it is not known, but that something is there to be removed
                found.append(Kept(path, 0, 0.0))
                return
            with contextlib.suppress(FileNotFoundError):  # deleted since the directory was read
                facts = entry.stat(follow_symlinks=False)
                found.append(Kept(path, facts.st_size, facts.st_mtime))

        self._look_through(prefix, note)
        return tuple(sorted(found, key=lambda kept: kept.path))

    def _look_through(self, prefix: str, note: Note) -> None:
        above, slash, _ = prefix.rpartition("/")
        folders = _parts(above) if slash else []
        with _refusing(prefix), self._folder(folders) as folder:
            if folder is not None:
                self._walk(folder, above + slash, prefix, note)

    def _walk(self, folder: int, above: str, prefix: str, note: Note) -> None:
        """All regular files below an open directory whose path begins with `prefix`."""
        with os.scandir(folder) as entries:
            here = []
            for entry in entries:
                path, is_folder = above + entry.name, entry.is_dir(follow_symlinks=False)
                if not is_folder and path.startswith(prefix) and entry.is_file(follow_symlinks=False):
                    note(path, entry)  # while the directory is open: its entries are looked at through it
                here.append((entry.name, is_folder))
        for name, is_folder in here:
            path = above + name
            if path == RESERVED:
                continue
            if is_folder and (path.startswith(prefix) or prefix.startswith(path + "/")):
                try:
                    inner = os.open(name, _OPEN_DIRECTORY, dir_fd=folder)
                except (FileNotFoundError, NotADirectoryError):
                    continue  # gone or replaced since the directory was read
                except PermissionError:
                    note(path + "/", None)
                    continue
                try:
                    self._walk(inner, path + "/", prefix, note)
                finally:
                    os.close(inner)

    def _delete(self, path: str) -> None:
        *folders, name = _parts(path)
        with _refusing(path), self._turn(path):
            with self._folder(folders) as folder:
                if folder is None:
                    return
                try:
                    os.unlink(name, dir_fd=folder)
                except FileNotFoundError:
                    return
                self._sync(folder)
            self._prune(folders)

    def _remove(self, path: str) -> None:
        """Also what is no object: payloads leave links, pipes, empty folders, and folders without any rights."""
        *folders, name = _parts(path)
        with _refusing(path):
            with self._folder(folders) as folder:
                if folder is None or not _is_folder(name, folder):
                    return
                _take_rights(name, folder)
                shutil.rmtree(name, dir_fd=folder)
                self._sync(folder)
            self._prune(folders)

    def _prune(self, folders: Sequence[str]) -> None:
        """Remove directories that the delete emptied: a bucket has none, and a million jobs leave a million."""
        for depth in range(len(folders), 0, -1):
            with self._folder(folders[: depth - 1]) as above:
                if above is None:
                    return
                try:
                    os.rmdir(folders[depth - 1], dir_fd=above)
                except OSError:
                    return  # not empty, or gone already: either way nothing is left to do

    @contextlib.contextmanager
    def _turn(self, path: str) -> Iterator[int]:
        """Hold the lock of this name; the file holds the last generation given under it."""
        lock = self.root / RESERVED / "locks" / f"{zlib.crc32(path.encode()) % STRIPES:02x}"
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _folder(self, parts: Sequence[str], *, make: bool = False) -> Iterator[int | None]:
        """An open directory under the root, reached without following any link; None when it is not there."""
        # The root itself may be reached through links: it is the operator's choice, not a payload's.
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                inner = self._enter(folder, part, make=make)
                if inner is None:
                    yield None
                    return
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def _enter(self, folder: int, part: str, *, make: bool) -> int | None:
        """Open a directory inside an open one; None when there is none. With `make` it is made if absent."""
        try:
            return os.open(part, _OPEN_DIRECTORY, dir_fd=folder)
        except OSError as error:
            if not make and error.errno in _NOT_HERE:
                return None
            if not isinstance(error, FileNotFoundError):
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, 0o700, dir_fd=folder)
            self._sync(folder)
        return os.open(part, _OPEN_DIRECTORY, dir_fd=folder)

    def _forget_abandoned(self) -> None:
        """Remove what writers left that died half-way."""
        probe = self._tmp / secrets.token_hex(16)
        probe.touch(mode=0o600, exist_ok=False)
        now_ns = probe.stat().st_mtime_ns
        probe.unlink()
        for hidden in self._tmp.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if now_ns - hidden.stat().st_mtime_ns > ABANDONED_NS and not _is_held(hidden):
                    hidden.unlink()


class DirectoryDraft:
    """Implements `ports.objects.Draft` as a hidden file; if its writer dies, it is abandoned as any other."""

    def __init__(self, objects: DirectoryObjects, hidden: Path, file: int) -> None:
        self._objects = objects
        self._hidden = hidden
        self._file = file
        self._damaged: Damaged | None = None
        # The system lets one thread at a time write to a file, and has the others spin: they can do better meanwhile.
        self._turn = threading.Lock()

    def __del__(self) -> None:
        # Not before the last thread has let go of it: the number would mean another file.
        os.close(self._file)
        self._hidden.unlink(missing_ok=True)

    def write(self, at: int, parts: Sequence[Buffer]) -> None:
        with _refusing("an object's bytes", self._objects.root), self._turn:
            size = write_parts(self._file, at, parts)
            if self._objects.synced:
                # Has the disk begin now, so that the sync at the end has little left to wait for.
                os.posix_fadvise(self._file, at, size, os.POSIX_FADV_DONTNEED)

    async def name(self, path: str) -> int:
        return await asyncio.to_thread(self._name, path)

    def _name(self, path: str) -> int:
        """On a thread, which keeps the file open also when nobody waits for it any more."""
        if self._damaged is not None:
            raise self._damaged
        try:
            return self._objects.name_draft(self._hidden, self._file, path)
        except Damaged as error:
            self._damaged = error
            raise


def _is_held(hidden: Path) -> bool:
    """Whether the writer of a draft still has it open; of another user's file nobody here can tell."""
    try:
        file = os.open(hidden, _OPEN_FILE)
    except PermissionError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _is_there(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_folder(name: str, folder: int) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _take_rights(name: str, folder: int) -> None:
    """Let the owner empty a folder and all below it, whatever rights were taken away; no link is followed."""
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        Path(f"/proc/self/fd/{place}").chmod(0o700)  # a handle that was opened for its name only has no other way
        inner = os.open(".", _OPEN_DIRECTORY, dir_fd=place)
    finally:
        os.close(place)
    try:
        with os.scandir(inner) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    _take_rights(entry.name, inner)
    finally:
        os.close(inner)


def _parts(path: str) -> list[str]:
    """A path's names, or a refusal of what could mean another place."""
    parts = parts_of(path)
    if parts[0] == RESERVED:
        raise BadInput("path", path, f"begins with {RESERVED}, which is kept for the store itself", "use another name")
    return parts


@contextlib.contextmanager
def _refusing(path: str, root: Path | None = None) -> Iterator[None]:
    """What the operating system refuses, in the port's words: a full disk, a lost right, a link in the way.

    `root` is for what is written there: of a full disk is told how much is left of it, and what helps.
    """
    try:
        yield
    except OSError as error:
        said = f"{path}: {error.strerror}"
        if root is not None and error.errno in _FULL:
            with contextlib.suppress(OSError):  # the disk itself may be gone
                said += f"; {root} has {shutil.disk_usage(root).free} bytes left: make room there and start again,"
                said += " nothing that was stored is lost"
        raise (Forbidden if error.errno in _DENIED else ObjectsError)(said) from error
