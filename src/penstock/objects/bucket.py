"""Cloud buckets behind `ports.objects`: `gs://` and `s3://` through obstore, which retries what may be retried.

`wiring.roots` opens them. Cloud Storage numbers every write of a name, and those numbers are the generations. S3 has no
numbers, so each object carries its own as metadata: about the time in nanoseconds, one above the number that is there.
A replacing write there is conditional on what the number was read from, so that two writers never share one; after a
delete the number rises as the writers' clocks do. A lost answer can make a retry meet its own success: `put_new` then
says `AlreadyThere`, as the port allows. Each object carries the SHA-256 of its bytes, which every read compares, and
each write is compared with what the service says it got (S3 is told a checksum and compares by itself). An object is
made by one PUT, whole or not at all; it must not use uploads in parts.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import GCSStore, S3Store
from typing_extensions import override

from penstock.objects.names import parts_of
from penstock.ports.objects import AlreadyThere, Damaged, Forbidden, Kept, ObjectsError, Stored

if TYPE_CHECKING:
    from obstore import Attributes, PutMode
    from obstore.store import ClientConfig, RetryConfig, S3Config

#: Under which name an object on S3 carries its generation.
STAMP: Final = "penstock-generation"
#: Under which name every object carries the SHA-256 of its bytes.
SHA256: Final = "penstock-sha256"
#: A read whose bytes were damaged on the way is done again, this often.
READS: Final = 2
#: A write whose bytes were damaged on the way is done again, this often.
WRITES: Final = 3
#: Writers that replace one name at the same time take turns, this often.
TURNS: Final = 50
PAGE: Final = 1000
DELETES_AT_ONCE: Final = 16
_RETRY: Final[RetryConfig] = {
    "max_retries": 5,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=3), "base": 2},
}
_DENIED: Final = re.compile(r"status code: 40[13]\b")
_MD5: Final = re.compile("[0-9a-f]{32}")
_LONG_BYTES: Final = 1 << 20  #: hashing more than this would hold up the event loop
_CONNECT_S: Final = 5
_WHOLE_S: Final = 120  #: one request, with the largest artifact on a slow line
_HANDOVER_S: Final = (0.001, 10.0)  #: how often a process that ends looks for answers on their way, and how long


class NoBucket(Forbidden):
    """There is no such bucket, or it is not for us."""


class BucketObjects:
    """Implements `ports.objects.Ranged` on Cloud Storage, whose writes are numbered by the service."""

    def __init__(self, store: GCSStore | S3Store, address: str, prefix: str, open_at: str | None = None) -> None:
        """`prefix` is "" or ends with a slash: everything is kept under it. `open_at`: where nobody asks who reads."""
        self._store = store
        self._open_at = open_at
        self._address = address
        self._prefix = prefix

    def probe(self) -> None:
        """Raise `NoBucket` or `ObjectsError` unless the bucket can be listed. Blocks: for the start of a process."""
        with self._refusing(""):
            next(iter(obstore.list(self._store, self._prefix.rstrip("/") or None, chunk_size=1)), None)

    async def put(self, path: str, data: bytes) -> int:
        parts_of(path)
        with self._refusing(path):
            return await self._write(path, data, "overwrite")

    async def put_new(self, path: str, data: bytes) -> int:
        parts_of(path)
        with self._refusing(path):
            return await self._write(path, data, "create")

    async def get(self, path: str) -> Stored | None:
        parts_of(path)
        with self._refusing(path):
            for _ in range(READS):
                try:
                    found = await obstore.get_async(self._store, self._prefix + path)
                    data = (await found.buffer_async()).to_bytes()
                except FileNotFoundError as error:
                    self._must_be_there(error)
                    return None
                if found.attributes.get(SHA256) in (None, await _sha256(data)):  # None: somebody else put it there
                    return Stored(data, self._generation(found.meta["version"], found.attributes))
        raise Damaged(f"{self._address}: {path}: the bytes are not those that were written; they are damaged")

    async def get_range(self, path: str, start: int, stop: int) -> bytes | None:
        parts_of(path)
        if stop <= start:
            return b""
        with self._refusing(path):
            try:
                return (
                    await obstore.get_range_async(self._store, self._prefix + path, start=start, end=stop)
                ).to_bytes()
            except FileNotFoundError as error:
                self._must_be_there(error)
                return None

    async def list(self, prefix: str) -> tuple[str, ...]:
        return tuple(kept.path for kept in await self.survey(prefix))

    async def survey(self, prefix: str) -> tuple[Kept, ...]:
        whole = self._prefix + prefix
        above, slash, rest = whole.rpartition("/")
        if slash:
            parts_of(above)
        found: dict[str, Kept] = {}
        with self._refusing(prefix):
            # obstore lists folders. What is left of the prefix only says where in the folder to begin and to end.
            behind = whole[:-1] if len(rest) > 1 else None
            async for page in obstore.list(self._store, above or None, offset=behind, chunk_size=PAGE):
                for each in page:
                    if each["path"].startswith(whole):
                        path = each["path"].removeprefix(self._prefix)
                        found[path] = Kept(path, each["size"], each["last_modified"].timestamp())
                    elif each["path"] > whole:
                        return tuple(found[path] for path in sorted(found))
        return tuple(found[path] for path in sorted(found))

    async def remove(self, folder: str) -> None:
        places = asyncio.Semaphore(DELETES_AT_ONCE)

        async def one(path: str) -> None:
            async with places:
                try:
                    await obstore.delete_async(self._store, self._prefix + path)
                except FileNotFoundError as error:
                    self._must_be_there(error)

        with self._refusing(folder):
            # Payloads put their checkpoints here themselves: their names need not be names we would give.
            await asyncio.gather(*(one(path) for path in await self.list(folder + "/")))

    async def lend(self, path: str, seconds: float) -> str | None:
        """Signed with this server's own credential, which the address does not hold: it opens one object, to read."""
        parts_of(path)
        if self._open_at is not None:
            return f"{self._open_at}/{quote(self._prefix + path)}"
        with self._refusing(path):
            return await obstore.sign_async(self._store, "GET", self._prefix + path, timedelta(seconds=seconds))

    async def delete(self, path: str) -> None:
        parts_of(path)
        with self._refusing(path):
            try:
                await obstore.delete_async(self._store, self._prefix + path)
            except FileNotFoundError as error:
                self._must_be_there(error)

    async def _write(self, path: str, data: bytes, mode: PutMode) -> int:
        sha256, md5 = await asyncio.gather(_sha256(data), _md5(data))
        about: Attributes = {SHA256: sha256}
        for _ in range(WRITES):
            written = await obstore.put_async(
                self._store, self._prefix + path, data, mode=mode, use_multipart=False, attributes=about
            )
            tag = (written["e_tag"] or "").strip('"')
            if not _MD5.fullmatch(tag) or tag == md5:  # objects under a customer's key have other tags
                return self._generation(written["version"], {})
            # Damaged on the way: these very bytes in the place of that very write, whoever else writes.
            mode = {"e_tag": written["e_tag"], "version": written["version"]}
        raise ObjectsError(f"{self._address}: {path}: {WRITES} times other bytes arrived than were sent")

    def _generation(self, version: str | None, _attributes: Mapping[str, str]) -> int:
        if version is None or not version.isdigit():
            raise ObjectsError(f"{self._address}: the service names no generation ({version!r}); is it Cloud Storage?")
        return int(version)

    def _must_be_there(self, error: Exception) -> None:
        """An object that is not there is an answer; a bucket that is not there must not look like one."""
        if "NoSuchBucket" in str(error):
            raise NoBucket(f"{self._address}: there is no such bucket; make it, or correct the name") from error

    @contextlib.contextmanager
    def _refusing(self, path: str) -> Iterator[None]:
        """What the library and the service refuse, in the port's words."""
        try:
            yield
        except AlreadyExistsError:
            raise AlreadyThere(path) from None
        except (BaseError, OSError, ValueError) as error:
            self._must_be_there(error)
            kind = NoBucket if _DENIED.search(str(error)) else ObjectsError
            raise kind(f"{self._address}: {path}: {_first_line(error)}") from error


