"""Which bucket an address means: a directory of this machine, a bucket of Cloud Storage, or one of S3.

The server opens its objects here, once. A bucket that is not there, or not ours, is told at the start; one that cannot
be reached just now is not, because a server that starts during an outage must come up when it ends. The bucket adapter
is imported when it is needed, so that an installation on a directory does not load obstore.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from penstock.domain.admission import BadInput
from penstock.objects.directory import DirectoryObjects
from penstock.objects.names import parts_of
from penstock.ports.objects import ObjectsError, Stock
from penstock.wiring.clock import SystemClock
from penstock.wiring.home import Unusable

logger = logging.getLogger(__name__)

_BUCKETS: Final = ("gs", "s3")


def open_objects(address: str, environment: Mapping[str, str] = os.environ) -> tuple[Stock, str]:
    """The bucket at an address, and the address as agents understand it."""
    parts = urlsplit(address)
    if parts.scheme in _BUCKETS:
        return _open_bucket(address, environment)
    if parts.scheme not in ("", "file"):
        rule = f"is a {parts.scheme}:// address, and objects are kept in a directory, in gs:// or in s3://"
        raise BadInput("root", address, rule, "give a directory, gs://BUCKET/PREFIX or s3://BUCKET/PREFIX")
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        raise BadInput("root", address, "names another machine", "write file:///path")
    path = Path(unquote(parts.path) if parts.scheme == "file" else address).expanduser()
    if not path.is_absolute():
        path = path.resolve()
    return DirectoryObjects(path), path.as_uri()


def _open_bucket(address: str, environment: Mapping[str, str]) -> tuple[Stock, str]:
    scheme, _, rest = address.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    if not bucket or not set(bucket) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_."):
        raise BadInput("root", address, "names no bucket", f"write {scheme}://BUCKET or {scheme}://BUCKET/PREFIX")
    if prefix:
        try:
            parts_of(prefix)
        except BadInput as error:
            raise BadInput("root", address, "has a prefix that no object may have", str(error)) from error
        prefix += "/"
    from penstock.objects.bucket import NoBucket, open_gcs, open_s3

    found = (
        open_gcs(bucket, prefix, environment)
        if scheme == "gs"
        else open_s3(bucket, prefix, environment, SystemClock().now)
    )
    try:
        found.probe()
    except NoBucket as error:
        raise Unusable(f"root: {error}") from error
    except ObjectsError as error:
        logger.warning("the bucket does not answer yet: %s", error)
    return found, f"{scheme}://{bucket}/{prefix}".rstrip("/")
