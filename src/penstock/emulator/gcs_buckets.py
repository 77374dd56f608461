"""What the emulated Cloud Storage holds: buckets, objects, generations, preconditions, pages of a listing.

Both dialects call it, on one event loop; no method waits, so checking a precondition and storing are one step, as the
real service promises. Objects are in memory, or with a directory each in a file of its own, found again at the next
start. `history` is the truth for checkers: every change there ever was. It must not know HTTP.
"""

from __future__ import annotations

import base64
import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from penstock.emulator.crc32c import crc32c
from penstock.emulator.http_words import Refused, bad

#: Rules for bucket names, shortened to what clients may really send.
_NAME_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")
NAME_BYTES_MAX: Final = 1024
#: What the service keeps of an object and gives back as headers, by names in the JSON dialect.
KEPT: Final = {
    "cacheControl": "cache-control",
    "contentDisposition": "content-disposition",
    "contentEncoding": "content-encoding",
    "contentLanguage": "content-language",
}
PAGE_MAX: Final = 1000


class Object(msgspec.Struct, frozen=True):
    """One generation of one name, without its bytes."""

    name: str
    generation: int
    metageneration: int
    size: int
    created: float
    updated: float
    content_type: str
    metadata: Mapping[str, str]
    md5: str  #: base64; empty for what was composed of parts: the service gives none
    crc32c: str  #: base64
    kept: Mapping[str, str] = {}  #: what `KEPT` names, by its JSON name
    components: int = 0  #: of how many it was composed; 0: made by one request

    @property
    def etag(self) -> str:
        """As the XML dialect gives it: the MD5 where there is one, so that equal bytes have equal tags."""
        return f'"{base64.b64decode(self.md5).hex()}"' if self.md5 else f'"-{self.generation}"'


class Conditions(NamedTuple):
    """What must hold for a call to have an effect; None: nothing is asked. Generation 0 is absence."""

    generation: int | None = None
    not_generation: int | None = None
    metageneration: int | None = None
    not_metageneration: int | None = None


ALWAYS: Final = Conditions()


class Page(NamedTuple):
    objects: tuple[Object, ...]
    prefixes: tuple[str, ...]
    next: str | None  #: the last name or prefix of this page, when there is more


class Asked(NamedTuple):
    """A listing as either dialect asks for it."""

    prefix: str = ""
    delimiter: str = ""
    after: str = ""  #: the token of the page before, or a name to begin behind
    first: str = ""  #: the first name that may be listed
    before: str = ""  #: names from here on are not listed
    most: int = PAGE_MAX


class Change(msgspec.Struct, frozen=True):
    """One true change; `md5` is that of the bytes, "" for a deletion."""

    verb: str
    bucket: str
    name: str
    generation: int
    md5: str


class _Bucket:
    def __init__(self, created: float) -> None:
        self.created = created
        self.objects: dict[str, Object] = {}
        self.names: list[str] = []
        self.data: dict[str, bytes] = {}


