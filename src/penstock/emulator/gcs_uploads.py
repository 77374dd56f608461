"""Uploads that take more than one request: resumable ones (JSON dialect) and those in parts (XML dialect).

The dialects call it. A resumable upload keeps what arrived when the connection was cut, in whole quarters of a MiB as
the real service does, says so when asked, and goes on saying that it is done after it is. Preconditions are checked
when it begins and again when it ends.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Final, NamedTuple

from penstock.emulator.gcs_buckets import ALWAYS, Buckets, Conditions, Object
from penstock.emulator.gcs_media import check_digests
from penstock.emulator.http_words import Refused, bad

#: What is kept of a chunk that was cut is a multiple of this.
QUANTUM: Final = 256 << 10
_RANGE: Final = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


class Wanted(NamedTuple):
    """What an upload makes when it is done."""

    bucket: str
    name: str
    conditions: Conditions
    content_type: str
    metadata: Mapping[str, str]
    kept: Mapping[str, str]


class Progress(NamedTuple):
    """How far an upload is; `made` once it is done."""

    received: int
    made: Object | None


class _Resumable:
    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.data = bytearray()
        self.made: Object | None = None


class _InParts:
    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.parts: dict[int, bytes] = {}


class Uploads:
    """All uploads under way. They do not outlive the process; clients begin again."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._resumable: dict[str, _Resumable] = {}
        self._in_parts: dict[str, _InParts] = {}

    def about(self, upload: str) -> Wanted | None:
        found = self._resumable.get(upload) or self._in_parts.get(upload)
        return found.wanted if found is not None else None

    # --- resumable ---
    def begin(self, wanted: Wanted) -> str:
        self._buckets.check(wanted.bucket, wanted.name, wanted.conditions)
        upload = secrets.token_urlsafe(24)
        self._resumable[upload] = _Resumable(wanted)
        return upload

    def take(self, upload: str, headers: Mapping[str, str], body: bytes) -> Progress:
        """Bytes that arrived, or with `bytes */…` a question how far it is. The last may bring the whole's hash."""
        found = self._resumable.get(upload)
        if found is None:
            raise Refused(404, "NoSuchUpload", "notFound", "No such upload; begin again")
        if found.made is not None:
            return Progress(found.made.size, found.made)
        begin, total = self._place(found, headers.get("content-range"), body)
        found.data[begin:] = body
        if total is None or len(found.data) < total:
            return Progress(len(found.data), None)
        wanted = found.wanted
        check_digests(headers, bytes(found.data))
        found.made = self._buckets.put(
            wanted.bucket,
            wanted.name,
            bytes(found.data),
            wanted.conditions,
            content_type=wanted.content_type,
            metadata=wanted.metadata,
            kept=wanted.kept,
        )
        found.data.clear()
        return Progress(found.made.size, found.made)

    def cut(self, upload: str, content_range: str | None, body: bytes) -> None:
        """The connection broke when half of the body had arrived."""
        found = self._resumable.get(upload)
        if found is None or found.made is not None:
            return
        begin, _ = self._place(found, content_range, body)
        found.data[begin:] = body[: len(body) // 2 // QUANTUM * QUANTUM]

    def abandon(self, upload: str) -> None:
        if self._resumable.pop(upload, None) is None:
            raise Refused(404, "NoSuchUpload", "notFound", "No such upload")

    def _place(self, found: _Resumable, content_range: str | None, body: bytes) -> tuple[int, int | None]:
        """Where the body begins, and the whole size if the client knows it."""
        if content_range is None:
            return 0, len(body)
        read = _RANGE.fullmatch(content_range)
        if read is None:
            raise bad(f"Content-Range: {content_range!r} cannot be read")
        begin = int(read[1]) if read[1] is not None else len(found.data)
        if begin > len(found.data) or (read[1] is not None and int(read[2]) - begin + 1 != len(body)):
            raise bad(f"Content-Range: {content_range!r} does not fit what has arrived ({len(found.data)} bytes)")
        return begin, int(read[3]) if read[3] != "*" else None

    # --- in parts ---
    def begin_in_parts(self, wanted: Wanted) -> str:
        self._buckets.check(wanted.bucket, wanted.name, ALWAYS)
        upload = secrets.token_urlsafe(24)
        self._in_parts[upload] = _InParts(wanted)
        return upload

    def take_part(self, upload: str, number: int, body: bytes) -> None:
        if not 1 <= number <= 10_000:
            raise bad(f"partNumber: {number} is not from 1 to 10000")
        self._parts(upload)[number] = body

    def complete(self, upload: str, numbers: list[int], conditions: Conditions) -> Object:
        parts = self._parts(upload)
        if not numbers or numbers != sorted(set(numbers)) or not set(numbers) <= parts.keys():
            raise Refused(400, "InvalidPart", "invalid", "The parts named are not those that arrived, in rising order")
        wanted = self._in_parts[upload].wanted
        made = self._buckets.put(
            wanted.bucket,
            wanted.name,
            b"".join(parts[number] for number in numbers),
            conditions,
            content_type=wanted.content_type,
            metadata=wanted.metadata,
            kept=wanted.kept,
            components=len(numbers),
        )
        del self._in_parts[upload]
        return made

    def abandon_parts(self, upload: str) -> None:
        self._parts(upload)
        del self._in_parts[upload]

    def _parts(self, upload: str) -> dict[int, bytes]:
        found = self._in_parts.get(upload)
        if found is None:
            raise Refused(404, "NoSuchUpload", "notFound", "The requested upload was not found.")
        return found.parts