class StampedObjects(BucketObjects):
    """The same on S3 and what speaks like it: the generation is metadata, and `now` is where it comes from."""

    def __init__(self, store: S3Store, address: str, prefix: str, now: Callable[[], float]) -> None:
        super().__init__(store, address, prefix)
        self._now = now
        self._last = 0

    @override
    async def put(self, path: str, data: bytes) -> int:
        parts_of(path)
        with self._refusing(path):
            for _ in range(TURNS):
                there = await self._there(path)
                mode: PutMode = "create" if there is None else {"e_tag": there[1]}
                try:
                    return await self._write(path, data, mode, above=0 if there is None else there[0])
                except (AlreadyExistsError, PreconditionError):
                    continue  # another writer was faster, or an earlier try of ours whose answer was lost
        raise ObjectsError(f"{self._address}: {path}: {TURNS} other writers were faster; try again")

    @override
    async def _write(self, path: str, data: bytes, mode: PutMode, above: int = 0) -> int:
        digest = await _sha256(data)
        generation = self._last = max(int(self._now() * 1e9), self._last + 1, above + 1)
        await obstore.put_async(
            self._store,
            self._prefix + path,
            data,
            mode=mode,
            use_multipart=False,
            attributes={STAMP: str(generation), SHA256: digest},
        )
        return generation

    async def _there(self, path: str) -> tuple[int, str] | None:
        """Generation and tag of what is there now."""
        try:
            found = await obstore.get_async(self._store, self._prefix + path, options={"head": True})
        except FileNotFoundError as error:
            self._must_be_there(error)
            return None
        tag = found.meta["e_tag"]
        if tag is None:
            raise ObjectsError(f"{self._address}: {path}: the service names no ETag, so no write can be conditional")
        return self._generation(None, found.attributes), tag

    @override
    def _generation(self, version: str | None, attributes: Mapping[str, str]) -> int:
        stamp = attributes.get(STAMP, "")
        return int(stamp) if stamp.isdigit() else 0  # 0: somebody else put it there


