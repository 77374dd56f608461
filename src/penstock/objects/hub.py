"""Models on the Hugging Face Hub: which commit a name means, which files it has, and these files, verified, on disk.

`inputs` reads addresses of the form `hf://ORG/NAME@COMMIT` through it; `pin` makes them from what users write. The
cache is the one that Hugging Face's own libraries use, laid out as they lay it out (blobs by hash, links by commit), so
that a model is fetched once by whoever needs it first. A download that was cut goes on where it ended; a file counts
only when its hash is the one that the Hub names for that commit. HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and HF_HOME mean
what they mean there. The token goes to the Hub and to nobody it redirects to. It must not run anything it fetched.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

import msgspec

from penstock.domain.admission import BadInput
from penstock.ports.objects import Damaged, ObjectsError

if TYPE_CHECKING:
    import httpx2

SCHEME: Final = "hf"
ENDPOINT: Final = "https://huggingface.co"
TRIES: Final = 5  #: of a request or a download that made no headway
PAUSE_S: Final = 1.0  #: after the first of them; each later one waits twice as long
CONNECT_S: Final = 10.0
SILENCE_S: Final = 60.0  #: without a byte
LISTING_BYTES_MAX: Final = 64 << 20
_PIECE: Final = 1 << 20
_NAME: Final = re.compile(r"(?P<model>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@]+))?", re.ASCII)
_PINNED: Final = re.compile(r"(?P<model>[^@]+)@(?P<commit>[0-9a-f]{40})(?:/(?P<path>.*))?", re.ASCII)
_COMMIT: Final = re.compile("[0-9a-f]{40}")
_HASHES: Final = {"sha256": 64, "sha1": 40}
_BUSY: Final = frozenset({408, 429, 500, 502, 503, 504})


class HubFile(NamedTuple):
    """A file of a commit. `tag` is `sha256:HASH` of its bytes, or `sha1:HASH` of them as a blob of git."""

    path: str
    size: int
    tag: str


class _Linked(msgspec.Struct, frozen=True):
    """A large file, of which git holds a pointer only."""

    sha256: str
    size: int


class _Sibling(msgspec.Struct, frozen=True, rename={"path": "rfilename", "blob": "blobId"}):
    path: str
    size: int | None = None
    blob: str | None = None
    lfs: _Linked | None = None


class _Listing(msgspec.Struct, frozen=True):
    """What the Hub says about a revision of a model; the rest of it does not matter here."""

    sha: str
    siblings: tuple[_Sibling, ...] = ()


# --- names ---
def is_name(text: str) -> bool:
    """Whether a text can be a model's name on the Hub: ORG/NAME, perhaps with @REVISION."""
    return _NAME.fullmatch(text) is not None


def pin(field: str, text: str, environment: Mapping[str, str] = os.environ) -> str:
    """`hf://ORG/NAME@COMMIT` of a name, whose revision (else `main`) may be a branch, a tag or a commit."""
    match = _NAME.fullmatch(text.removeprefix(f"{SCHEME}://").rstrip("/"))
    if match is None:
        raise BadInput(field, text, "is no name of a model on the Hub", "write ORG/NAME or ORG/NAME@REVISION")
    model, revision = match["model"], match["revision"] or "main"
    commit = revision if _COMMIT.fullmatch(revision) else _ask(model, revision, environment).sha
    _files(model, commit, _names(environment))  # what cannot be reached is known at once
    return f"{SCHEME}://{model}@{commit}"


def parse(rest: str) -> tuple[str, str, str]:
    """Model, commit and path of an address without its scheme."""
    match = _PINNED.fullmatch(rest)
    path = (match["path"] or "").strip("/") if match is not None else ""
    if match is None or _NAME.fullmatch(match["model"]) is None or (path and _leads_out(path)):
        rule = "names no commit of a model on the Hub"
        raise BadInput("data", f"{SCHEME}://{rest}", rule, "write hf://ORG/NAME@COMMIT; its datasets are not read")
    return match["model"], match["commit"], path


def _leads_out(path: str) -> bool:
    """Whether a name could mean something that is not below its folder."""
    return "\x00" in path or any(part in ("", ".", "..") for part in path.split("/"))


# --- what a commit holds ---
def files(rest: str, environment: Mapping[str, str]) -> tuple[HubFile, ...]:
    """The files at or below an address, in the order of their names, hidden ones left out."""
    model, commit, path = parse(rest)
    return tuple(
        file
        for file in _files(model, commit, _names(environment))
        if (not path or file.path == path or file.path.startswith(f"{path}/"))
        and not any(part.startswith(".") for part in file.path.removeprefix(path).split("/"))
    )


