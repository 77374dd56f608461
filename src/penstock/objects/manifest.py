"""The list of what a snapshot holds, as canonical JSON whose SHA-256 is the snapshot's id, and the rules it obeys.

`snapshots` makes one, `archive` unpacks one, and both call `check`: a manifest comes from whoever may submit jobs, so a
host believes nothing in it. A file is part of one blob, or several whole blobs in a row; modes are 644 and 755; links
stay inside, followed through the other links; no entry lies under another that is no folder. It must not touch files.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from penstock.domain import limits
from penstock.domain.admission import BadInput

PLAIN_MODE: Final = 0o644
PROGRAM_MODE: Final = 0o755
NAME_BYTES_MAX: Final = 255  #: of one name: what file systems take
PATH_BYTES_MAX: Final = 1024  #: of a whole path, so that it fits below any folder of a host
LINK_STEPS_MAX: Final = 1_000_000  #: names looked at while following all links: far above any real tree
LINK_HOPS_MAX: Final = 40  #: links followed for one link: the kernel's own limit
#: Marks that change the direction of text: a name with them reads as another name.
TURNING: Final = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u061c")

Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0)]


class BadSnapshot(BadInput):
    """A directory that cannot be frozen, or a manifest that no host may unpack."""


class Blob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A blob the snapshot needs: `size` bytes once decoded, `stored` on the way."""

    id: Sha256
    size: Count
    stored: Count


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="file", tag_field="kind"):
    """`sha256` is of the content. `parts` are places in the manifest's list of blobs."""

    path: str
    mode: int
    size: Count
    sha256: Sha256
    parts: tuple[Count, ...] = ()
    offset: Count = 0


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="link", tag_field="kind"):
    path: str
    target: str


class Folder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="folder", tag_field="kind"):
    """A folder with nothing in it; the others follow from the paths."""

    path: str


