"""Files that a command writes for its user: into a directory of this machine, into `gs://` or into `s3://`.

The counterpart of `inputs`, with the same names and addresses. A file grows on this machine's disk, whatever its size,
and gets its name when the caller says it is whole: in a directory by a rename beside it, in a bucket by an upload of
its parts. So nothing of it is in memory, and nobody meets half a file. These are the user's files, not our objects:
`ports.objects` and its rules about names do not apply. It must not decide what is written over.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.domain.admission import BadInput
from penstock.objects.inputs import normal_address, store_of
from penstock.ports.objects import ObjectsError

if TYPE_CHECKING:
    from obstore.store import GCSStore, S3Store

PART_BYTES: Final = 16 << 20  #: of an upload; smaller files go in one piece
PARTS_AT_ONCE: Final = 4
_SCHEMES: Final = ("file", "gs", "s3")
_NO_LINKS: Final = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)


class Directory:
    """A folder of this machine; it is made when a file begins to grow."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> set[str]:
        """Of the files in it, not below it."""
        return {each.name for each in self._path.iterdir() if each.is_file()} if self._path.is_dir() else set()

    @contextlib.contextmanager
    def growing(self) -> Iterator[Path]:
        """Where files grow: hidden in the folder itself, so that a rename suffices; each writer has its own."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput("out", str(self._path), f"cannot be made: {error.strerror}", "give a directory") from error
        with tempfile.TemporaryDirectory(dir=self._path, prefix=".penstock-") as folder:
            yield Path(folder)

    def publish(self, file: Path, name: str, *, replace: bool) -> None:
        """Give a file that has grown its name."""
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        try:
            if replace or not self._linked(file, name):
                file.replace(self._path / name)
        except FileExistsError as error:
            raise _there(str(self._path / name)) from error
        except OSError as error:
            raise ObjectsError(f"{self._path / name}: {error.strerror}") from error

    def _linked(self, file: Path, name: str) -> bool:
        """A link never takes another's place; false where there are none, as on buckets mounted with gcsfuse."""
        try:
            os.link(file, self._path / name)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if (self._path / name).exists():
                raise FileExistsError from error
            return False
        return True

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


class Bucket:
    """A folder of a bucket."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        self._address = address
        scheme, _, rest = address.partition("://")
        bucket, _, folder = rest.partition("/")
        self._store: GCSStore | S3Store = store_of(scheme, bucket, environment)
        self._prefix = f"{folder}/" if folder else ""

    def names(self) -> set[str]:
        import obstore

        with self._refusing(""):
            found = obstore.list_with_delimiter(self._store, self._prefix.rstrip("/") or None)
            return {each["path"].rpartition("/")[2] for each in found["objects"]}

    @contextlib.contextmanager
    def growing(self) -> Iterator[Path]:
        """On this machine's disk for temporary files, which TMPDIR names."""
        with tempfile.TemporaryDirectory(prefix="penstock-upload-") as folder:
            yield Path(folder)

    def publish(self, file: Path, name: str, *, replace: bool) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        # An upload in parts cannot be made conditional: of large files the caller knows by `names` what was there.
        whole = file.stat().st_size <= PART_BYTES
        with self._refusing(name):
            try:
                obstore.put(
                    self._store,
                    self._prefix + name,
                    file,
                    mode="create" if whole and not replace else "overwrite",
                    use_multipart=not whole,
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS_AT_ONCE,
                )
            except AlreadyExistsError as error:
                raise _there(f"{self._address}/{name}") from error

    def remove(self, name: str) -> None:
        import obstore

        with self._refusing(name), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, self._prefix + name)

    @contextlib.contextmanager
    def _refusing(self, name: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            if isinstance(error, BadInput):
                raise
            raise ObjectsError(f"{self._address}/{name}: {(str(error).splitlines() or [''])[0][:500]}") from error


Folder = Directory | Bucket


def open_folder(address: str, environment: Mapping[str, str] = os.environ) -> Folder:
    """A folder to write into, by a path or an address; nothing is made or asked yet."""
    _check_place("out", address)
    place = normal_address(address)
    return Bucket(place, environment) if "://" in place else Directory(Path(place))


def folder_and_name(field: str, address: str) -> tuple[str, str]:
    """The folder and the name of a file that an address means."""
    _check_place(field, address)
    place = normal_address(address)
    if "://" not in place:
        return str(Path(place).parent), Path(place).name
    folder, _, name = place.rpartition("/")
    if folder.endswith(":/"):
        raise BadInput(field, address, "names no file", "give a path, gs://BUCKET/FILE or s3://BUCKET/FILE")
    return folder, name


def _check_place(field: str, address: str) -> None:
    scheme, colon, rest = address.partition("://")
    if colon and (scheme not in _SCHEMES or not rest.strip("/")):
        raise BadInput(field, address, "is no place we can write to", "give a path, gs://BUCKET/… or s3://BUCKET/…")


def _there(name: str) -> BadInput:
    return BadInput("out", name, "is there already", "choose another place, or say --replace")
