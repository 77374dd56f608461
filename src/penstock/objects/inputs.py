"""Files that are somebody else's: datasets, tokenizers, weights; on this machine, in `gs://`, `s3://` or `hf://`; read
only.

Extraction finds them by address or glob, and reads them through `open_input`, which is an ordinary seekable binary file
wherever the bytes lie. In a bucket it asks for a range at a time and names the version it began with, so that a file
that is replaced meanwhile is an error and not a mixture. Of a file of this machine only the size is compared here:
whoever reads it compares what was read with a hash (`extract.pieces`, `objects.hashing`). A file of the Hub (`hf://`)
is a file of this machine once it is fetched. Names are taken as they are: these are not our objects, and
`ports.objects` and its rules about names do not apply. Nothing here writes.
"""

from __future__ import annotations

import functools
import glob
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple, cast
from urllib.parse import unquote

from typing_extensions import override

from penstock.domain.admission import BadInput
from penstock.objects import hub
from penstock.ports.objects import ObjectsError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from obstore import GetOptions
    from obstore.store import GCSStore, S3Store

#: Asked of a bucket at once: at 50 ms an answer, enough for the speed of one stream.
RANGE_BYTES: Final = 8 << 20
_MAGIC: Final = re.compile(r"[*?[]")
_SCHEMES: Final = ("gs", "s3", hub.SCHEME)
_NAMED: Final = ("AWS_", "GOOGLE_", "STORAGE_")  #: variables that decide which store is meant, and whose


class Input(NamedTuple):
    """One file: its whole address, its size, and which version of it (buckets only; "" elsewhere)."""

    address: str
    size: int
    tag: str


class Changed(ObjectsError):
    """The file is not the one that was listed: it was replaced, shortened or removed."""


def find_inputs(address: str, environment: Mapping[str, str] = os.environ) -> tuple[Input, ...]:
    """The files an address means, in the order of their names: a file, all below a folder, or those a glob matches.

    Hidden files (`.name`) are not looked at in folders. Nothing found is an empty answer.
    """
    scheme, rest = _split(address)
    if scheme == hub.SCHEME:
        above = f"{scheme}://{'@'.join(hub.parse(rest)[:2])}"
        return tuple(Input(f"{above}/{file.path}", file.size, file.tag) for file in hub.files(rest, environment))
    if scheme:
        return _find_in_bucket(scheme, rest, environment)
    if not _MAGIC.search(rest) or Path(rest).exists():  # a folder called `a[1]` is a folder
        path = Path(rest)
        found = sorted(_below(path)) if path.is_dir() else [path] if path.is_file() else []
    else:
        matches = (Path(name) for name in glob.glob(rest, recursive=True))  # noqa: PTH207 (Path.glob has no absolute patterns)
        found = sorted({file for match in matches for file in (_below(match) if match.is_dir() else [match])})
    return tuple(Input(str(path), path.stat().st_size, "") for path in found)


def is_folder(address: str) -> bool:
    """Whether everything below the address is meant; in a bucket a folder is only known by its slash."""
    scheme, rest = _split(address)
    if scheme == hub.SCHEME:
        return not hub.parse(rest)[2]
    return rest.endswith("/") if scheme else Path(rest).is_dir()


def open_input(file: Input, environment: Mapping[str, str] = os.environ) -> BinaryIO:
    """The bytes of a file, to be read from anywhere in it."""
    scheme, rest = _split(file.address)
    if scheme == hub.SCHEME:
        return hub.fetch(rest, file.size, file.tag, environment).open("rb", buffering=1 << 20)
    if scheme:
        return _open_in_bucket(file, environment, RANGE_BYTES)
    size = Path(rest).stat().st_size
    if size != file.size:
        raise Changed(f"{file.address}: has {size} bytes, and had {file.size} when it was listed; it was changed")
    return Path(rest).open("rb", buffering=1 << 20)


def read_beginning(file: Input, count: int, environment: Mapping[str, str] = os.environ) -> bytes:
    """The first bytes of a file, of which nothing more is needed: it is not fetched for them."""
    scheme, rest = _split(file.address)
    if scheme == hub.SCHEME:
        return hub.beginning(rest, file.size, count, environment)
    # A buffer is always filled: one of the usual size would ask a bucket for much more than is wanted.
    buffer = min(count, RANGE_BYTES)
    with _open_in_bucket(file, environment, buffer) if scheme else open_input(file, environment) as opened:
        return opened.read(count)


def read_input(address: str, environment: Mapping[str, str] = os.environ, *, at_most: int) -> bytes | None:
    """A small file whole, or None where there is none."""
    found = find_inputs(address, environment)
    exact = [file for file in found if file.address == normal_address(address)]
    if not exact:
        return None
    if exact[0].size > at_most:
        raise BadInput("file", address, f"has {exact[0].size} bytes, more than {at_most}", "is it the right file?")
    with open_input(exact[0], environment) as file:
        return file.read()