@functools.lru_cache(64)
def _files(model: str, commit: str, named: tuple[tuple[str, str], ...]) -> tuple[HubFile, ...]:
    """A commit never changes, so its listing is kept on disk beside the files."""
    environment = dict(named)
    kept = _folder(model, environment) / "penstock" / f"{commit}.json"
    try:
        listing = msgspec.json.decode(kept.read_bytes(), type=_Listing)
    except (OSError, msgspec.DecodeError):
        listing = _ask(model, commit, environment)
        if listing.sha != commit:
            raise ObjectsError(f"{model}: the Hub answers with commit {listing.sha} when asked for {commit}") from None
        with contextlib.suppress(OSError):  # a cache that only others may write to is still good to read from
            _write(kept, msgspec.json.encode(listing))
    return tuple(sorted(found for each in listing.siblings if (found := _file(each)) is not None))


def _file(sibling: _Sibling) -> HubFile | None:
    """None for a name that could lead out of the folder: nobody will ask for it."""
    if _leads_out(sibling.path):
        return None
    if sibling.lfs is not None:
        kind, digest, size = "sha256", sibling.lfs.sha256, sibling.lfs.size
    else:
        kind, digest, size = "sha1", sibling.blob or "", sibling.size if sibling.size is not None else -1
    if size < 0 or len(digest) != _HASHES[kind] or not set(digest) <= set("0123456789abcdef"):
        return None
    return HubFile(sibling.path, size, f"{kind}:{digest}")


def _ask(model: str, revision: str, environment: Mapping[str, str]) -> _Listing:
    url = f"{_endpoint(environment)}/api/models/{model}/revision/{quote(revision, safe='')}"
    with _client(environment) as client:
        answer = _persist(model, revision, lambda: client.get(url, params={"blobs": "true"}), environment)
    try:
        if len(answer.content) > LISTING_BYTES_MAX:
            raise msgspec.DecodeError(f"{len(answer.content)} bytes are too many")
        return msgspec.json.decode(answer.content, type=_Listing)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ObjectsError(f"{url}: the answer is not the Hub's: {error}; look at HF_ENDPOINT") from error


# --- files on this disk ---
def fetch(rest: str, size: int, tag: str, environment: Mapping[str, str]) -> Path:
    """The file on this machine; downloaded and verified if it is not there yet."""
    model, commit, path = parse(rest)
    folder = _folder(model, environment)
    link = folder / "snapshots" / commit / path
    if link.is_file() and link.stat().st_size == size:
        return link
    kind, _, digest = tag.partition(":")
    blob = folder / "blobs" / digest
    with _locked(folder.parent / ".locks" / folder.name / f"{digest}.lock"):
        if not (blob.is_file() and blob.stat().st_size == size):
            url = f"{_endpoint(environment)}/{model}/resolve/{commit}/{quote(path)}"
            _download(_Order(model, url, blob, size, kind, digest), environment)
        _link(link, blob)
    return link


def beginning(rest: str, size: int, count: int, environment: Mapping[str, str]) -> bytes:
    """The first bytes of a file of that size, without the rest of it; not verified, as the hash is of the whole."""
    model, commit, path = parse(rest)
    link = _folder(model, environment) / "snapshots" / commit / path
    if link.is_file() and link.stat().st_size == size:
        with link.open("rb") as file:
            return file.read(count)
    url, data = f"{_endpoint(environment)}/{model}/resolve/{commit}/{quote(path)}", bytearray()
    headers = {"Range": f"bytes=0-{count - 1}"}

    def ask() -> httpx2.Response:
        data.clear()
        with client.stream("GET", url, headers=headers, follow_redirects=True) as answer:
            if answer.status_code in (200, 206):
                for piece in answer.iter_raw():
                    data.extend(piece)
                    if len(data) >= count:  # who does not know ranges sends the whole file
                        break
            return answer

    with _client(environment) as client:
        _persist(model, commit, ask, environment)
    return bytes(data[:count])


class _Order(NamedTuple):
    model: str
    url: str
    blob: Path
    size: int
    kind: str
    digest: str


def _download(order: _Order, environment: Mapping[str, str]) -> None:
    """Into `BLOB.incomplete`, which a later try goes on from; it gets its name when its hash is right."""
    part = order.blob.with_name(f"{order.digest}.incomplete")
    part.parent.mkdir(parents=True, exist_ok=True)
    for again in (True, False):  # a part that an earlier process left may be damaged: then once from the beginning
        _complete(order, part, environment)
        if _hash(part, order.kind, order.size) == order.digest:
            part.replace(order.blob)
            return
        part.unlink()
        if not again:
            break
    raise Damaged(f"{order.url}: the bytes are not those that the Hub names ({order.kind} {order.digest})")


def _complete(order: _Order, part: Path, environment: Mapping[str, str]) -> None:
    """Append what is missing, over as many connections as it takes, as long as each brings something."""
    tries = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        if before > order.size:
            part.unlink()
            continue
        if before == order.size and part.exists():
            return
        error = _append(order, part, before, environment)
        now = part.stat().st_size if part.exists() else 0
        tries = 0 if now > before else tries + 1
        if tries >= TRIES:
            raise _unreachable(order.model, error, environment)
        if now < order.size and now <= before:
            time.sleep(PAUSE_S * 2 ** (tries - 1))


