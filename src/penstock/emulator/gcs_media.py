"""An object's bytes as both dialects answer them: ranges, hashes, and headers that say which generation it is."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from email.utils import formatdate

from penstock.emulator.crc32c import crc32c
from penstock.emulator.gcs_buckets import KEPT, Object
from penstock.emulator.http_words import Answer, Refused, Request


def headers_of(found: Object) -> dict[str, str]:
    hashes = f"crc32c={found.crc32c}" + (f",md5={found.md5}" if found.md5 else "")
    return {
        "etag": found.etag,
        "last-modified": formatdate(found.updated, usegmt=True),
        "x-goog-generation": str(found.generation),
        "x-goog-metageneration": str(found.metageneration),
        "x-goog-stored-content-length": str(found.size),
        "x-goog-stored-content-encoding": found.kept.get("contentEncoding", "identity"),
        "x-goog-storage-class": "STANDARD",
        "x-goog-hash": hashes,
        "accept-ranges": "bytes",
        "content-type": found.content_type,
        **{KEPT[name]: value for name, value in found.kept.items()},
        **{f"x-goog-meta-{name}": value for name, value in found.metadata.items()},
    }


def media(request: Request, found: Object, data: bytes) -> Answer:
    """The whole, or the range that was asked for; a range that cannot be read is passed over, as HTTP says."""
    headers = headers_of(found)
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if asked is None or asked[0] == "bytes=-":
        return Answer(200, data, headers)
    if asked[1]:
        begin, end = int(asked[1]), min(int(asked[2]) + 1 if asked[2] else found.size, found.size)
    else:
        begin, end = max(0, found.size - int(asked[2])), found.size
    if begin >= end:
        raise Refused(416, "InvalidRange", "requestedRangeNotSatisfiable", "The requested range cannot be satisfied.")
    headers["content-range"] = f"bytes {begin}-{end - 1}/{found.size}"
    return Answer(206, data[begin:end], headers)


def check_digests(headers: Mapping[str, str], body: bytes) -> None:
    """Refuse a body that is not what its sender hashed: it was damaged on the way."""
    said = {"md5": headers.get("content-md5", "")}
    for pair in headers.get("x-goog-hash", "").split(","):
        name, _, value = pair.strip().partition("=")
        said[name] = value or said.get(name, "")
    true: dict[str, Callable[[], bytes]] = {
        "md5": lambda: hashlib.md5(body, usedforsecurity=False).digest(),
        "crc32c": lambda: crc32c(body).to_bytes(4),
    }
    for name, compute in true.items():
        if said.get(name) and said[name] != base64.b64encode(compute()).decode():
            message = f"The {name} you specified in Content-MD5 or x-goog-hash did not match what we computed."
            raise Refused(400, "BadDigest", "invalid", message)