def normal_address(address: str) -> str:
    """An address as `find_inputs` gives those of the files it finds: absolute, without a slash at its end."""
    scheme, rest = _split(address)
    return (f"{scheme}://{rest}" if scheme else rest).rstrip("/")


def _split(address: str) -> tuple[str, str]:
    """("gs", "bucket/path") or ("", "/a/path")."""
    scheme, colon, rest = address.partition("://")
    if not colon:
        # Absolute, because what is found is written into plans that other processes read.
        return "", str(Path(address).expanduser().absolute())
    if scheme == "file":
        return "", unquote(rest.removeprefix("localhost"))
    if scheme not in _SCHEMES:
        raise BadInput("data", address, "is no place we can read", "give a path, gs://BUCKET/… or s3://BUCKET/…")
    if not rest.partition("/")[0]:
        raise BadInput("data", address, "names no bucket", f"write {scheme}://BUCKET/…")
    return scheme, rest


def _below(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def store_of(scheme: str, bucket: str, environment: Mapping[str, str]) -> GCSStore | S3Store:
    """One for each bucket, because each asks for its own credential and opens its own connections."""
    named = tuple(sorted(pair for pair in environment.items() if pair[0].startswith(_NAMED)))
    return _made_store(scheme, bucket, named)


@functools.lru_cache(64)
def _made_store(scheme: str, bucket: str, named: tuple[tuple[str, str], ...]) -> GCSStore | S3Store:
    from penstock.objects.bucket import gcs_store, s3_store

    return gcs_store(bucket, dict(named)) if scheme == "gs" else s3_store(bucket, dict(named))


def _open_in_bucket(file: Input, environment: Mapping[str, str], buffer: int) -> BinaryIO:
    scheme, rest = _split(file.address)
    bucket, _, path = rest.partition("/")
    ranged = _Ranged(store_of(scheme, bucket, environment), path, file)
    return cast("BinaryIO", io.BufferedReader(ranged, buffer))


def _find_in_bucket(scheme: str, rest: str, environment: Mapping[str, str]) -> tuple[Input, ...]:
    import obstore
    from obstore.exceptions import BaseError

    bucket, _, pattern = rest.partition("/")
    magic = _MAGIC.search(pattern)
    folder = (pattern[: magic.start()] if magic else pattern).rpartition("/")[0]
    if magic:
        wanted = re.compile(_expression(pattern))
    else:
        wanted = re.compile(re.escape(pattern.rstrip("/")) + "(?:/.*)?" if pattern else ".*")
    found = []
    try:
        for page in obstore.list(store_of(scheme, bucket, environment), folder or None):
            for each in page:
                path = each["path"]
                hidden = any(part.startswith(".") for part in path.removeprefix(pattern).split("/"))
                if wanted.fullmatch(path) and not hidden:
                    found.append(Input(f"{scheme}://{bucket}/{path}", each["size"], each["e_tag"] or ""))
    except (BaseError, OSError, ValueError) as error:
        raise ObjectsError(f"{scheme}://{rest}: {(str(error).splitlines() or [''])[0][:500]}") from error
    return tuple(sorted(found))


def _expression(pattern: str) -> str:
    """A glob as a regular expression: `*` and `?` stay within a name, `**/` is any number of folders."""
    out, place = "", 0
    while place < len(pattern):
        if pattern.startswith("**/", place):
            out, place = out + "(?:.*/)?", place + 3
        elif pattern.startswith("**", place):
            out, place = out + ".*", place + 2
        elif pattern[place] in "*?":
            out, place = out + ("[^/]*" if pattern[place] == "*" else "[^/]"), place + 1
        elif pattern[place] == "[" and (end := pattern.find("]", place + 2)) > 0:
            inside = pattern[place + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            out, place = out + "[" + ("^" + inside[1:] if inside[0] == "!" else inside) + "]", end + 1
        else:
            out, place = out + re.escape(pattern[place]), place + 1
    return out


class _Ranged(io.RawIOBase):
    """An object as a seekable file; each read is one request for a range of the version that was listed."""

    def __init__(self, store: GCSStore | S3Store, path: str, file: Input) -> None:
        super().__init__()
        self._store = store
        self._path = path
        self._file = file
        self._at = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    @override
    def tell(self) -> int:
        return self._at

    @override
    def readinto(self, buffer: WriteableBuffer) -> int:
        import obstore
        from obstore.exceptions import BaseError, PreconditionError

        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._file.size)
        if end <= self._at:
            return 0
        options: GetOptions = {"range": (self._at, end)}
        if self._file.tag:  # not every store has one
            options["if_match"] = self._file.tag
        try:
            got = obstore.get(self._store, self._path, options=options).bytes()
        except (PreconditionError, FileNotFoundError) as error:
            raise Changed(f"{self._file.address}: is no longer the file that was listed; it was changed") from error
        except (BaseError, ValueError) as error:
            raise ObjectsError(f"{self._file.address}: {(str(error).splitlines() or [''])[0][:500]}") from error
        count = len(got)
        view[:count] = memoryview(got)
        self._at += count
        return count