def gcs_store(bucket: str, environment: Mapping[str, str]) -> GCSStore:
    """The library's own store for a bucket of Cloud Storage; `open_gcs` says which one and with whose credentials."""
    url = _emulator(environment)
    options = _client(http=bool(url))
    if url:
        # A token, though nobody looks at it: without one each write would ask the metadata address for one.
        return GCSStore(bucket, base_url=url, bearer_token="emulator", client_options=options, retry_config=_RETRY)
    return GCSStore(bucket, client_options=options, retry_config=_RETRY)


def open_gcs(bucket: str, prefix: str, environment: Mapping[str, str]) -> BucketObjects:
    """A bucket of Cloud Storage, or of the emulator that STORAGE_EMULATOR_HOST names as for Google's own clients.

    Credentials are found as Google's libraries find them: GOOGLE_APPLICATION_CREDENTIALS, gcloud's, the machine's own.
    """
    url = _emulator(environment)
    address = f"gs://{bucket}/{prefix}".rstrip("/")
    return BucketObjects(gcs_store(bucket, environment), address, prefix, open_at=f"{url}/{bucket}" if url else None)


def s3_store(bucket: str, environment: Mapping[str, str]) -> S3Store:
    """The library's own store for a bucket of S3; `open_s3` says which one and with whose credentials."""
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or ""
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    config: S3Config = {"endpoint": endpoint.rstrip("/")} if endpoint else {}
    key, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if key and secret:
        config |= {"access_key_id": key, "secret_access_key": secret}
    return S3Store(
        bucket,
        config=config,
        region=region,
        conditional_put="etag",
        checksum_algorithm="SHA256",
        disable_bulk_delete=True,
        client_options=_client(http=endpoint.startswith("http://")),
        retry_config=_RETRY,
    )


def open_s3(bucket: str, prefix: str, environment: Mapping[str, str], now: Callable[[], float]) -> StampedObjects:
    """A bucket of S3 or of a server that speaks like it (AWS_ENDPOINT_URL) and has conditional writes.

    Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a web identity, or the machine's own role.
    """
    return StampedObjects(s3_store(bucket, environment), f"s3://{bucket}/{prefix}".rstrip("/"), prefix, now)


def _emulator(environment: Mapping[str, str]) -> str:
    emulator = environment.get("STORAGE_EMULATOR_HOST", "")
    return (emulator if not emulator or "://" in emulator else f"http://{emulator}").rstrip("/")


def _client(*, http: bool) -> ClientConfig:
    return {
        "allow_http": http,
        "connect_timeout": timedelta(seconds=_CONNECT_S),
        "timeout": timedelta(seconds=_WHOLE_S),
    }


def _handing_over() -> bool:
    """Whether a thread of the library is inside of the interpreter, leaving an answer with an event loop."""
    # A thread of Python's own begins elsewhere. There is no other way to see the library's.
    return any(_outermost(frame).co_name == "call_soon_threadsafe" for frame in sys._current_frames().values())  # noqa: SLF001


def _outermost(frame: FrameType) -> CodeType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code


@atexit.register
def _let_answers_arrive() -> None:
    """Hold up the interpreter's end while threads of the library are inside of it.

    Such a thread wakes the loop by a write to a socket, and wants the interpreter back after it. The loop may have run
    to its end by then, and its process with it. An interpreter that ends makes who wants it back leave by
    `pthread_exit`, which cannot go through the library's frames: the process would abort after all was done and said.
    """
    pause, patience = _HANDOVER_S
    until = time.monotonic() + patience
    while _handing_over() and time.monotonic() < until:
        time.sleep(pause)


async def _sha256(data: bytes) -> str:
    if len(data) < _LONG_BYTES:
        return hashlib.sha256(data).hexdigest()
    return (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()


async def _md5(data: bytes) -> str:
    """What Cloud Storage names the bytes it got by, as an ETag."""
    if len(data) < _LONG_BYTES:
        return hashlib.md5(data, usedforsecurity=False).hexdigest()
    return (await asyncio.to_thread(lambda: hashlib.md5(data, usedforsecurity=False))).hexdigest()


def _first_line(error: Exception) -> str:
    """What the library says before its dump of inner values."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:500]
