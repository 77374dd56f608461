"""Which bucket an address means: a directory of this machine, a bucket of Cloud Storage, or one of S3.

`wiring.roots` opens the server's objects with it, extraction its runs. The bucket adapter is imported when it is
needed, so that an installation on a directory does not load obstore. It must not ask whether the bucket answers.
"""

from __future__ import annotations

import enum
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from penstock.domain.admission import BadInput
from penstock.objects.directory import DirectoryObjects
from penstock.objects.names import parts_of

if TYPE_CHECKING:
    from penstock.objects.bucket import BucketObjects

_BUCKETS: Final = ("gs", "s3")


class Use(enum.Enum):
    """What a directory is wanted for."""

    MAKE = "make"  #: to write to; it is made where it is missing
    WRITE = "write"  #: to write to; it has to be there
    READ = "read"  #: nothing is written: it may be another user's, or on a disk that is read only


def open_address(
    field: str, address: str, environment: Mapping[str, str], *, use: Use = Use.MAKE, synced: bool = True
) -> tuple[DirectoryObjects | BucketObjects, str]:
    """The objects at an address, and the address as any process of any machine that reaches it understands it.

    `synced` is for a directory: whether what was written is on the disk when the writer is told so.
    """
    parts = urlsplit(address)
    scheme = parts.scheme
    if scheme and not address.startswith(scheme):
        raise BadInput(field, address, "does not begin with its scheme in small letters", f"write {scheme}://…")
    if scheme in _BUCKETS:
        return _open_bucket(field, address, environment)
    if scheme not in ("", "file"):
        rule = f"is a {scheme}:// address, and objects are kept in a directory, in gs:// or in s3://"
        raise BadInput(field, address, rule, "give a directory, gs://BUCKET/PREFIX or s3://BUCKET/PREFIX")
    if scheme == "file" and parts.netloc not in ("", "localhost"):
        raise BadInput(field, address, "names another machine", "write file:///path")
    path = Path(unquote(parts.path) if scheme == "file" else address).expanduser()
    if not path.is_absolute():
        path = path.resolve()
    if use is not Use.MAKE:
        _check_there(field, address, path)
    return DirectoryObjects(path, synced=synced, to_read=use is Use.READ), path.as_uri()


def _check_there(field: str, address: str, path: Path) -> None:
    try:
        there = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        there = False
    except OSError as error:  # a folder above that is closed to us, a name that is too long
        raise BadInput(
            field, address, f"cannot be opened: {error.strerror}", "give another, or have it opened"
        ) from error
    if not there:
        raise BadInput(field, address, "is no directory", "give one that is there, gs://… or s3://…")


def _open_bucket(field: str, address: str, environment: Mapping[str, str]) -> tuple[BucketObjects, str]:
    scheme, _, rest = address.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    if not bucket or not set(bucket) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_."):
        raise BadInput(field, address, "names no bucket", f"write {scheme}://BUCKET or {scheme}://BUCKET/PREFIX")
    if prefix:
        try:
            parts_of(prefix)
        except BadInput as error:
            raise BadInput(field, address, "has a prefix that no object may have", str(error)) from error
        prefix += "/"
    from penstock.objects.bucket import open_gcs, open_s3

    found = (
        open_gcs(bucket, prefix, environment) if scheme == "gs" else open_s3(bucket, prefix, environment, time.time)  # noqa: TID251 (numbers of writes, and nothing is decided)
    )
    return found, f"{scheme}://{bucket}/{prefix}".rstrip("/")