def _append(order: _Order, part: Path, start: int, environment: Mapping[str, str]) -> object:
    """One connection's worth; what ended it, if it ended early."""
    import httpx2

    headers = {"Range": f"bytes={start}-"} if start else {}
    try:
        with (
            _client(environment) as client,
            client.stream("GET", order.url, headers=headers, follow_redirects=True) as answer,
        ):
            if answer.status_code in _BUSY:
                return f"status {answer.status_code}"
            if answer.status_code == 416:
                part.unlink(missing_ok=True)
                return "status 416"
            if answer.status_code not in (200, 206):
                raise _refusal(order.model, "", answer, environment)
            # Who answers with the whole file begins at its beginning.
            resumes = answer.status_code == 206 and answer.headers.get("content-range", "").startswith(
                f"bytes {start}-"
            )
            if start and not resumes:
                part.unlink()
            left = order.size - (start if resumes else 0)
            with part.open("ab") as file:
                for piece in answer.iter_raw():
                    file.write(piece[:left])
                    left -= len(piece)
                    if left < 0:
                        break
                file.flush()
                os.fsync(file.fileno())
    except (httpx2.RequestError, httpx2.StreamError) as error:
        return error
    return "the connection ended early"


def _hash(file: Path, kind: str, size: int) -> str:
    """Of the bytes, or of the blob that git would make of them."""
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _link(link: Path, blob: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{link.name}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(blob, link.parent))
    fresh.replace(link)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(data)
    fresh.replace(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Several workers of one machine, and Hugging Face's own library, fetch a file once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise BadInput("HF_HUB_CACHE", str(path.parents[2]), rule, "set HF_HUB_CACHE to a directory") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- the Hub ---
def _names(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What decides where the Hub and the cache are, and who asks."""
    return tuple(sorted(pair for pair in environment.items() if pair[0].startswith("HF_") or pair[0] == "HOME"))


def _endpoint(environment: Mapping[str, str]) -> str:
    found = (environment.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    if not found.startswith(("https://", "http://")):
        raise BadInput("HF_ENDPOINT", found, "is no address of a Hub", "write https://HOST")
    return found


def cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Where files of the Hub are kept on this machine."""
    own = environment.get("HF_HUB_CACHE")
    home = Path(environment.get("HF_HOME") or Path(environment.get("HOME") or "~") / ".cache" / "huggingface")
    return (Path(own) if own else home / "hub").expanduser()


def _folder(model: str, environment: Mapping[str, str]) -> Path:
    return cache(environment) / f"models--{model.replace('/', '--')}"


def _client(environment: Mapping[str, str]) -> httpx2.Client:
    import httpx2

    token = environment.get("HF_TOKEN", "").strip()
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
    return httpx2.Client(headers=headers, timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S))


def _persist(
    model: str, revision: str, call: Callable[[], httpx2.Response], environment: Mapping[str, str]
) -> httpx2.Response:
    """The answer to a short question; asked again while the Hub is busy."""
    import httpx2

    error: object = None
    for turn in range(TRIES):
        if turn:
            time.sleep(PAUSE_S * 2 ** (turn - 1))
        try:
            answer = call()
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as found:
            raise _unreachable(model, found, environment) from found  # no network is no matter of patience
        except httpx2.RequestError as found:
            error = found
            continue
        if answer.status_code in (200, 206):
            return answer
        if answer.status_code not in _BUSY:
            raise _refusal(model, revision, answer, environment)
        error = f"status {answer.status_code}"
    raise _unreachable(model, error, environment)


def _unreachable(model: str, error: object, environment: Mapping[str, str]) -> ObjectsError:
    said = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
    return ObjectsError(
        f"{model}: {_endpoint(environment)} cannot be reached from here ({said}); fetch the model elsewhere and give "
        "its directory, gs:// or s3://, or name a mirror with HF_ENDPOINT"
    )


def _refusal(model: str, revision: str, answer: Any, environment: Mapping[str, str]) -> BadInput | ObjectsError:
    """The Hub's no, in a line: who may not is told what to do, and 401 also means that there is no such model."""
    code, status = answer.headers.get("x-error-code", ""), answer.status_code
    token = "HF_TOKEN is set, but not for it" if environment.get("HF_TOKEN") else "set HF_TOKEN"
    if code == "GatedRepo":
        rule = f"is gated: {_endpoint(environment)}/{model} has the terms to accept"
        return BadInput("model", model, rule, f"accept them, and {token}")
    if code == "RevisionNotFound":
        return BadInput("model", f"{model}@{revision}", "has no such revision on the Hub", "look at its branches")
    if code == "EntryNotFound":
        return ObjectsError(f"{model}: {answer.url} is not there, though the Hub lists it; try again")
    if code == "RepoNotFound" or status in (401, 404):
        rule = f"is no directory here, and no model on the Hub that may be read ({status})"
        return BadInput("model", model, rule, f"look at the name; if it is private, {token}")
    if status == 403:
        return BadInput("model", model, "is not for you on the Hub (403)", f"ask its owner, and {token}")
    return ObjectsError(f"{model}: the Hub answers {status} {answer.headers.get('x-error-message', '')}".rstrip())