class Buckets:
    """All buckets. With a directory, their objects are files in it."""

    def __init__(self, names: Iterable[str], now: Callable[[], float], directory: Path | None = None) -> None:
        self.history: list[Change] = []
        self._now = now
        self._directory = directory
        self._buckets: dict[str, _Bucket] = {}
        self._generation = 0
        if directory is not None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
                self._load(folder)
        for name in names:
            if name not in self._buckets:
                self.create(name)

    # --- buckets ---
    def create(self, name: str) -> None:
        if not 3 <= len(name) <= 63 or not set(name) <= _NAME_CHARACTERS or not (name[0] + name[-1]).isalnum():
            raise bad(f"Invalid bucket name: '{name}'")
        if name in self._buckets:
            message = "Your previous request to create the named bucket succeeded and you already own it."
            raise Refused(409, "BucketAlreadyOwnedByYou", "conflict", message)
        if self._directory is not None:
            (self._directory / name).mkdir(mode=0o700, exist_ok=True)
        self._buckets[name] = _Bucket(self._now())

    def names(self) -> list[str]:
        return sorted(self._buckets)

    def created(self, name: str) -> float:
        return self._bucket(name).created

    def drop(self, name: str) -> None:
        if self._bucket(name).objects:
            raise Refused(409, "BucketNotEmpty", "conflict", "The bucket you tried to delete is not empty.")
        if self._directory is not None:
            (self._directory / name).rmdir()
        del self._buckets[name]

    # --- objects ---
    def put(
        self,
        bucket: str,
        name: str,
        data: bytes,
        conditions: Conditions = ALWAYS,
        *,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
        kept: Mapping[str, str] | None = None,
        components: int = 0,
    ) -> Object:
        if not name or len(name.encode()) > NAME_BYTES_MAX or "\r" in name or "\n" in name or name in (".", ".."):
            raise bad(f"Invalid object name: {name[:80]!r}")
        held = self._bucket(bucket)
        self.check(bucket, name, conditions)
        now = self._now()
        self._generation = max(self._generation + 1, int(now * 1e6))
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        made = Object(
            name=name,
            generation=self._generation,
            metageneration=1,
            size=len(data),
            created=now,
            updated=now,
            content_type=content_type or "application/octet-stream",
            metadata=dict(metadata or {}),
            md5="" if components else base64.b64encode(digest).decode(),
            crc32c=base64.b64encode(crc32c(data).to_bytes(4)).decode(),
            kept=dict(kept or {}),
            components=components,
        )
        if self._directory is None:
            held.data[name] = data
        else:
            self._save(bucket, made, data)
        self._enter(held, made)
        self.history.append(Change("put", bucket, name, made.generation, digest.hex()))
        return made

    def get(self, bucket: str, name: str, generation: int | None = None) -> Object:
        found = self._bucket(bucket).objects.get(name)
        if found is None or generation not in (None, found.generation):
            raise Refused(404, "NoSuchKey", "notFound", f"No such object: {bucket}/{name}")
        return found

    def read(self, bucket: str, name: str) -> bytes:
        self.get(bucket, name)
        if self._directory is None:
            return self._bucket(bucket).data[name]
        return _split(self._file(bucket, name))[1]

    def delete(self, bucket: str, name: str, conditions: Conditions = ALWAYS) -> None:
        found = self.get(bucket, name)
        self.check(bucket, name, conditions)
        held = self._bucket(bucket)
        del held.objects[name]
        del held.names[bisect_left(held.names, name)]
        if self._directory is None:
            del held.data[name]
        else:
            self._file(bucket, name).unlink()
        self.history.append(Change("delete", bucket, name, found.generation, ""))

    def patch(
        self,
        bucket: str,
        name: str,
        conditions: Conditions,
        metadata: Mapping[str, str] | None,
        content_type: str,
        kept: Mapping[str, str],
    ) -> Object:
        """Change what is said of an object: its metageneration rises, its generation stays."""
        found = self.get(bucket, name)
        self.check(bucket, name, conditions)
        changed = msgspec.structs.replace(
            found,
            metageneration=found.metageneration + 1,
            updated=self._now(),
            metadata=found.metadata if metadata is None else dict(metadata),
            content_type=content_type or found.content_type,
            kept=kept,
        )
        if self._directory is not None:
            self._save(bucket, changed, self.read(bucket, name))
        self._bucket(bucket).objects[name] = changed
        return changed

    def check(self, bucket: str, name: str, conditions: Conditions, *, reading: bool = False) -> None:
        """Raise unless the conditions hold now."""
        there = self._bucket(bucket).objects.get(name)
        generation, metageneration = (there.generation, there.metageneration) if there is not None else (0, 0)
        wanted = (conditions.generation, generation), (conditions.metageneration, metageneration)
        unwanted = (conditions.not_generation, generation), (conditions.not_metageneration, metageneration)
        if any(asked is not None and asked != is_now for asked, is_now in wanted):
            raise _unmet(412)
        if any(asked is not None and asked == is_now for asked, is_now in unwanted):
            raise _unmet(304 if reading else 412)

    def page(self, bucket: str, asked: Asked) -> Page:
        held = self._bucket(bucket)
        objects: list[Object] = []
        prefixes: list[str] = []
        last = asked.after
        at = max(bisect_left(held.names, max(asked.prefix, asked.first)), bisect_right(held.names, asked.after))
        while at < len(held.names):
            name = held.names[at]
            if not name.startswith(asked.prefix) or (asked.before and name >= asked.before):
                break
            cut = name.find(asked.delimiter, len(asked.prefix)) if asked.delimiter else -1
            shown = name if cut < 0 else name[: cut + len(asked.delimiter)]
            if cut >= 0:
                # Everything under a prefix that is shown once is passed over.
                at = bisect_left(held.names, shown[:-1] + chr(ord(shown[-1]) + 1), at)
            else:
                at += 1
            if cut >= 0 and shown <= asked.after:
                continue
            if len(objects) + len(prefixes) >= asked.most:
                return Page(tuple(objects), tuple(prefixes), last)
            last = shown
            if cut < 0:
                objects.append(held.objects[name])
            else:
                prefixes.append(shown)
        return Page(tuple(objects), tuple(prefixes), None)

    # --- inside ---
    def _bucket(self, name: str) -> _Bucket:
        found = self._buckets.get(name)
        if found is None:
            raise Refused(404, "NoSuchBucket", "notFound", "The specified bucket does not exist.")
        return found

    def _enter(self, held: _Bucket, made: Object) -> None:
        if made.name not in held.objects:
            insort(held.names, made.name)
        held.objects[made.name] = made

    def _file(self, bucket: str, name: str) -> Path:
        assert self._directory is not None
        return self._directory / bucket / hashlib.sha256(name.encode()).hexdigest()

    def _save(self, bucket: str, made: Object, data: bytes) -> None:
        file = self._file(bucket, made.name)
        half = file.with_suffix(".half")
        half.write_bytes(msgspec.json.encode(made) + b"\n" + data)
        half.replace(file)

    def _load(self, folder: Path) -> None:
        held = self._buckets[folder.name] = _Bucket(self._now())
        for file in folder.iterdir():
            if file.suffix == ".half":
                file.unlink()  # its writer was killed before the name was given
                continue
            found = msgspec.json.decode(_split(file)[0], type=Object)
            self._generation = max(self._generation, found.generation)
            self._enter(held, found)


def _split(file: Path) -> tuple[bytes, bytes]:
    about, _, data = file.read_bytes().partition(b"\n")
    return about, data


def _unmet(status: int) -> Refused:
    message = "At least one of the pre-conditions you specified did not hold."
    return Refused(status, "PreconditionFailed", "conditionNotMet", message)