Entry = File | Link | Folder


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blobs in order of id, entries in order of path."""

    blobs: tuple[Blob, ...] = ()
    entries: tuple[Entry, ...] = ()
    version: int = 1

    @property
    def files(self) -> tuple[File, ...]:
        return tuple(entry for entry in self.entries if isinstance(entry, File))

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(entry for entry in self.entries if isinstance(entry, Link))

    @property
    def size(self) -> int:
        """Bytes once unpacked."""
        return sum(file.size for file in self.files)


_DECODER: Final = msgspec.json.Decoder(Manifest)


def to_bytes(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest, order="sorted")


def snapshot_id(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def parse(data: bytes, id: str) -> Manifest:
    """A checked manifest from its canonical bytes; `id` must be their SHA-256."""
    if len(data) > limits.SNAPSHOT_MANIFEST_BYTES_MAX:
        raise BadSnapshot(
            "snapshot", id, f"has a manifest of {len(data)} bytes; {limits.SNAPSHOT_MANIFEST_BYTES_MAX} are the most"
        )
    if snapshot_id(data) != id:
        raise BadSnapshot("snapshot", id, "is not the SHA-256 of its manifest", "send it again")
    try:
        manifest = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadSnapshot("snapshot", id, f"has a manifest that cannot be read: {error}") from error
    # One form only: no key given twice, no spaces, no other order. What was hashed is what is seen.
    if to_bytes(manifest) != data:
        raise BadSnapshot("snapshot", id, "has a manifest that is not in canonical form", "freeze it with `tpu`")
    check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """Every rule of this module, whoever made the manifest; raises `BadSnapshot`."""
    if manifest.version != 1:
        raise BadSnapshot("version", manifest.version, "of a manifest is unknown here", "update the agent")
    if len(manifest.entries) > limits.SNAPSHOT_FILES_MAX:
        raise BadSnapshot(
            "files",
            len(manifest.entries),
            f"are more than the {limits.SNAPSHOT_FILES_MAX} of one snapshot",
            "name data folders in .tpuignore",
        )
    if manifest.size > limits.SNAPSHOT_BYTES_MAX:
        raise BadSnapshot(
            "size",
            manifest.size,
            f"bytes are more than the {limits.SNAPSHOT_BYTES_MAX} of one snapshot",
            "name data folders in .tpuignore and keep data in a bucket",
        )
    _check_blobs(manifest)
    _check_tree(manifest.entries)
    _check_twins([entry.path for entry in manifest.entries])
    _check_links(manifest.links)


def check_path(path: str) -> None:
    """A path that stays inside, can be shown on one line, and exists on every file system we meet."""
    if not path or path.startswith("/"):
        raise BadSnapshot("path", path, "is empty or absolute", "use paths below the directory")
    try:
        encoded = path.encode()
    except UnicodeEncodeError as error:
        raise BadSnapshot("path", path, "is not UTF-8", "rename it or name it in .tpuignore") from error
    if len(encoded) > PATH_BYTES_MAX:
        raise BadSnapshot("path", path, f"is longer than {PATH_BYTES_MAX} bytes", "shorten it")
    for name in path.split("/"):
        if name in ("", ".", ".."):
            raise BadSnapshot("path", path, f"has {name!r} as a name in it", "use plain paths below the directory")
        if len(name.encode()) > NAME_BYTES_MAX:
            raise BadSnapshot("path", path, f"has a name longer than {NAME_BYTES_MAX} bytes", "shorten it")
    if not path.isprintable() and any(unicodedata.category(sign) == "Cc" or sign in TURNING for sign in path):
        raise BadSnapshot("path", path, "has control or direction marks", "rename it or name it in .tpuignore")


def leads_inside(link: str, target: str, links: Mapping[str, str], steps: Iterator[int]) -> bool:
    """Whether the link, followed through other links as the kernel would, never leaves. A circle is not inside.

    `steps` is used up by one per name looked at; when it ends, so does the search.
    """
    at = link.split("/")[:-1]
    todo = target.split("/")[::-1]
    hops = 0
    while todo:
        name = todo.pop()
        if next(steps, None) is None:
            return False
        if name in ("", "."):
            continue
        if name == "..":
            if not at:
                return False
            at.pop()
            continue
        at.append(name)
        further = links.get("/".join(at))
        if further is not None:
            hops += 1
            if hops > LINK_HOPS_MAX or further.startswith("/"):
                return False
            at.pop()
            todo.extend(further.split("/")[::-1])
    return True


def _check_blobs(manifest: Manifest) -> None:
    before = ""
    for blob in manifest.blobs:
        if blob.id <= before:
            raise BadSnapshot("blobs", blob.id, "are not in order, or one is there twice")
        if not 0 < blob.size <= limits.BLOB_BYTES_MAX or not 0 < blob.stored <= limits.BLOB_BYTES_MAX:
            raise BadSnapshot("blob", blob.id, f"is empty or larger than {limits.BLOB_BYTES_MAX} bytes")
        before = blob.id
    used: set[int] = set()
    for file in manifest.files:
        used.update(file.parts)
        if file.mode not in (PLAIN_MODE, PROGRAM_MODE):
            raise BadSnapshot("mode", oct(file.mode), f"of {file.path!r} is neither 0o644 nor 0o755")
        if any(part >= len(manifest.blobs) for part in file.parts):
            raise BadSnapshot("parts", file.path, "names a blob that is not in the list")
        sizes = [manifest.blobs[part].size for part in file.parts]
        if len(sizes) == 1:
            fits = file.size > 0 and file.offset + file.size <= sizes[0]
        else:
            fits = file.offset == 0 and file.size == sum(sizes)
        if not fits:
            raise BadSnapshot("size", file.size, f"of {file.path!r} does not fit its blobs")
    if len(used) < len(manifest.blobs):
        raise BadSnapshot("blobs", len(manifest.blobs) - len(used), "of the list belong to no file")


def _check_tree(entries: tuple[Entry, ...]) -> None:
    leaves: set[str] = set()
    before = ""
    for entry in entries:
        check_path(entry.path)
        if entry.path <= before:
            raise BadSnapshot("path", entry.path, "is out of order, or there twice")
        before = entry.path
        leaves.add(entry.path)
    for entry in entries:
        cut = entry.path.rfind("/")
        while cut > 0:
            if entry.path[:cut] in leaves:
                raise BadSnapshot("path", entry.path, "lies below a file, a link or an empty folder")
            cut = entry.path.rfind("/", 0, cut)


def _check_twins(paths: list[str]) -> None:
    """Names that differ in letter case are two files; names that look the same to everybody are refused."""
    if all(path.isascii() for path in paths):
        return
    seen: dict[str, str] = {}
    for path in paths:
        end = path.find("/")
        while True:
            name = path if end < 0 else path[:end]
            if seen.setdefault(unicodedata.normalize("NFC", name), name) != name:
                raise BadSnapshot("path", path, "is there twice in two Unicode forms", "rename one of them")
            if end < 0:
                break
            end = path.find("/", end + 1)


def _check_links(links: tuple[Link, ...]) -> None:
    targets = {link.path: link.target for link in links}
    steps = iter(range(1, LINK_STEPS_MAX))
    for link in links:
        if not link.target or "\0" in link.target or len(link.target.encode()) > PATH_BYTES_MAX:
            raise BadSnapshot("link", link.path, "has an empty or impossible target")
        if link.target.startswith("/") or not leads_inside(link.path, link.target, targets, steps):
            raise BadSnapshot("link", link.path, f"leads out of the directory, or in a circle: {link.target[:60]!r}")
