"""How fast a working directory is frozen and sent: first, again, and with one file changed.

`python bench/snapshot.py [--megabytes N] [--files N] [--json]` writes a tree into a temporary directory, uploads it to
a stand-in server on the same disk that checks every hash and syncs every blob, changes one file and uploads again: once
a large one, once a small one of a pack. Exits with 1 when a re-submit takes more than 2 s or sends more than what
changed. No network and no API are in these figures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from penstock.client.upload import send
from penstock.domain import limits
from penstock.objects.archive import unpack
from penstock.objects.content import name_of
from penstock.objects.manifest import parse
from penstock.objects.snapshots import Frozen, freeze

RESUBMIT_S_MAX = 2.0
SMALL_FILES = 10_000


class Disk:
    """Takes blobs as a server with a directory would: hash checked, written, synced, renamed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def missing_blobs(self, hashes: Sequence[str]) -> list[str]:
        return [id for id in hashes if not (self._folder / id).exists()]

    def put_blob(self, sha256: str, data: bytes) -> None:
        if name_of(data) != sha256:
            raise ValueError(sha256)
        with (self._folder / f"{sha256}.new").open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        (self._folder / f"{sha256}.new").rename(self._folder / sha256)

    def put_snapshot(self, sha256: str, data: bytes) -> None:
        parse(data, sha256)
        (self._folder / f"{sha256}.json").write_bytes(data)

    def read(self, id: str) -> bytes:
        return (self._folder / id).read_bytes()


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One upload."""

    what: str
    seconds: float
    read_mb: float
    sent_mb: float
    ok: bool = True


def write_tree(root: Path, megabytes: int, files: int) -> None:
    """Half of the large files are noise and half are text, so that both forms of blobs occur; and many small ones."""
    dice = random.Random(0)
    size = megabytes * 1_000_000 // files
    for number in range(files):
        folder = root / f"part{number % 20}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = dice.randbytes(size if number % 2 else size // 4)
        (folder / f"{number}.bin").write_bytes(noise if number % 2 else noise.hex().encode() * 2)
    for number in range(SMALL_FILES):
        folder = root / "code" / f"package{number % 100}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"module{number}.py").write_text(f"VALUE = {number}\n" * 40)


def measured(what: str, root: Path, cache: Path, disk: Disk, allowed: Callable[[int], bool]) -> tuple[Figure, Frozen]:
    start = time.perf_counter()
    frozen = freeze(root, cache)
    sent = send(disk, frozen)
    seconds = time.perf_counter() - start
    ok = allowed(sent) and (what == "first" or seconds <= RESUBMIT_S_MAX)
    figure = Figure(what=what, seconds=seconds, read_mb=frozen.read_bytes / 1e6, sent_mb=sent / 1e6, ok=ok)
    return figure, frozen


def run(folder: Path, megabytes: int, files: int) -> tuple[list[Figure], Frozen]:
    root, cache, disk = folder / "tree", folder / "cache", Disk(folder / "blobs")
    write_tree(root, megabytes, files)
    time.sleep(0.1)  # files younger than the clock's tick are read again, rightly; a user's tree is older
    figures = [measured("first", root, cache, disk, lambda _: True)[0]]
    figures.append(measured("unchanged", root, cache, disk, lambda sent: sent == 0)[0])
    large = root / "part1" / "1.bin"
    large.write_bytes(large.read_bytes()[::-1])
    size = large.stat().st_size
    figures.append(measured("one large file changed", root, cache, disk, lambda sent: size <= sent < 1.01 * size)[0])
    (root / "code" / "package7" / "module7.py").write_text("VALUE = 'seven'\n")
    last, frozen = measured(
        "one small file changed", root, cache, disk, lambda sent: 0 < sent < limits.SNAPSHOT_PACK_BYTES
    )
    figures.append(last)
    start = time.perf_counter()
    unpack(frozen.manifest, disk.read, folder / "back")
    seconds = time.perf_counter() - start
    figures.append(Figure(what="unpacked and verified", seconds=seconds, read_mb=frozen.manifest.size / 1e6, sent_mb=0))
    return figures, frozen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        figures, frozen = run(Path(folder), arguments.megabytes, arguments.files)
    if arguments.json:
        print(json.dumps([msgspec.to_builtins(figure) for figure in figures]))
    else:
        manifest = frozen.manifest
        print(f"{len(manifest.files)} files, {manifest.size / 1e6:.0f} MB, {len(manifest.blobs)} blobs")
        for figure in figures:
            mark = "" if figure.ok else "  MISSED"
            print(
                f"{figure.what:24} {figure.seconds:7.2f} s  read {figure.read_mb:7.1f} MB"
                f"  sent {figure.sent_mb:8.3f} MB{mark}"
            )
    return 0 if all(figure.ok for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
